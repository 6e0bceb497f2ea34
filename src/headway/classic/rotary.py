"""Rotary position embedding with complex numbers, as in Meta's LLaMA code: adjacent coordinates (0, 1), (2, 3), ..
form the rotated pairs.
"""

import torch
from torch import Tensor


def precompute_freqs_cis(
    dim: int, end: int, theta: float = 10000.0, dtype: torch.dtype = torch.complex64
) -> Tensor:
    """Returns e^(i m theta_j), theta_j = theta^(-2j/dim), for positions m = 0 .. end - 1: complex (end, dim // 2).

    dim is the width of one head, d // h: the documents print (s, d // g // 2), which is right only if g = h. Angles
    are computed in float64 and rounded once. Raises ValueError if dim is odd or below 2.
    """
    if dim < 2 or dim % 2:
        raise ValueError(
            f"rotary embedding turns coordinates in pairs: the head width must be even and at least 2, got {dim}"
        )
    theta_j = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.outer(torch.arange(end, dtype=torch.float64), theta_j)
    return torch.polar(torch.ones_like(angle), angle).to(dtype)


def apply_rotary_emb(xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, Tensor]:
    """Returns queries (b, s, h, d/h) and keys (b, s, g, d/h), rotated by freqs_cis (s, d/h/2), in their own dtypes.

    Half precision is rotated in float32 and rounded once. Rotary embedding is applied here, to queries and keys
    *before* their product (one document applies it to the scores), and never to values.
    """
    return _turn(xq, freqs_cis), _turn(xk, freqs_cis)


def _turn(x: Tensor, freqs_cis: Tensor) -> Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * freqs_cis[:, None, :]).flatten(-2).to(x.dtype)
