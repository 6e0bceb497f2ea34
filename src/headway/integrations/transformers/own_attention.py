"""Models of `transformers` that keep their own attention are named when the string is set on them.

`transformers` takes any registered string for any model. One whose layers never ask for an attention function computes
as before, and nothing says so. Importing this module puts checks in front of the methods of `PreTrainedModel` that take
the string, and of the one that ends the construction.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headway.integrations.transformers.interface import NAME, cannot

Implementation = str | dict[str, Any] | None
KEEPS = "keeps its own attention: its layers ask `transformers` for no other"


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that ask their config for an attention function, by name."""
    names = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
    return {
        name: module
        for name, module in model.named_modules()
        if (code := getattr(unwrap(type(module).forward), "__code__", None)) and names <= {*code.co_names}
    }


def check_class(model: PreTrainedModel, implementation: Implementation) -> None:
    """Raises BackendError where `implementation` gives our attention to a model, before it has any layers, of a class
    that takes none."""
    if implementation == NAME and not model._can_set_attn_implementation():
        _refuse(model, model, KEEPS)


def check_layers(model: PreTrainedModel, implementation: Implementation) -> None:
    """Raises BackendError where `implementation` gives our attention to layers that do not ask for any; a dict names
    configs by their attributes."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    named = [parts] if implementation == NAME else []
    if isinstance(implementation, dict):
        ours = (name for name, value in implementation.items() if value == NAME)
        configs = [getattr(model.config, name) if name else model.config for name in ours]
        named = [[part for part in parts if part.config is config] for config in configs]
    for some in named:
        for part in some:
            if not part._can_set_attn_implementation():
                _refuse(part, model, KEEPS)
        if some and not any(map(attention_layers, some)):
            _refuse(some[0], model, "has no attention that it asks `transformers` for")


def check_whole(model: PreTrainedModel, _: None) -> None:
    """`check_layers` for a model whose layers have just been made by its config. A part without attention (a
    convolution in front of it) is no error, in a model that has some."""
    is_ours = model.config._attn_implementation == NAME
    if is_ours and not attention_layers(model) and not _is_being_made(model):
        check_layers(model, NAME)


def _refuse(part: PreTrainedModel, model: PreTrainedModel, why: str) -> None:
    raise cannot(
        f"{type(part).__name__} {why}, so the string would change nothing",
        "leave it out for this model"
        if part is model
        else f'name the configs of the parts that do, as in {{"text_config": "{NAME}"}}',
    )


def _is_being_made(part: PreTrainedModel) -> bool:
    """Whether a part is made in the constructor of a model, which may have other parts."""
    frame = sys._getframe().f_back
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, PreTrainedModel) and owner is not part:
            return True
        frame = frame.f_back
    return False


def checked(method: Callable[..., Any], check: Callable[..., None], argument: str) -> Callable[..., Any]:
    """A method that takes the string as `argument`, with the check in front of it."""

    @wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self, args[0] if args else kwargs.get(argument))
        return method(self, *args, **kwargs)

    return call


for name, check, argument in (
    ("get_correct_attn_implementation", check_class, "requested_attention"),
    ("set_attn_implementation", check_layers, "attn_implementation"),
    ("post_init", check_whole, ""),
):
    setattr(PreTrainedModel, name, checked(getattr(PreTrainedModel, name), check, argument))
