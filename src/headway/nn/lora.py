"""A low-rank product beside a frozen one (LoRA: Hu et al. 2022, section 4.1), with magnitudes (DoRA: Liu et al. 2024).

Legend: I numbers in, O numbers out, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.nn.linear import Linear


@dataclass(frozen=True, kw_only=True)
class Lora:
    """How a layer is adapted.

    Attributes:
        rank: R.
        alpha: the scale s is alpha / R, or
        stabilized: alpha / sqrt(R) (rsLoRA: Kalajdzievski 2023).
        magnitude: a trained length for every row of the weight (DoRA: Liu et al. 2024, section 4).
        dropout: of the adapter's input, in training mode.
    """

    rank: int = 16
    alpha: float = 32.0
    stabilized: bool = False
    magnitude: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.rank < 1 or not 0.0 <= self.dropout < 1.0 or not math.isfinite(self.alpha):
            raise ConfigError(
                "an adapter has a rank of 1 or more, a finite alpha and a dropout from 0 to below 1, got "
                f"rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"
            )

    @property
    def scale(self) -> float:
        """s."""
        return self.alpha / (math.sqrt(self.rank) if self.stabilized else self.rank)


class LowRank(nn.Module):
    """What an adapter adds to the product x W^T of a layer:

        LoRA   s (x A^T) B^T                                              A [R, I], B [O, R]
        DoRA   g (x W^T + s (x A^T) B^T) - x W^T,  g = m / |W + s B A|    m [O], a norm for each row

    B A is never made. The norm is a constant in the backward pass, as in section 4.3 of Liu et al.; its square is
    |W|^2 + 2 s (W A^T) . B + s^2 (B A A^T) . B, row by row.
    """

    def __init__(self, lora: Lora, a: Tensor, b: Tensor, magnitude: Tensor | None = None) -> None:
        super().__init__()
        assert (magnitude is not None) == lora.magnitude
        self.lora = lora
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)
        self.lora_magnitude_vector = None if magnitude is None else nn.Parameter(magnitude)

    def forward(self, x: Tensor, base: Linear, product: Tensor) -> Tensor:
        """[..., I] -> [..., O]; `product` is what `base.local` makes of x."""
        drops = self.training and self.lora.dropout > 0
        x = self.dropped(x) if drops else x
        low = F.linear(self.lora.scale * F.linear(x, self.lora_A), self.lora_B)
        if self.lora_magnitude_vector is None:
            return low
        plain = base.local(x) if drops else product
        plain = plain if base.local_bias is None else plain - base.local_bias
        return self.gain(base) * (plain + low) - plain

    def dropped(self, x: Tensor) -> Tensor:
        """Its input in training mode."""
        return F.dropout(x, self.lora.dropout)

    def over_inputs(self, squares: Tensor) -> Tensor:
        """The squares of all inputs of a row, where `squares` are those that are here."""
        return squares

    def gain(self, base: Linear) -> Tensor:
        """g [O]."""
        assert self.lora_magnitude_vector is not None
        with torch.no_grad():
            w, s = base.matrix, self.lora.scale
            a, b = self.lora_A.to(w.dtype), self.lora_B.to(w.dtype)
            exact = torch.promote_types(w.dtype, torch.float32)
            square = torch.linalg.vector_norm(w, dim=1, dtype=exact).square()
            square += 2 * s * (F.linear(a, w).T * b).sum(1, dtype=exact)
            square += s * s * ((b @ (a @ a.T)) * b).sum(1, dtype=exact)
            norm = self.over_inputs(square).clamp_min(0).sqrt().to(self.lora_magnitude_vector.dtype)
        return torch.div(self.lora_magnitude_vector, norm)

    def row_norms(self, w: Tensor) -> Tensor:
        """|w| of each row."""
        norms: Tensor = torch.linalg.vector_norm(w, dim=1)
        return norms

    @torch.no_grad()
    def merged(self, w: Tensor) -> Tensor:
        """The weight [O, I] that computes both at once: W + s B A, with rows of length m in DoRA."""
        w = w + self.lora.scale * (self.lora_B.to(w.dtype) @ self.lora_A.to(w.dtype))
        if self.lora_magnitude_vector is None:
            return w
        gain: Tensor = self.lora_magnitude_vector.to(w.dtype) / self.row_norms(w)
        return gain[:, None] * w


class LoraLinear(nn.Module):
    """x W^T (+ b) of a frozen `Linear`, and what its active adapters add.

    Attributes:
        base: the layer. adapters: by their names.
        active: names of those that are added.
    """

    def __init__(self, base: Linear) -> None:
        super().__init__()
        self.base = base
        self.adapters = nn.ModuleDict()
        self.active: tuple[str, ...] = ()
        self._kept: Tensor | None = None  # W, while the adapters are merged into it

    @property
    def merged(self) -> bool:
        """Whether the adapters are in the weight."""
        return self._kept is not None

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return self.base.leave(self.local(self.base.enter(x)))

    def local(self, x: Tensor) -> Tensor:
        """What `Linear.local` says, of the base and what is added to it."""
        product = self.base.local(x)
        if self._kept is not None:
            return product
        parts = [self.adapters[name](x, self.base, product) for name in self.active]
        return sum(parts, start=product)

    def merge(self) -> None:
        """Put the active adapters into the weight, which is kept."""
        if self._kept is None:
            self._kept = self.base.weight.data
            self.base.weight.data = merged_weight(self._kept, [self.adapters[name] for name in self.active])

    def unmerge(self) -> None:
        """Put back the weight, to the bit."""
        if self._kept is not None:
            self.base.weight.data, self._kept = self._kept, None

    def extra_repr(self) -> str:
        return f"active={', '.join(self.active) or 'none'}{', merged' if self.merged else ''}"


def merged_weight(w: Tensor, adapters: Sequence[nn.Module]) -> Tensor:
    """W + sum of what each adapter alone adds to it, computed in float32 or wider and rounded once to W's dtype."""
    wide = w.to(torch.promote_types(w.dtype, torch.float32))
    parts = [adapter for adapter in adapters if isinstance(adapter, LowRank)]
    if len(parts) == 1:
        return parts[0].merged(wide).to(w.dtype)
    return sum((part.merged(wide) - wide for part in parts), start=wide).to(w.dtype)
