"""Which number format computes, why, and the fp32 weights behind it."""

from __future__ import annotations

import copy
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from headway.choice import Choice
from headway.errors import ConfigError
from headway.hardware import bf16_native, cpu_name

M = TypeVar("M", bound=nn.Module)
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
    """fp32 weights that are trained, and the modules that compute with them.

    In fp32 the module that computes is the trained one; in bf16 it is a copy. A copy rather than autocast: under
    autocast every activation is cast on its way into every product and the residual stream stays fp32, which costs
    more time than the products of a small model.

    `replicas` share the weights that compute and have gradients of their own, so that as many micro batches can run
    their `.backward()` at the same time. `collect` adds what they hold to the fp32 gradients, in the order of the
    replicas, so that the sum does not depend on which was done first.

    Args:
        master: the module that is trained.
        dtype: of the weights that compute.
        replicas: micro batches that run at the same time.
    """

    def __init__(self, master: M_co, dtype: torch.dtype, replicas: int = 1) -> None:
        self.master = master
        self.compute: M_co = master if dtype == torch.float32 else copy.deepcopy(master).to(dtype)
        self.replicas = [self.compute, *(_sharing(self.compute) for _ in range(replicas - 1))]

    def collect(self) -> None:
        """Add the gradients of the replicas to `.grad` of the fp32 weights, and drop them."""
        for replica in self.replicas:
            if replica is self.master:
                continue  # its gradients are the master's
            for own, copied in zip(self.master.parameters(), replica.parameters(), strict=True):
                if copied.grad is not None:
                    own.grad = copied.grad.float() if own.grad is None else own.grad.add_(copied.grad)
                    copied.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """After an optimizer step: the weights that compute take the new values."""
        if self.compute is not self.master:
            for own, copied in zip(self.master.parameters(), self.compute.parameters(), strict=True):
                copied.copy_(own)


def _sharing(module: M) -> M:
    """A copy of a module whose parameters and buffers are the same memory, with `.grad` of their own."""
    memo: dict[int, Tensor] = {id(b): b for b in module.buffers()}
    for p in module.parameters():
        memo[id(p)] = nn.Parameter(p.detach(), requires_grad=p.requires_grad)
    return copy.deepcopy(module, memo)
