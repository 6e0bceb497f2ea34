"""From states to logits.

Legend: M width of the states, V vocab.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from headway.nn.cross_entropy import Losses, chunked_cross_entropy, fused_cross_entropy


class OutputLayer(nn.Module):
    """scale * x U^T (+ b), with U [V, M] a matrix of its own, or the embedding's where they are tied.

    (Press and Wolf 2017; Vaswani et al. 2017, section 3.4.) Tied and without bias it has no parameters.
    """

    def __init__(
        self, width: int, vocab: int, *, tied: bool = False, bias: bool = False, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, width).normal_(0, 0.02))
        self.bias = nn.Parameter(torch.zeros(vocab)) if bias else None

    def forward(self, x: Tensor, embedding: Tensor | None = None) -> Tensor:
        """[..., M] -> [..., V]; `embedding` [V, M] is needed where they are tied, and not looked at elsewhere."""
        weight = self._matrix(embedding)
        return nn.functional.linear(x if self.scale == 1.0 else x * self.scale, weight, self.bias)

    def cross_entropy(
        self,
        x: Tensor,
        targets: Tensor,
        embedding: Tensor | None = None,
        *,
        label_smoothing: float | None = None,
        hits: bool = False,
    ) -> Losses:
        """-ln softmax(forward(x))[target] of x [..., M] and targets [...], without ever holding all logits.

        `fused_cross_entropy` by default; with a `label_smoothing`, 0 included, `chunked_cross_entropy`, whose losses
        per target are differentiable. Raises DataError for a target that is not in the vocab."""
        weight = self._matrix(embedding)
        if label_smoothing is None:
            x = x if self.scale == 1.0 else x * self.scale
            return fused_cross_entropy(x, weight, targets, bias=self.bias, hits=hits)
        logits = partial(self.forward, embedding=embedding)
        return chunked_cross_entropy(
            x, targets, logits, len(weight), label_smoothing=label_smoothing, hits=hits
        )

    def _matrix(self, embedding: Tensor | None) -> Tensor:
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a tied output layer needs the embedding"
        return weight

    def extra_repr(self) -> str:
        return "tied" if self.weight is None else f"{self.weight.shape[1]} -> {self.weight.shape[0]}"
