"""Short convolutions by the kernels are those of torch in float64, forward and backward, at every level."""

from itertools import product

import torch

from headway.attention.delta.convolution import _plain, short_convolution
from headway.native import convolution
from tests.native.conftest import Use, at_levels, use  # noqa: F401

SIZES = (1, 1, 5, 4), (2, 7, 300, 4), (3, 33, 16, 3), (1, 20, 40, 8), (2, 9, 17, 1)
"""Rows, slots, channels, window."""


@at_levels(0)
def test_the_convolution_and_its_gradients(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    for (rows, slots, channels, window), act, *flags in product(
        SIZES, ("none", "silu"), *[(False, True)] * 3
    ):
        x = drawn(rows, slots, 2 * channels)[..., :channels]  # with gaps between its rows
        inputs = [x, drawn(channels, window), drawn(channels), drawn(rows, window - 1, channels)]
        inputs[2:] = (t if is_present else None for t, is_present in zip(inputs[2:], flags, strict=False))
        begins = torch.rand(rows if slots % 2 else 1, slots, generator=generator) < 0.2 if flags[2] else None
        single, double = (
            [None if t is None else t.detach().to(dtype).requires_grad_() for t in inputs]
            for dtype in (torch.float32, torch.float64)
        )
        x, weight, bias, past = single
        assert convolution.takes(x, weight, past) or (
            window == 1 and past is not None
        )  # a past of no slots has no numbers
        y = short_convolution(x, weight, bias, begins=begins, past=past, act=act)
        exact = _plain(*double, begins, act)
        dy = drawn(*y.shape)
        for actual, expected in zip(
            (y, *torch.autograd.grad(y, [t for t in single if t is not None], dy)),
            (exact, *torch.autograd.grad(exact, [t for t in double if t is not None], dy.double())),
            strict=True,
        ):
            assert actual.shape == expected.shape
            assert torch.allclose(actual.double(), expected, rtol=1e-5, atol=2e-5)


def test_half_numbers_are_rounded_where_torch_rounds() -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight = (torch.randn(*s, generator=generator).bfloat16() for s in ((2, 30, 64), (64, 4)))
    actual = short_convolution(x, weight, act="silu").float()
    expected = _plain(x.double(), weight.double(), None, None, None, "silu")
    reference = _plain(x, weight, None, None, None, "silu").float()
    assert (actual - expected).abs().max() <= 1.5 * (reference - expected).abs().max()
