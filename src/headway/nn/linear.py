"""The products with weights: `Linear`, what a quantized or an adapted model has in its place, and the output layer.

Legend: I numbers in, O numbers out; M width of the states, V vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headway.nn.cross_entropy import IGNORE_INDEX, Losses, chunked_cross_entropy, fused_cross_entropy
from headway.nn.products import linear

SPARSE = 0.25


class Linear(nn.Linear):
    """x W^T (+ b), with W [O, I]: `torch.nn.Linear`, and the only product with weights in the library.

    Modules call their `Linear`s and never look into them, so that one which computes the product in another way
    (from quantized weights, with an adapter) can take the place of each: `replace_linear`.
    """

    @property
    def matrix(self) -> Tensor:
        """W."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return linear(x, self.weight, self.bias)

    # leave(local(enter(x))) is forward(x); an adapter adds to `local`. Layers that ranks share say what is which.

    def enter(self, x: Tensor) -> Tensor:
        """What `local` is given for x."""
        return x

    def local(self, x: Tensor) -> Tensor:
        """What is computed without a message to other ranks, with `local_bias`."""
        y: Tensor = self(x)
        return y

    def leave(self, y: Tensor) -> Tensor:
        """What the layer makes of `local`."""
        return y

    @property
    def local_bias(self) -> Tensor | None:
        """What `local` adds to its product."""
        return self.bias

    def product(self, x: Tensor) -> Tensor:
        """x W^T."""
        return linear(x, self.weight)

    def take(self, layer: Linear, axis: int, own: range) -> None:
        """Have of the weight of another layer some rows (axis 0) or columns (axis 1)."""
        self.weight = part_of(layer.weight, axis, own)


def replace_linear(model: nn.Module, make: Callable[[str, Linear], nn.Module]) -> None:
    """Puts `make(name, layer)` in the place of every `Linear` of `model`, in place; `make` may return `layer` itself.

    `name` is the layer's own, as in `model.named_modules()`. What takes its place maps [..., layer.in_features] to
    [..., layer.out_features]; names in the state dict are its own affair.
    """
    for name in [name for name, layer in model.named_modules() if isinstance(layer, Linear)]:
        owner, _, attribute = name.rpartition(".")
        inside = model.get_submodule(owner)
        setattr(inside, attribute, make(name, getattr(inside, attribute)))  # and the old one is let go of


def part_of(whole: Tensor, axis: int, own: range) -> nn.Parameter:
    """A parameter of its own with some rows, columns, .. of another."""
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
        own = None if tied_to is not None else nn.init.normal_(torch.empty(vocab, width), 0, 0.02)
        self.register_parameter("weight", None if own is None else nn.Parameter(own))
        self.register_parameter("bias", nn.Parameter(torch.zeros(vocab)) if bias else None)
        self.__dict__["embedding"] = tied_to  # not as a child, whose parameters would be this layer's, too

    @property
    def matrix(self) -> Tensor:
        """U."""
        return self.weight if self.embedding is None else self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., M] -> [..., V]."""
        return linear(x, self.matrix, self.bias)

    def cross_entropy(
        self, x: Tensor, targets: Tensor, *, label_smoothing: float | None = None, hits: bool = False
    ) -> Losses:
        """`output_cross_entropy` of this layer, for all targets."""
        if label_smoothing is None:
            return fused_cross_entropy(x, self.matrix, targets, bias=self.bias, hits=hits)
        how: dict[str, Any] = {"label_smoothing": label_smoothing, "hits": hits}
        return chunked_cross_entropy(x, targets, self, self.out_features, **how)

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

    `fused_cross_entropy` of an `OutputLayer`; for what is put in its place, and with a `label_smoothing`, 0
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
    if isinstance(layer, OutputLayer):
        return layer.cross_entropy(x, targets, label_smoothing=label_smoothing, hits=hits)
    return chunked_cross_entropy(x, targets, layer, vocab, label_smoothing=label_smoothing or 0.0, hits=hits)
