"""Cross entropy without materializing the logits.

In training an accelerated output layer returns `Logits`, which hold the factors of the product and compute it only when
something reads them. `torch.nn.functional.cross_entropy` does not: it computes the logits of some tokens at a time
(`headway.nn.cross_entropy`).

Legend: B rows, T tokens, N = B T, M width, V vocab.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from headway.integrations.transformers.products import beside, linear_forward
from headway.nn.cross_entropy import IGNORE_INDEX, chunked_cross_entropy, fused_cross_entropy
from headway.nn.output import trained_rows

Step = Callable[[Tensor], Tensor]

ALIKE = frozenset(
    getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "is_cuda")
)
"""Attributes that the stand-in answers without computing the logits."""
STEPS = frozenset({"float", "tanh", "div", "__truediv__", "mul", "__mul__", "add", "__add__"})
"""Elementwise functions that are recorded instead of computed: a cap of the logits, a constant bias per vocabulary
entry."""
VIEWS = frozenset({"view", "reshape"})
SPARSE = 0.75
"""If at most this share of tokens has a target, the other tokens' logits are skipped."""


def output_forward(self: nn.Linear, input: Tensor) -> Tensor:
    """Returns x W^T (+ b), [..., M] -> [..., V]; in training as `Logits`."""
    if not (self.training and torch.is_grad_enabled()) or torch.compiler.is_compiling() or input.dim() < 2:
        return linear_forward(self, input)
    if beside(self) is not None or type(input) is not Tensor:
        return linear_forward(self, input)
    x, weight, bias = input, self.weight, cast(Tensor | None, self.bias)
    device_type = input.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return Logits.of(x, weight, bias)


class Logits(Tensor):
    """Stands in for logits [..., V]: x W^T + b, with `steps` applied. It has their shape and dtype, and applying
    functions of `STEPS` gives another stand-in; any other function gets the computed logits."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    steps: tuple[Step, ...]
    value: Tensor | None

    @staticmethod
    def of(x: Tensor, weight: Tensor, bias: Tensor | None, steps: tuple[Step, ...] = ()) -> "Logits":
        """Returns the stand-in for the logits of states x [..., M]; computes only one row of zeros, for the dtype."""
        with torch.no_grad():
            row = x.new_zeros(len(weight))
            for step in steps:
                row = step(row)
        logits: Logits = torch.Tensor._make_subclass(Logits, row[:1].expand(*x.shape[:-1], len(weight)))
        logits.x, logits.weight, logits.bias, logits.steps, logits.value = x, weight, bias, steps, None
        return logits

    def computed(self) -> Tensor:
        """Returns the logits, differentiable; computed once."""
        if self.value is None:
            self.value = self.raw(self.x)
        return self.value

    def raw(self, x: Tensor) -> Tensor:
        """Returns the logits of other states [..., M]."""
        logits = F.linear(x, self.weight, self.bias)
        for step in self.steps:
            logits = step(logits)
        return logits

    def cross_entropy(self, target: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """Returns `torch.nn.functional.cross_entropy` for targets [N] and reduction "mean" or "sum"."""
        target = target.masked_fill(target == ignore_index, IGNORE_INDEX)
        x, counted = self.x, target != IGNORE_INDEX
        count = int(counted.sum())
        if 0 < count < SPARSE * len(target):
            x, target = trained_rows(x, target)
        with torch.autocast(x.device.type, enabled=False):
            if all(step is Tensor.float for step in self.steps):
                losses = fused_cross_entropy(x, self.weight, target, bias=self.bias)
            else:
                losses = chunked_cross_entropy(x, target, self.raw, len(self.weight))
        return (losses.total / count if reduction == "mean" else losses.total).to(self.dtype)

    def takes(self, other: Any) -> bool:
        """Returns whether a step's other operand is the same for every token, and needs no gradient."""
        if not isinstance(other, Tensor):
            return isinstance(other, int | float)
        return type(other) is Tensor and not other.requires_grad and other.shape == (1, len(self.weight))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in ALIKE or func in (Tensor.size, Tensor.dim, Tensor.numel):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        name, (logits, *operands) = getattr(func, "__name__", ""), args or (None,)
        if isinstance(logits, Logits) and not kwargs:
            if name in STEPS and all(logits.takes(item) for item in operands):
                step = (lambda x: func(x, *operands)) if operands else func
                return Logits.of(logits.x, logits.weight, logits.bias, (*logits.steps, step))
            if name in VIEWS and _flat(operands, len(logits.weight)):
                return Logits.of(logits.x.flatten(0, -2), logits.weight, logits.bias, logits.steps)
        if func is F.cross_entropy and isinstance(logits, Logits) and logits.dim() == 2:
            arguments = _asked(*operands, **kwargs)
            if arguments is not None:
                return logits.cross_entropy(*arguments)
        plain, named = tree_map_only(Logits, Logits.computed, (args, kwargs))
        return func(*plain, **named)


def _flat(shape: list[Any], vocab: int) -> bool:
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], list | tuple) else shape
    return [*sizes] == [-1, vocab]


def _asked(
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[Tensor, int, str] | None:
    """Returns the arguments of `torch.nn.functional.cross_entropy` for `Logits.cross_entropy`; None if it does not
    support them."""
    plain = weight is None and size_average is None and reduce is None and label_smoothing == 0
    if not plain or reduction not in ("mean", "sum") or target.dim() != 1 or target.is_floating_point():
        return None
    return target, ignore_index, reduction
