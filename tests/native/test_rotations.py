"""Rotations by the kernels, against their formulas in float64, forward and backward."""

import pytest
import torch
from torch import Tensor

from headway.nn.fused import (
    rotate,
)
from tests.native.conftest import Use, at_levels
from tests.native.test_rows import DTYPES, assert_as_the_formula, draw, rotated


def assert_rotated(xs: list[Tensor], cos: Tensor, sin: Tensor, pairing: str | Tensor, label: str) -> None:
    def plain(*xs: Tensor) -> list[Tensor]:
        return rotated(xs, cos, sin, pairing)

    assert_as_the_formula("rotation", lambda *xs: rotate(xs, cos, sin, pairing), plain, xs, label, plain)


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pairing", ["halves", "adjacent", "pairs"])
def test_rotations(use: Use, threads: None, level: str, dtype: torch.dtype, pairing: str) -> None:
    use(level)
    for size, dim, batch in ((2, 2, 1), (6, 7, 2), (16, 16, 1), (34, 40, 2), (64, 64, 2)):
        partner: str | Tensor = pairing
        if pairing == "pairs":
            order = torch.randperm(size, generator=torch.Generator().manual_seed(size))
            partner = torch.empty(size, dtype=torch.int64)
            partner[order[::2]], partner[order[1::2]] = order[1::2], order[::2]
            first = order[::2]
        else:
            first = torch.arange(size // 2) if pairing == "halves" else torch.arange(0, size, 2)
        second = (
            partner[first]
            if isinstance(partner, Tensor)
            else first + (size // 2 if pairing == "halves" else 1)
        )
        angle = 3 * draw(batch, 33, size // 2, seed=5, dtype=torch.float32)
        cos, sin = torch.empty(batch, 33, size), torch.empty(batch, 33, size)
        cos[..., first] = cos[..., second] = angle.cos()
        sin[..., first], sin[..., second] = -angle.sin(), angle.sin()
        q, k, v = (draw(2, 33, heads, dim, seed=heads, dtype=dtype).transpose(1, 2) for heads in (8, 3, 1))
        v = v.contiguous()  # has another memory layout

        for tensors in ([q, k], [q], [q, k, v]):
            assert_rotated(tensors, cos, sin, partner, f"{pairing} {size} of {dim}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [((4, 8), (4, 12)), ((4, 8), (5, 8)), ((3, 514),), ((1, 516), (1, 8))])
def test_rotations_of_unequal_and_of_wide_heads(dtype: torch.dtype, sizes: tuple[tuple[int, int]]) -> None:
    xs = [draw(2, 3, *size, seed=size[1], dtype=dtype) for size in sizes]
    count = 1 if sizes[0][0] != sizes[-1][0] else sizes[0][0]
    angle = draw(count, 4, seed=1, dtype=torch.float32).repeat(1, 2)
    cos, sin = angle.cos(), torch.cat((-angle[:, :4].sin(), angle[:, 4:].sin()), -1)

    assert_rotated(xs, cos, sin, "halves", str(sizes))
