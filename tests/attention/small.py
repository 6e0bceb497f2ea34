"""Small calls in float64 whose results are known to the last bits, and the backends that must give them."""

import torch
from torch import Tensor

from headway.scores import ALiBi, RelativeBias, RelativeKey, Score, SoftCap

BACKENDS = ["auto", "dense", "sdpa", "banded", "diagonal"]
EXACT = {"rtol": 1e-11, "atol": 1e-11}


def qkv(n: int = 11, keys: int | None = None, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((rows, 4, n, 6), *[(rows, 2, n if keys is None else keys, 6)] * 2)
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    return q, k, v


def scores(
    heads: int, width: int, dtype: torch.dtype = torch.float64, device: str | None = None
) -> list[Score]:
    """Returns a step of each kind that does not depend on slots, with tables that need gradients."""

    def table(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device, requires_grad=True)

    return [
        SoftCap(2.0),
        ALiBi(),
        RelativeBias(table(8, heads), max_distance=20),
        RelativeBias(table(8, heads), bidirectional=False),
        RelativeKey(table(9, width)),
    ]
