"""A backend: its name, its capabilities as data, and the functions that compute."""

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

    devices         on which it runs
    dtypes          of q; None: any
    gradient        devices on which it can be differentiated
    lse             devices on which it returns a logsumexp
    lse_gradient    the logsumexp can be differentiated, too
    any_pattern     it runs patterns with a leaf that has no primitive (patterns/program.py)
    any_queries     queries need not be the slots of the keys
    dropout         of weights, keyed by place
    scores          steps on the scores; `slot_scores`: those that are tied to slots, too
    keep            a mask of the call's own
    value_width     values that are not as wide as keys
    int8            it reads int8 keys and values as they are; others are given the numbers that they stand for
    stores          it reads keys where they lie in a store (`KeyValues.slots`); others are given them side by side
    stores_scores   it builds the whole score matrix
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
        """The first thing that the call needs on `device` and that is not supported; None if there is none."""
        lse, grad = lse or len(call.keys) > 1, call.needs_grad
        leaf = None if self.any_pattern else opaque(call.pattern)
        wide = any(part.k.shape[-1] != part.v.shape[-1] for part in call.keys)
        tied = any(step.by_slot for step in call.score)
        steps = ", ".join(type(step).__name__ for step in call.score)
        types = " and ".join(map(_name, self.dtypes or ()))
        checks = (
            (device not in self.devices, f"it runs on {' and '.join(self.devices)}, not on {device}"),
            (grad and device not in self.gradient, f"it has no backward on {device}"),
            (call.dropout > 0 and not self.dropout, "it has no dropout keyed by place"),
            (steps and not self.scores, f"it knows no scores such as {steps}"),
            (tied and not self.slot_scores, "it takes no bias tied to slots"),
            (call.keep is not None and not self.keep, "it takes no `keep` mask"),
            (wide and not self.value_width, "it needs values as wide as keys"),
            (lse and device not in self.lse, f"it returns no logsumexp on {device}"),
            (lse and grad and not self.lse_gradient, "its logsumexp has no gradient"),
            (
                types and call.q.dtype not in (self.dtypes or ()),
                f"its kernels take {types}, not {_name(call.q.dtype)}",
            ),
            (
                leaf,
                f"{type(leaf).__name__} has no primitive, which is all that its kernels know of a pattern",
            ),
        )
        return first_failed(*checks)


def first_failed(*checks: tuple[object, str]) -> str | None:
    """The reason of the first (failed, reason) that failed; None if none did."""
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
    """Whether a backend can be used on this machine, and a line that describes it or says what is missing."""

    usable: bool
    what: str


Forward = Callable[[Call, bool], Partial]
Backward = Callable[[Call, Tensor, Tensor, Tensor, Tensor], Gradients]
Repeated = Callable[[Tensor, KeyValues], Partial]


@dataclass(frozen=True)
class Backend:
    """One way to compute a call.

    name            by which it is asked for
    about           one line for `headway doctor`
    forward         (call, lse) -> the partial of a call that it can run; without `lse` that of one key set may be NaN
    backward        (call, out, lse, d_out, d_lse) -> its gradients, from the final out and lse, where `autograd` drives
                    it; without one, torch differentiates `forward`
    capabilities    what it can do, as data
    limits          (call, device) -> what else stands in the way, or None
    repeat          (call, lse) -> (q, keys) -> the partial of the same call on other tensors, or None where that is not
                    known; it holds no tensor of the call
    operator        the call as an operator of torch with a backward of its own, for graphs that are traced
    status          whether it can be used on this machine; by default it can
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
        """Why it cannot run this call on `device` (`lse`: the logsumexp is asked for); None if it can."""
        return self.capabilities.unsupported_reason(call, lse, device) or self.limits(call, device)
