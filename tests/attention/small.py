"""Small calls in float64 whose results are known to the last bits, and the backends that must give them."""

import torch
from torch import Tensor

BACKENDS = ["auto", "dense", "sdpa", "banded", "diagonal"]
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def qkv(n: int = 11, keys: int | None = None, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, 4, n, 6), *[(rows, 2, n if keys is None else keys, 6)] * 2)
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return q, k, v


def by_mask(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Computes attention with a boolean mask (True: the pair may be seen); a row that sees nothing is 0."""
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).transpose(-1, -2) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~keep, float("-inf")).softmax(-1).masked_fill(~keep, 0.0)
    return weights.where(keep.any(-1, keepdim=True), 0.0) @ v.repeat_interleave(group, 1)
