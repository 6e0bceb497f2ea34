"""How much rotary products may shrink with distance: an upper trend with bumps, not a law for every pair.

    S_j(m) = sum_(i<j) e^(i m theta_i)          decay(m) = 1/(d/2) * sum_(j=1..d/2) |S_j(m)|

    |sum_i h_i e^(i m theta_i)| <= max_i |h_(i+1) - h_i| * sum_j |S_j(m)|         h_i = q_i k_i^*, h_(d/2) = 0

(Abel summation; Su et al. 2021, section 3.4.3.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def decay(distance: Tensor, frequencies: Tensor) -> Tensor:
    """decay(m) of distances [...] under the frequencies [d/2], float64. All frequencies equal: constant."""
    angle = distance.to(torch.float64)[..., None] * frequencies.to(torch.float64)
    partial = torch.polar(torch.ones_like(angle), angle).cumsum(-1)
    return partial.abs().mean(-1)


def product(q: Tensor, k: Tensor, distance: Tensor, frequencies: Tensor) -> Tensor:
    """|sum_i h_i e^(i m theta_i)| for q, k [..., d] in neighbour pairs and a distance m that broadcasts to
    [...].
    """
    angle = distance.to(torch.float64)[..., None] * frequencies.to(torch.float64)
    return (_pairs(q, k) * torch.polar(torch.ones_like(angle), angle)).sum(-1).abs()


def bound(q: Tensor, k: Tensor, distance: Tensor, frequencies: Tensor) -> Tensor:
    """The right-hand side of the Abel bound on `product`, same shapes."""
    h = _pairs(q, k)
    steps = torch.cat((h[..., 1:], torch.zeros_like(h[..., :1])), -1) - h
    return steps.abs().amax(-1) * decay(distance, frequencies) * frequencies.shape[-1]


def _pairs(q: Tensor, k: Tensor) -> Tensor:
    q, k = (torch.view_as_complex(x.to(torch.float64).unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    return q * k.conj()
