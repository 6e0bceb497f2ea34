"""Similarity of vectors: dot product and cosine.

All functions work along the last axis, and leading axes broadcast. Half precision is computed in float32 and rounded
once.
"""

import torch
from torch import Tensor


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Returns sum_i a_i b_i: [..., D], [..., D] -> [...]."""
    return (_wide(a) * _wide(b)).sum(-1).to(torch.promote_types(a.dtype, b.dtype))


def l2_norm(x: Tensor) -> Tensor:
    """Returns sqrt(sum_i x_i^2): [..., D] -> [...]. The zero vector gives 0, with gradient 0."""
    size = _size(wide := _wide(x))
    norm: Tensor = torch.linalg.vector_norm(wide / size, dim=-1) * size.squeeze(-1)
    return norm.to(x.dtype)


def normalize(x: Tensor) -> Tensor:
    """Returns x / |x|: [..., D] -> [..., D] of length 1. The zero vector, which has no direction, stays 0, with
    gradient 0.
    """
    wide = _wide(x)
    scaled = wide / _size(wide)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    zero = norm == 0
    return torch.where(zero, 0.0, scaled / torch.where(zero, 1.0, norm)).to(x.dtype)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Returns a . b / (|a| |b|), the cosine of their angle: [..., D], [..., D] -> [...]. 0 if either is the zero
    vector.
    """
    return dot(normalize(_wide(a)), normalize(_wide(b))).to(torch.promote_types(a.dtype, b.dtype))


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _size(x: Tensor) -> Tensor:
    """Returns the largest |x_i| [..., 1], a constant for autograd: scaled by it, squares neither overflow nor
    underflow."""
    size = x.detach().abs().amax(-1, keepdim=True)
    return torch.where(size == 0, 1.0, size)
