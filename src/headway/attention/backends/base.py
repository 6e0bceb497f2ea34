"""The description of a backend: its name, its capabilities as data, and the functions that compute."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.partial import Partial
from headway.patterns.program import opaque

CPU, CUDA, BOTH = ("cpu",), ("cuda",), ("cpu", "cuda")


@dataclass(frozen=True)
class Capabilities:
    """The features of a call that a backend supports.

    devices         devices on which it runs
    dtypes          dtypes of q; None for any
    gradient        devices on which it can be differentiated
    lse             devices on which it returns a logsumexp
    lse_gradient    whether the logsumexp can be differentiated, too
    any_pattern     whether it runs patterns with a leaf that has no primitive (patterns/program.py)
    any_queries     whether queries may be other tokens than those in the slots of the keys
    dropout         whether it has dropout of weights, keyed by their place
    scores          whether it applies steps to the scores; `slot_scores`: also those that are tied to slots
    keep            whether it takes an additional mask, `keep`
    value_width     whether values may have another width than keys
    int8            whether it reads int8 keys and values; other backends get them dequantized
    stores          whether it reads keys in place in a store (`KeyValues.slots`); other backends get them gathered
    stores_scores   whether it builds the whole score matrix
    """

    devices: tuple[str, ...] = BOTH
    dtypes: tuple[torch.dtype, ...] | None = None
    gradient: tuple[str, ...] = BOTH
    lse: tuple[str, ...] = BOTH
    lse_gradient: bool = True
    any_pattern: bool = True
    any_queries: bool = True
    dropout: bool = True
    scores: bool = True
    slot_scores: bool = False
    keep: bool = False
    value_width: bool = True
    int8: bool = False
    stores: bool = False
    stores_scores: bool = False

    def unsupported_reason(self, call: Call, lse: bool, device: str) -> str | None:
        """Returns the first feature that the call needs and that is not supported on `device`, as a reason; None if
        all are supported."""
        lse, grad = lse or len(call.keys) > 1, call.needs_grad
        leaf = None if self.any_pattern else opaque(call.pattern)
        wide = any(part.k.shape[-1] != part.v.shape[-1] for part in call.keys)
        tied = any(step.by_slot for step in call.score)
        steps = ", ".join(type(step).__name__ for step in call.score)
        types = " and ".join(map(_name, self.dtypes or ()))
        checks = (
            (device not in self.devices, f"it runs on {' and '.join(self.devices)}, not on {device}"),
            (grad and device not in self.gradient, f"it has no backward on {device}"),
            (call.dropout > 0 and not self.dropout, "it does not support dropout"),
            (steps and not self.scores, f"it does not support score={steps}"),
            (tied and not self.slot_scores, "it does not support a bias tensor per slot"),
            (call.keep is not None and not self.keep, "it does not support a keep mask"),
            (wide and not self.value_width, "it needs keys and values of one width"),
            (lse and device not in self.lse, f"it returns no logsumexp on {device}"),
            (lse and grad and not self.lse_gradient, "its logsumexp has no gradient"),
            (
                types and call.q.dtype not in (self.dtypes or ()),
                f"its kernels take {types}, not {_name(call.q.dtype)}",
            ),
            (leaf, f"its kernels do not support {type(leaf).__name__}, which has no primitive"),
        )
        return first_failed(*checks)


def first_failed(*checks: tuple[object, str]) -> str | None:
    """Returns the reason of the first pair (failed, reason) whose check failed, or None."""
    return next((reason for failed, reason in checks if failed), None)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Gradients(NamedTuple):
    """Gradients of q, of each k and each v, and of the tensors of the scores, in any floating-point dtype."""

    q: Tensor
    k: list[Tensor]
    v: list[Tensor]
    parameters: list[Tensor]


class Status(NamedTuple):
    """Whether a backend can be used on this machine, and one line that describes it or says what is missing."""

    usable: bool
    what: str


Forward = Callable[[Call, bool], Partial]
Backward = Callable[[Call, Tensor, Tensor, Tensor, Tensor], Gradients]
Repeated = Callable[[Tensor, KeyValues], Partial]


@dataclass(frozen=True)
class Backend:
    """One way to compute a call.

    name            the name that calls select it by
    about           one line for `headway doctor`
    forward         (call, lse) -> the partial of a supported call; without `lse`, the lse of a single key set may be
                    NaN
    backward        (call, out, lse, d_out, d_lse) -> the gradients, from the final out and lse, as `autograd` calls it;
                    if None, torch differentiates `forward`
    capabilities    the features it supports, as data
    limits          (call, device) -> any other reason why it cannot run the call, or None
    repeat          (call, lse) -> a function (q, keys) -> the partial of the same call on other tensors, which holds no
                    tensor of the call; or None if calls of this kind cannot be repeated
    operator        runs the call as a torch operator with its own backward, for graphs that are traced
    status          whether it can be used on this machine; if None, it can
    """

    name: str
    about: str
    forward: Forward
    backward: Backward | None = None
    capabilities: Capabilities = Capabilities()
    limits: Callable[[Call, str], str | None] = lambda call, device: None
    repeat: Callable[[Call, bool], Repeated | None] | None = None
    operator: Callable[[Call], Partial] | None = None
    status: Callable[[], Status] | None = None

    def unsupported_reason(self, call: Call, lse: bool, device: str) -> str | None:
        """Returns why it cannot run this call on `device`, or None if it can. `lse`: the logsumexp is needed."""
        return self.capabilities.unsupported_reason(call, lse, device) or self.limits(call, device)
