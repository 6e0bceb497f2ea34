"""Which number format computes, why, and the fp32 weights behind it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from headway.choice import Choice
from headway.errors import ConfigError
from headway.hardware import bf16_native, cpu_name

M_co = TypeVar("M_co", bound=nn.Module, covariant=True)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def choose_precision(asked: str) -> Choice:
    """The dtype of matrix products for `dtype=asked`; `what` is "bf16" or "fp32".

    Raises ConfigError for fp16: CPUs without native fp16 products are some 500 times slower in it than in
    bf16, and its range needs loss scaling.
    """
    if asked == "fp16":
        raise ConfigError(
            "dtype=fp16 was asked for, but training on a CPU in fp16 is some 500 times slower than in bf16 and "
            "overflows at 65504; use dtype=bf16 (same size, range of fp32) or dtype=fp32"
        )
    if asked == "fp32":
        return Choice("fp32", "asked for")
    if asked == "bf16":
        slow = "" if bf16_native() else f", although {cpu_name()} has no bf16 instructions: slower than fp32"
        return Choice("bf16", "asked for" + slow)
    if bf16_native():
        return Choice("bf16", "this CPU multiplies bf16 natively", rejected=(("fp32", "slower here"),))
    return Choice("fp32", "this CPU has no bf16 instructions", rejected=(("bf16", "emulated here"),))


class MasterWeights(Generic[M_co]):
    """fp32 weights that are trained, and the module that computes: the same one, or a copy in bf16.

    A bf16 copy rather than autocast: under autocast every activation is cast on its way into every product
    and the residual stream stays fp32, which costs more time than the products of a small model. Gradients
    of each micro batch are added up in fp32.
    """

    def __init__(self, master: M_co, dtype: torch.dtype) -> None:
        self.master = master
        self.compute: M_co = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)
        both = list(zip(master.parameters(), self.compute.parameters(), strict=True))
        self._pairs = [(own, copied) for own, copied in both if own.requires_grad]
        self._copies = both if self.compute is not master else []

    def gradients(self, loss: Tensor) -> tuple[Tensor | None, ...]:
        """Of the computing weights, not yet added to anything: several threads may ask at the same time."""
        return torch.autograd.grad(loss, [copied for _, copied in self._pairs], allow_unused=True)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add what `gradients` gave to `.grad` of the fp32 weights."""
        for (own, _), grad in zip(self._pairs, gradients, strict=True):
            if grad is not None:
                own.grad = grad.float() if own.grad is None else own.grad.add_(grad)

    @torch.no_grad()
    def refresh(self) -> None:
        """After an optimizer step: the copy takes the new weights."""
        for own, copied in self._copies:
            copied.copy_(own)
