"""Models of `transformers` that keep their own attention are named when the string is set on them.

`transformers` takes any registered string for any model. One whose layers never ask for an attention function computes
as before, and at construction nothing says so. Importing this module puts a check in front of the methods of
`PreTrainedModel` that take the string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from headway.integrations.transformers.interface import NAME, cannot

Implementation = str | dict[str, Any] | None


def check(model: PreTrainedModel, implementation: Implementation) -> None:
    """Raises BackendError where `implementation` gives our attention to layers that do not ask for any."""
    for part in _given_ours(model, implementation):
        if not part._can_set_attn_implementation():
            raise cannot(
                f"{type(part).__name__} keeps its own attention: its layers ask `transformers` for no other, so the "
                "string would change nothing",
                "leave it out for this model"
                if part is model
                else f'name the configs of the parts that do, as in {{"text_config": "{NAME}"}}',
            )


def _given_ours(model: Any, implementation: Implementation) -> Iterator[Any]:
    """The models, this one and those in it, whose configs get our name; a dict names configs by their attributes."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if isinstance(implementation, dict):
        ours = {key for key, value in implementation.items() if value == NAME}
        configs = {id(getattr(model.config, key) if key else model.config) for key in ours}
        parts = [part for part in parts if id(part.config) in configs]
    elif implementation != NAME:
        return
    yield from parts


def checked(method: Callable[..., Any], argument: str) -> Callable[..., Any]:
    """A method that takes the string as `argument`, with the check in front of it."""

    @wraps(method)
    def call(self: Any, *given: Any, **named: Any) -> Any:
        check(self, given[0] if given else named.get(argument))
        return method(self, *given, **named)

    return call


for name, argument in (
    ("get_correct_attn_implementation", "requested_attention"),
    ("set_attn_implementation", "attn_implementation"),
):
    setattr(PreTrainedModel, name, checked(getattr(PreTrainedModel, name), argument))
