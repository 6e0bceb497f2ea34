"""Checks that refuse `attn_implementation="headway"` for models that would ignore it.

`transformers` accepts any registered string for any model. A model whose layers never ask for an attention function
would silently compute as before. Importing this module wraps the methods of `PreTrainedModel` that take the string, and
the one that ends construction, with checks."""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headway.integrations.transformers.interface import NAME, cannot

Implementation = str | dict[str, Any] | None
KEEPS = "has its own attention code, which does not use attn_implementation"


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers that ask their config for an attention function, by name."""
    names = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}
    return {
        name: module
        for name, module in model.named_modules()
        if (code := getattr(unwrap(type(module).forward), "__code__", None)) and names <= {*code.co_names}
    }


def check_class(model: PreTrainedModel, implementation: Implementation) -> None:
    """Raises BackendError if `implementation` selects our attention for a class of models that does not support other
    attention functions; called before the model has layers."""
    if implementation == NAME and not model._can_set_attn_implementation():
        _refuse(model, model, KEEPS)


def check_layers(model: PreTrainedModel, implementation: Implementation) -> None:
    """Raises BackendError if `implementation` selects our attention for layers that do not ask for an attention
    function; a dict selects by the configs' attribute names."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    named = [parts] if implementation == NAME else []
    if isinstance(implementation, dict):
        ours = (name for name, value in implementation.items() if value == NAME)
        configs = [getattr(model.config, name) if name else model.config for name in ours]
        named = [[part for part in parts if part.config is config] for config in configs]
    for models in named:
        for part in models:
            if not part._can_set_attn_implementation():
                _refuse(part, model, KEEPS)
        if models and not any(map(attention_layers, models)):
            _refuse(models[0], model, "has no attention layer that uses attn_implementation")


def check_whole(model: PreTrainedModel, _: None) -> None:
    """Applies `check_layers` to a model that has just been constructed from its config. In a model with attention, a
    part without any (such as convolutions in front) is no error."""
    is_ours = model.config._attn_implementation == NAME
    if is_ours and not attention_layers(model) and not _is_being_made(model):
        check_layers(model, NAME)


def _refuse(part: PreTrainedModel, model: PreTrainedModel, why: str) -> None:
    raise cannot(
        f"{type(part).__name__} {why}, so this setting would change nothing",
        "leave it out for this model"
        if part is model
        else f'set it only for the configs of the parts that do, as in {{"text_config": "{NAME}"}}',
    )


def _is_being_made(part: PreTrainedModel) -> bool:
    """Returns whether a part is being constructed inside the constructor of a model, which may have other parts."""
    frame = sys._getframe().f_back
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        if isinstance(owner, PreTrainedModel) and owner is not part:
            return True
        frame = frame.f_back
    return False


def checked(method: Callable[..., Any], check: Callable[..., None], argument: str) -> Callable[..., Any]:
    """Returns the method, which takes the string as `argument`, with the check before it."""

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
