"""From states to logits.

Legend: M width of the states, V vocab.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
        weight = embedding if self.weight is None else self.weight
        assert weight is not None, "a tied output layer needs the embedding"
        return nn.functional.linear(x if self.scale == 1.0 else x * self.scale, weight, self.bias)

    def extra_repr(self) -> str:
        return "tied" if self.weight is None else f"{self.weight.shape[1]} -> {self.weight.shape[0]}"
