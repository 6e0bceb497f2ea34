"""Rotary embedding with one full rotation matrix in place of a rotation of each pair."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.positions.pairing import coordinate_pairs
from headway.positions.rotary import Rotary
from headway.positions.schemes import PositionScheme, check_integers
from headway.positions.tables import MatrixTable

RADIX = 64


@dataclass(frozen=True)
class SpecialOrthogonal(PositionScheme):
    """Rotates queries and keys by the powers R_m = R_1^m of one trained R_1 in SO(d).

        R_m = exp(m A),  A^T = -A [d, d]            R_m^T R_n = R_(n-m),  R_m^T R_m = I

    The exponential reaches every R_1, and A is trained without constraints below its diagonal (`nn.RotaryEmbedding`),
    starting where R_m equals `start`. One A serves all layers and heads.

    start   where training starts: a `Rotary`, which also defines d and whether values are rotated

    Every A is Q F Q^T with an orthogonal Q and an F of the form of `Rotary`, so with W_q and W_k multiplied by Q^T it
    is a rotary embedding with other frequencies: beyond those, it adds nothing that the projections could not learn.

    Raises ConfigError for a start that is trained itself or has a scaling.
    """

    start: Rotary
    marks = "queries and keys"

    def __post_init__(self) -> None:
        if not isinstance(self.start, Rotary) or self.start.trainable or self.start.scaling is not None:
            raise ConfigError(
                "SpecialOrthogonal: start must be a Rotary with scaling=None and trainable=False "
                f"(the whole rotation is trained), got {self.start!r}"
            )

    def rotated_dims(self, head_dim: int) -> int:
        """Returns d for heads of `head_dim`. Raises ConfigError if it is odd, or does not fit."""
        return self.start.rotated_dims(head_dim)

    def check_head_dim(self, head_dim: int) -> None:
        self.rotated_dims(head_dim)

    def trained_numbers(self, head_dim: int) -> int:
        """Returns the number of entries below the diagonal of A, which are trained in row-major order."""
        dims = self.rotated_dims(head_dim)
        return dims * (dims - 1) // 2

    def trained_frequencies(self, head_dim: int, offset: Tensor | None = None) -> Tensor:
        """Returns the d/2 angles of R_1, largest first."""
        angles: Tensor = torch.linalg.eigvalsh(1j * self.generator(head_dim, offset))
        return angles.flip(0)[: len(angles) // 2]

    def saved_bytes(self, q: Tensor, k: Tensor, scores_stored: bool) -> int:
        """Returns the bytes of the vectors; of a matrix for each position and its two float64 factors; and of the
        powers."""
        dims = self.rotated_dims(q.shape[3])
        matrices = (q.shape[2] * (q.itemsize + 16) + 7 * RADIX * 8) * dims**2
        return q[..., :dims].nbytes + k[..., :dims].nbytes + matrices

    def rotation(
        self,
        position: Tensor,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        length: Tensor | None = None,
        offset: Tensor | None = None,
    ) -> MatrixTable:
        """Returns R_p for each p of `position`: computed in float64 and rounded once, to float32 (not if `dtype` is
        float64)."""
        if position.dim() not in (1, 2):
            raise ConfigError(
                f"SpecialOrthogonal: positions must be [T] or [B, T], got shape {tuple(position.shape)}"
            )
        out_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        matrices = rotation_matrices(self.generator(head_dim, offset), position).to(out_dtype)
        return MatrixTable(matrices, self.rotated_dims(head_dim), self.start.values)

    def generator(self, head_dim: int, offset: Tensor | None = None) -> Tensor:
        """Returns A [d, d] in float64: that of `start`, whose R_m is exp(m A), plus the trained `offset` [d (d - 1) /
        2] below its diagonal. Raises ConfigError for an offset of another length."""
        a, b = torch.tensor(coordinate_pairs(self.start.pairing, self.rotated_dims(head_dim))).T
        frequencies = self.start.frequencies(head_dim)
        generator = frequencies.new_zeros(2 * len(a), 2 * len(a))
        generator[a, b], generator[b, a] = -frequencies, frequencies
        if offset is None:
            return generator
        count = self.trained_numbers(head_dim)
        if offset.shape != (count,):
            raise ConfigError(
                f"SpecialOrthogonal: {len(generator)} rotated dims have {count} trained numbers below the diagonal, "
                f"got offset={list(offset.shape)}"
            )
        generator = generator.to(offset.device)
        row, column = torch.tril_indices(len(generator), len(generator), -1, device=offset.device)
        lower = torch.zeros_like(generator).index_put((row, column), offset.to(generator.dtype))
        return generator + lower - lower.mT


def rotation_matrices(generator: Tensor, position: Tensor) -> Tensor:
    """Returns exp(p A) for every p of `position` [...]: [..., d, d] float64, differentiable in the skew-symmetric A.

    exp is computed once; p = 64 a + b (130: a = 2, b = 2), and the powers 64 a and b are products of squares. Angles
    have errors of a few p 2^-52 (p f_i in float64: of p 2^-53), and matrices are orthogonal to rounding at any p.
    Raises ConfigError for positions that are not integers.
    """
    check_integers(position, "SpecialOrthogonal")
    step = large_step = torch.linalg.matrix_exp(generator.to(torch.float64))
    for _ in range(RADIX.bit_length() - 1):
        large_step = _square(large_step)
    high, at_high = (position // RADIX).unique(return_inverse=True)
    low, at_low = (position % RADIX).unique(return_inverse=True)
    return _powers(large_step, high)[at_high] @ _powers(step, low)[at_low]


def _powers(matrix: Tensor, exponent: Tensor) -> Tensor:
    """Returns matrix^n for integers n [N] of either sign: [N, d, d]."""
    out = torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device).repeat(len(exponent), 1, 1)
    magnitude = exponent.abs()
    for bit in range(int(magnitude.max()).bit_length() if len(magnitude) else 0):
        out = torch.where((magnitude >> bit & 1).bool()[:, None, None], out @ matrix, out)
        matrix = _square(matrix)
    return torch.where((exponent < 0)[:, None, None], out.mT, out)


def _square(matrix: Tensor) -> Tensor:
    """Returns matrix^2 after a Newton step towards the orthogonal matrices, from which repeated squares would drift."""
    square = matrix @ matrix
    return 1.5 * square - 0.5 * square @ (square.mT @ square)
