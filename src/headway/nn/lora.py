"""A low-rank product added to a frozen one (LoRA: Hu et al. 2022, section 4.1), with magnitudes (DoRA: Liu et al.
2024).

Legend: I inputs, O outputs, R rank.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.nn.share import Share, dropped, part_of
from headway.nn.weights import Weight


@dataclass(frozen=True, kw_only=True)
class Lora:
    """How a layer is adapted.

    Attributes:
        rank: R.
        alpha: the scale s is alpha / R, or
        stabilized: alpha / sqrt(R) if this is set (rsLoRA: Kalajdzievski 2023).
        magnitude: whether each row of the weight has a trained length (DoRA: Liu et al. 2024, section 4).
        dropout: probability for the adapter's input, in training mode.
    """

    rank: int = 16
    alpha: float = 32.0
    stabilized: bool = False
    magnitude: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0.0 <= self.dropout < 1.0 or not math.isfinite(self.alpha):
            raise ConfigError(
                "an adapter must have a rank of at least 1, a finite alpha and a dropout from 0 to below 1, got "
                f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"
            )

    @property
    def scale(self) -> float:
        """The scale s."""
        return self.alpha / (math.sqrt(self.rank) if self.stabilized else self.rank)


_rows: ContextVar[Mapping[str, Tensor]] = ContextVar("rows of adapters", default={})  # noqa: B039


@contextmanager
def only_rows(rows: Mapping[str, Tensor]) -> Iterator[None]:
    """While open, adds each of these adapters only to some rows of a packed step: `rows` maps its name to a mask,
    bool [T, 1]."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


class LowRank(nn.Module):
    """The term that an adapter adds to the product x W^T of a layer:

        LoRA   s (x A^T) B^T                                              A [R, I], B [O, R]
        DoRA   g (x W^T + s (x A^T) B^T) - x W^T,  g = m / |W + s B A|    m [O], a norm for each row

    B A is never materialized. The norm is a constant in the backward pass, as in section 4.3 of Liu et al.; its square
    is |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B, row by row.

    `share`: the part of the layer that this rank has. If columns are divided, a rank has columns of A, and all of B and
    m, whose gradients are summed over ranks; if rows are divided, rows of B and m, and all of A.
    """

    def __init__(
        self, lora: Lora, a: Tensor, b: Tensor, magnitude: Tensor | None = None, share: Share | None = None
    ) -> None:
        super().__init__()
        assert (magnitude is not None) == lora.magnitude
        self.lora, self.share = lora, share
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)

    def forward(self, x: Tensor, weight: Weight, product: Tensor) -> Tensor:
        """Returns the term for x, [..., I] -> [..., O], in the dtype of `product`, which is x W^T; computed in the
        dtype of A, unless autocast is enabled."""
        inputs = x if torch.is_autocast_enabled(x.device.type) else x.to(self.lora_A.dtype)
        drops = self.training and self.lora.dropout > 0
        inputs = dropped(inputs, self.lora.dropout, self.share) if drops else inputs
        low = F.linear(self.lora.scale * F.linear(inputs, self.lora_A), self.lora_B)
        if self.lora_magnitude_vector is not None:
            plain = weight.product(inputs.to(x.dtype)) if drops else product
            low = self.gain(weight) * (plain + low) - plain
        return low.to(product.dtype)

    def over_inputs(self, squares: Tensor) -> Tensor:
        """Returns the sums of squares over all inputs of each row, given `squares` over this rank's inputs."""
        if self.share is not None and self.share.axis:
            return self.share.tensor.exchange.sum(squares)
        return squares

    def gain(self, weight: Weight) -> Tensor:
        """Returns g [O]."""
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():
            w, s = weight.dequantize(), self.lora.scale
            a, b = self.lora_A.to(w.dtype), self.lora_B.to(w.dtype)
            exact = torch.promote_types(w.dtype, torch.float32)
            square = torch.linalg.vector_norm(w, dim=1, dtype=exact).square()
            square += 2 * s * (F.linear(a, w).T * b).sum(1, dtype=exact)
            square += s * s * ((b @ (a @ a.T)) * b).sum(1, dtype=exact)
            norm = self.over_inputs(square).clamp_min(0).sqrt().to(self.lora_magnitude_vector.dtype)
        return torch.div(self.lora_magnitude_vector, norm)

    def part(self, share: Share) -> "LowRank":
        """Returns a rank's part of the adapter, for its part of the layer."""
        a, b, m = self.lora_A, self.lora_B, self.lora_magnitude_vector
        if share.axis:
            a = part_of(a, 1, share.part(a.shape[1]))
        else:
            rows = share.part(b.shape[0])
            b, m = part_of(b, 0, rows), None if m is None else part_of(m, 0, rows)
        return LowRank(self.lora, a, b, m, share).train(self.training)

    @torch.no_grad()
    def merged(self, w: Tensor) -> Tensor:
        """Returns the weight [O, I] that computes both at once: W + s B A, in DoRA with rows of length m."""
        w = w + self.lora.scale * (self.lora_B.to(w.dtype) @ self.lora_A.to(w.dtype))
        if self.lora_magnitude_vector is None:
            return w
        norm = self.over_inputs(w.square().sum(1)).sqrt()
        gain: Tensor = self.lora_magnitude_vector.to(w.dtype) / norm
        return gain[:, None] * w


def in_its_rows(name: str, y: Tensor) -> Tensor:
    """Returns the term y of an adapter, [..., T, O], in the rows that it is added to (`only_rows`), and 0 in the
    others."""
    rows = _rows.get().get(name)
    return y if rows is None else y.masked_fill(~rows, 0)


def merged_weight(w: Tensor, adapters: Sequence[nn.Module]) -> Tensor:
    """Returns W + the sum of the changes by each adapter alone, computed in float32 or wider and rounded once to W's
    dtype."""
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    parts = [adapter for adapter in adapters if isinstance(adapter, LowRank)]
    if len(parts) == 1:
        return parts[0].merged(wide).to(w.dtype)
    return sum((part.merged(wide) - wide for part in parts), start=wide).to(w.dtype)
