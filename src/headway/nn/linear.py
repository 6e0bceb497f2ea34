"""The products with weights: `Linear`, what a quantised or an adapted model has in its place, and the output layer.

Legend: I numbers in, O numbers out; M width of the states, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from headway.nn.cross_entropy import IGNORE_INDEX, Losses, chunked_cross_entropy, fused_cross_entropy
from headway.nn.products import linear
from headway.parallel import TensorParallel

SPARSE = 0.25


class Linear(nn.Linear):
    """x W^T (+ b), with W [O, I]: `torch.nn.Linear`, and the only product with weights in the library.

    Modules call their `Linear`s and never look into them, so that one which computes the product in another way
    (from quantised weights, with an adapter) can take the place of each: `replace_linear`.
    """

    @property
    def matrix(self) -> Tensor:
        """W."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return linear(x, self.weight, self.bias)


def replace_linear(model: nn.Module, make: Callable[[str, Linear], nn.Module]) -> None:
    """Puts `make(name, layer)` in the place of every `Linear` of `model`, in place; `make` may return `layer` itself.

    `name` is the layer's own, as in `model.named_modules()`. What takes its place maps [..., layer.in_features] to
    [..., layer.out_features]; names in the state dict are its own affair.
    """
    for name in [name for name, layer in model.named_modules() if isinstance(layer, Linear)]:
        owner, _, attribute = name.rpartition(".")
        inside = model.get_submodule(owner)
        setattr(inside, attribute, make(name, getattr(inside, attribute)))  # and the old one is let go of


class ColumnParallelLinear(Linear):
    """x W^T (+ b) of this rank's outputs: of W and b it has the rows of its heads or hidden units.

    The gradient of x is summed over ranks; layers of one x do that once (`headway.nn.quantized.products`)."""

    def __init__(self, layer: Linear, tensor: TensorParallel) -> None:
        nn.Module.__init__(self)
        own = tensor.share(layer.out_features, "outputs")
        self.tensor, self.in_features, self.out_features = tensor, layer.in_features, len(own)
        self.weight = _part(layer.weight, own)
        self.bias = None if layer.bias is None else _part(layer.bias, own)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O / ranks]."""
        return self.local(self.tensor.enter(x))

    def local(self, x: Tensor) -> Tensor:
        """What is made of x that has entered."""
        return super().forward(x)

    def products(self, x: Tensor, layers: Sequence[Linear]) -> list[Tensor]:
        """layer(x) of each, which share the ranks of this one."""
        x = self.tensor.enter(x)
        return [cast(ColumnParallelLinear, layer).local(x) for layer in layers]


class RowParallelLinear(Linear):
    """x W^T (+ b), with x [.., I / ranks] this rank's heads or hidden units, of which it has the columns of W: the sum
    over ranks, to which b is added once."""

    def __init__(self, layer: Linear, tensor: TensorParallel) -> None:
        nn.Module.__init__(self)
        own = tensor.share(layer.in_features, "inputs")
        self.tensor, self.in_features, self.out_features = tensor, len(own), layer.out_features
        self.weight, self.bias = _part(layer.weight, own, 1), layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I / ranks] -> [..., O]."""
        y = self.tensor.leave(linear(x, self.weight))
        return y if self.bias is None else y + self.bias


def _part(whole: Tensor, own: range, axis: int = 0) -> nn.Parameter:
    part = whole.detach().narrow(axis, own.start, len(own)).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)


class OutputLayer(Linear):
    """x U^T (+ b), with U [V, M] a matrix of its own, or the table of an embedding that it is tied to.

    (Press and Wolf 2017; Vaswani et al. 2017, section 3.4.) The table stays a parameter of the embedding alone: tied
    and without bias the layer has no parameters.
    """

    embedding: nn.Embedding | None

    def __init__(
        self, width: int, vocab: int, *, bias: bool = False, tied_to: nn.Embedding | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = width, vocab
        own = None if tied_to is not None else nn.Parameter(torch.empty(vocab, width).normal_(0, 0.02))
        self.register_parameter("weight", own)
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocab)) if bias else None)
        self.__dict__["embedding"] = tied_to  # not as a child, whose parameters would be this layer's, too

    @property
    def matrix(self) -> Tensor:
        """U."""
        return self.weight if self.embedding is None else self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., V]."""
        return linear(x, self.matrix, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}{', tied' if self.embedding is not None else ''}"


def output_cross_entropy(
    layer: nn.Module,
    x: Tensor,
    targets: Tensor,
    vocab: int,
    *,
    label_smoothing: float | None = None,
    hits: bool = False,
) -> Losses:
    """-ln softmax(layer(x))[target] of x [..., M] and targets [...], without ever holding all logits.

    `fused_cross_entropy` of a plain `OutputLayer`; for what is put in its place, and with a `label_smoothing`, 0
    included, `chunked_cross_entropy`, whose losses per target are differentiable. Raises DataError for a target that is
    not in the vocab. Where more than `SPARSE` of the targets are ignored, the layer is computed for the rest alone."""
    wanted = targets != IGNORE_INDEX
    if 0 < int(wanted.sum()) < (1 - SPARSE) * targets.numel():
        found = output_cross_entropy(
            layer, x[wanted], targets[wanted], vocab, label_smoothing=label_smoothing, hits=hits
        )
        each = found.each.new_zeros(targets.shape).masked_scatter(wanted, found.each)
        right = None if found.hits is None else wanted.masked_scatter(wanted, found.hits)
        return found._replace(each=each, hits=right)
    if type(layer) is OutputLayer and label_smoothing is None:
        return fused_cross_entropy(x, layer.matrix, targets, bias=layer.bias, hits=hits)
    return chunked_cross_entropy(x, targets, layer, vocab, label_smoothing=label_smoothing or 0.0, hits=hits)
