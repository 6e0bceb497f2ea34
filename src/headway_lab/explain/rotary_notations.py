"""The five ways in which papers and code write rotary embedding, as small reference functions.

All take x [..., T, d] and positions [T] and use theta_i = theta^(-2i/d), i = 0 .. d/2 - 1. The first three
rotate neighbours, the last two rotate i with i + d/2; after `to_pairing` all five agree to 1e-12 in float64.
They are for tests and for reading; the engine uses `Rotary`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.positions.schemes import exact_positions, powers


def angles(position: Tensor, dims: int, theta: float = 10000.0) -> Tensor:
    """p * theta_i, [T, d/2], float64.

    Counting i from 1 with theta_i = theta^(-2(i-1)/d) (Su et al., eq. 15) is the same table, and counting
    positions from 1 shifts queries and keys alike, which no score can see. Raises ConfigError for odd dims.
    """
    if dims < 2 or dims % 2:
        raise ConfigError(
            f"rotary dims must be even (coordinates are rotated in pairs) and at least 2, got {dims}"
        )
    return exact_positions(position)[:, None] * powers(theta, dims, position.device)


def complex_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """f(q, m) = q e^(i m theta): neighbours are the real and the imaginary part (`freqs_cis` of Meta's
    LLaMA).
    """
    angle = angles(position, x.shape[-1], theta)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)


def rotation_matrix(position: int, dims: int, theta: float = 10000.0) -> Tensor:
    """R_m [d, d]: 2 x 2 blocks ((cos, -sin), (sin, cos)) of m theta_i along the diagonal, float64. R_m^T R_n
    = R_(n-m).
    """
    angle = angles(torch.tensor([position]), dims, theta)[0]
    cos, sin = angle.cos(), angle.sin()
    rotation: Tensor = torch.block_diag(*torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2)))
    return rotation


def matrix_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """R_m x by the whole block-diagonal matrix: d^2 products where 2d would do."""
    rotations = torch.stack([rotation_matrix(int(p), x.shape[-1], theta) for p in position]).to(x.dtype)
    return torch.einsum("tij,...tj->...ti", rotations, x)


def swapped_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """(q0, q1, q2, ..) * (cos0, cos0, cos1, ..) + (-q1, q0, -q3, ..) * (sin0, sin0, sin1, ..)."""
    angle = angles(position, x.shape[-1], theta).repeat_interleave(2, -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    swapped = torch.stack((-odd, even), -1).flatten(-2)
    return x * angle.cos().to(x.dtype) + swapped * angle.sin().to(x.dtype)


def half_split_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """[Y1 Y2] * cos [C C] + [-Y2 Y1] * sin [C C], C [T, d/2] the angles.

    Printed with C alone, whose d/2 columns do not fit the d columns of Y; C is meant twice.
    """
    half = angles(position, x.shape[-1], theta)
    twice = torch.cat((half, half), -1)
    first, second = x.chunk(2, -1)
    return x * twice.cos().to(x.dtype) + torch.cat((-second, first), -1) * twice.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) for the two halves of the last axis."""
    first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-second, first), -1)


def rotate_half_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """x * cos + rotate_half(x) * sin with tables built once and indexed by position (LLaMA in
    `transformers`).
    """
    low, high = int(position.min()), int(position.max())
    table = angles(torch.arange(low, high + 1), x.shape[-1], theta)
    table = torch.cat((table, table), -1)
    cos, sin = table.cos()[position - low].to(x.dtype), table.sin()[position - low].to(x.dtype)
    return x * cos + rotate_half(x) * sin
