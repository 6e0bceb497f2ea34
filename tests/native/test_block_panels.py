"""Products with weights in blocks of 256 (q4_K, q5_K, q6_K) against exact integers, and how they are stored."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.block_quantization import PARTS, quantize_blocks
from headway.errors import BackendError
from headway.native.block_panels import BlockPanels
from headway.native.linear import linear
from headway.native.panels import Panels
from headway.quantization import quantize_weights
from tests.native.conftest import EVERY_LEVEL, Use, at_levels
from tests.native.test_linear import DTYPES, assert_sums
from tests.native.weights import drawn, rounded

SIZES = [(1, 1, 256), (2, 17, 512), (3, 70, 256), (5, 16, 768), (9, 33, 2304), (23, 50, 256), (70, 20, 1280)]
"""Rows, outputs, inputs."""
BITS = sorted(PARTS)


@at_levels(0, EVERY_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_products_are_those_of_the_numbers_with_inputs_in_8_bits(
    use: Use, level: str, dtype: torch.dtype, bits: int
) -> None:
    use(level)
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in SIZES:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        matrix, b = drawn(outputs, inputs, bits, rows), torch.randn(outputs, generator=generator)
        (actual,) = linear(x, [BlockPanels.pack(matrix)], [b])
        q, scale = rounded(x)
        rounded_x = (q * scale.unsqueeze(2)).flatten(1)
        w = matrix.dequantize()
        expected, reference = rounded_x.double() @ w.double().T + b.double(), rounded_x @ w.T + b
        parts = replace(matrix, low=None if matrix.low is None else 0 * matrix.low).dequantize(torch.float64)
        terms = x.double().norm(dim=1, keepdim=True) * parts.square().mean().sqrt()
        assert_sums(f"products of {bits} bits in blocks", actual, expected, reference, terms)


@at_levels(1, EVERY_LEVEL)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_a_row_gets_the_same_bits_alone_and_among_many(
    use: Use, level: str, dtype: torch.dtype, bits: int
) -> None:
    """Also beside other matrices."""
    use(level)
    generator = torch.Generator().manual_seed(0)
    for rows, outputs, inputs in [
        (9, 1, 256),
        (16, 40, 1280),
        (65, 17, 256),
        (193, 70, 512),
        (300, 33, 2560),
    ]:
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        packed = BlockPanels.pack(drawn(outputs, inputs, bits))
        other_matrix = Panels.pack(quantize_weights(torch.randn(20, inputs, generator=generator), 4, 32))
        many, other_product = linear(x, [packed, other_matrix])
        few = [linear(x[first : first + 3], [packed])[0] for first in range(0, rows, 3)]
        assert torch.equal(many, torch.cat(few)), (rows, outputs, inputs)
        assert torch.equal(other_product, linear(x, [other_matrix])[0])


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(BITS), st.integers(1, 40), st.integers(1, 3), st.integers(0, 99))
def test_panels_give_back_what_they_are_made_of(bits: int, outputs: int, blocks: int, seed: int) -> None:
    """The whole matrix, some panels and some rows are unpacked, and the packed data has the counted bytes."""
    matrix = drawn(outputs, 256 * blocks, bits, seed)
    packed = BlockPanels.pack(matrix)
    unpacked, numbers = packed.unpack(), matrix.dequantize()
    for name in ("codes", "scale", "low", "d", "dmin"):
        expected, actual = getattr(matrix, name), getattr(unpacked, name)
        assert (expected is None and actual is None) or torch.equal(expected, actual)
    assert torch.equal(packed.unpack(outputs // 16, 1).dequantize(), numbers[outputs // 16 * 16 :][:16])
    picked = torch.randint(outputs, (7,), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(packed.rows(picked), numbers[picked])
    bytes_of_file = {4: 144, 5: 176, 6: 210}[bits] * blocks * 16 * -(-outputs // 16)
    assert bytes_of_file <= packed.data.nbytes <= 1.03 * bytes_of_file


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(BITS), st.integers(1, 9), st.integers(0, 99), st.sampled_from([1e-3, 1.0, 30.0]))
def test_a_code_is_the_nearest_of_its_part(bits: int, outputs: int, seed: int, size: float) -> None:
    """A number is off by at most half a step, and by what rounding the scales of its part to whole numbers moves its
    ends: half a unit of each. Zeros are exact."""
    w = torch.randn(outputs, 512, generator=torch.Generator().manual_seed(seed)) * size
    w[0, :256] = 0.0
    quantized = quantize_blocks(w, bits)
    parts_per_block = 256 // PARTS[bits]
    d = quantized.d.float().repeat_interleave(parts_per_block, 1)
    step = (d * quantized.scale.float()).repeat_interleave(PARTS[bits], 1)
    slack = d.repeat_interleave(PARTS[bits], 1) * (1 << bits) / 2
    if quantized.dmin is not None:
        slack = slack + quantized.dmin.float().repeat_interleave(256, 1) / 2
    error = (quantized.dequantize() - w).abs()
    assert bool((error <= 0.5 * step + slack + 2.0**-10 * w.abs().max()).all())
    assert not quantized.dequantize()[0, :256].any()


def test_what_the_kernels_refuse() -> None:
    packed = BlockPanels.pack(drawn(4, 256, 4))
    with pytest.raises(BackendError, match="headway_linear failed"):
        linear(torch.ones(1, 128), [packed])
