"""GGUF blocks: codes and the numbers that they stand for, packed and read."""

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.errors import CheckpointError
from headway.storage.gguf_blocks import Q4_0, Q8_0, TYPES, blocks, codes, dequantize, quantize


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([Q8_0, Q4_0]), st.sampled_from([0.0, 1e-3, 1.0, 100.0]))
def test_packing_takes_the_nearest_code(seed, kind, size):
    """No other code of the type is nearer, with d as it was before rounding: Q8_0's d is 1/127 of the largest absolute
    value, Q4_0's is -1/8 of the number with that absolute value, sign included."""
    x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(seed)) * size
    packed = quantize(x.flatten(1), kind)
    matrix = codes(packed, kind)
    assert torch.equal(matrix.dequantize(), dequantize(packed, kind))
    largest = x.gather(2, x.abs().argmax(2, keepdim=True))
    d, middle = (largest.abs() / 127, 128) if kind is Q8_0 else (largest / -8, 8)
    assert torch.equal(matrix.scale, d[..., 0].half())
    candidates = d.double() * (torch.arange(2 * middle) - middle)  # [5, 2, codes]
    error = (candidates.gather(2, matrix.codes.view(5, 2, 32).long()) - x).abs()
    best = (candidates[:, :, None] - x[..., None]).abs().amin(3)
    assert (error <= best + 2.0**-20 * largest.abs()).all()  # d and x / d are rounded


def test_packing_rounds_halves_away_from_zero_and_refuses_what_has_no_code():
    x = torch.zeros(1, 32)
    x[0, :3] = torch.tensor([127.0, 2.5, -2.5])
    assert dequantize(quantize(x, Q8_0), Q8_0)[0, :3].tolist() == [127.0, 3.0, -3.0]
    x[0, :3] = torch.tensor([8.0, -8.0, 7.0])  # d = -1: the codes of 8, -8, 7 would be 0, 16, 1
    assert dequantize(quantize(x, Q4_0), Q4_0)[0, :3].tolist() == [8.0, -7.0, 7.0]
    for value in (float("inf"), float("nan")):
        with pytest.raises(CheckpointError, match="an infinity or NaN"):
            quantize(torch.full((1, 32), value), Q8_0)
    with pytest.raises(CheckpointError, match=r"rows of 33 numbers cannot be split into .* of 32"):
        quantize(torch.zeros(1, 33), Q4_0)
    with pytest.raises(CheckpointError, match="Q4_1 can be read but not written"):
        quantize(torch.zeros(1, 32), next(kind for kind in TYPES if kind.name == "Q4_1"))


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.block == 256], ids=lambda kind: kind.name)
def test_codes_and_scales_of_blocks_are_all_of_their_bits(kind):
    """Arbitrary bytes are read as codes and scales, and written back unchanged."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (20, 3 * kind.nbytes), generator=generator, dtype=torch.uint8)
    assert torch.equal(blocks(codes(raw, kind)), raw)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind.unpack], ids=lambda kind: kind.name)
def test_numbers_are_bit_equal_to_the_gguf_package_s(kind):
    """Blocks of random bytes are compared; numbers that are not finite are left out."""
    import gguf

    raw = torch.randint(
        0, 256, (512, 4 * kind.nbytes), generator=torch.Generator().manual_seed(0), dtype=torch.uint8
    )
    with numpy.errstate(invalid="ignore", over="ignore"):
        theirs = torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind.number)))
    ours = dequantize(raw, kind)
    finite = theirs.isfinite()
    assert finite.float().mean() > 0.5
    assert torch.equal(ours.isfinite(), finite)
    assert torch.equal(ours[finite].view(torch.int32), theirs[finite].view(torch.int32))
