"""Compressed bf16 weights: the same numbers to the bit, alone, in products, and read by plain Python."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import BackendError
from headway.native.compressed import BEHIND, CODES, Compressed
from headway.native.linear import linear
from tests.native.conftest import Use, at_levels
from tests.native.test_linear import DTYPES, SIZES

PLACES = 64


def any_bits(outputs: int, inputs: int, seed: int, rare: float = 0.1) -> Tensor:
    """Returns normal numbers, of which some get random bits: infinities, NaN, zeros, subnormal numbers."""
    generator = torch.Generator().manual_seed(seed)
    w = (torch.randn(outputs, inputs, generator=generator) * 0.02).bfloat16()
    bits = torch.randint(-(1 << 15), 1 << 15, w.shape, dtype=torch.int16, generator=generator)
    return torch.where(torch.rand(w.shape, generator=generator) < rare, bits.view(torch.bfloat16), w)


def read(packed: Compressed) -> Tensor:
    """Reads the format place by place, as `csrc/compressed.h` describes it."""
    data, table = packed.data.numpy(), packed.table.to_bytes(8, "little")
    out = np.zeros((packed.outputs, packed.inputs), np.uint16)
    for row, offset in enumerate(packed.starts.tolist()):
        for first in range(0, packed.inputs, PLACES):
            planes = np.unpackbits(data[offset : offset + 24].reshape(3, 8), axis=1, bitorder="little")
            low_bytes, offset = data[offset + 24 : offset + 88], offset + 88
            for place in range(PLACES):
                code = int(planes[0, place] + 2 * planes[1, place] + 4 * planes[2, place])
                exponent = table[code] if code < CODES else int(data[offset])
                assert (exponent in table[:CODES]) == (code < CODES)
                offset += code == CODES
                lane, inside = divmod(place, 16)
                column = first + (lane * 8 + inside if inside < 8 else 32 + lane * 8 + inside - 8)
                if column < packed.inputs:
                    low_byte = int(low_bytes[place])
                    out[row, column] = (low_byte & 0x80) << 8 | exponent << 7 | low_byte & 0x7F
                else:
                    assert exponent == low_bytes[place] == 0
    return torch.from_numpy(out.view(np.int16))


def test_the_format_is_what_it_is_said_to_be() -> None:
    w = any_bits(5, 203, 0)
    packed = Compressed.pack(w)
    assert torch.equal(read(packed), w.view(torch.int16))
    assert packed.starts.tolist() == sorted(packed.starts.tolist())
    assert packed.data[-BEHIND:].eq(0).all()


@at_levels(0)
def test_to_the_bit(use: Use, level: str) -> None:
    use(level)
    previous = torch.get_num_threads()

    @given(
        outputs=st.integers(1, 40),
        inputs=st.integers(1, 200),
        seed=st.integers(0, 1 << 20),
        rare=st.sampled_from([0.0, 0.1, 1.0]),
        threads=st.integers(1, 3),
    )
    def check(outputs: int, inputs: int, seed: int, rare: float, threads: int) -> None:
        torch.set_num_threads(threads)
        w = any_bits(outputs, inputs + 3, seed, rare)[:, 1 : inputs + 1]
        packed = Compressed.pack(w)
        assert torch.equal(packed.unpack().view(torch.int16), w.contiguous().view(torch.int16))
        part = packed.unpack(outputs // 3, 5)
        assert torch.equal(part.view(torch.int16), w[outputs // 3 :][:5].contiguous().view(torch.int16))

    try:
        check()
    finally:
        torch.set_num_threads(previous)


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_plain_weights(use: Use, level: str, dtype: torch.dtype) -> None:
    """Sizes with few rows, which stream the weights, with more, and with a row longer than a line of plain weights."""
    use(level)
    generator = torch.Generator().manual_seed(1)
    for rows, outputs, inputs in [*SIZES, (6, 18, 16_400), (40, 40, 96)]:
        w = any_bits(outputs, inputs, rows)
        w = torch.where(w.isfinite() & (w.abs() < 1e4), w, torch.ones_like(w))
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        b = torch.randn(outputs, generator=generator)
        plain, compressed = linear(x, [w, Compressed.pack(w)], [b, b])
        assert torch.equal(plain, compressed), (rows, outputs, inputs)


def test_bits_of_normal_weights() -> None:
    """8 bits of sign and mantissa, 3 of a code, and 8 more for one in 47, those below about 2^-5 of the deviation."""
    w = torch.randn(512, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    bits = 8 * Compressed.pack(w).nbytes / w.numel()
    exponents = torch.bincount((w.view(torch.int16) >> 7 & 0xFF).flatten().long(), minlength=256)
    rare = 1 - exponents.topk(CODES).values.sum() / w.numel()
    assert bits == pytest.approx(11 + 8 * float(rare) + 8 * (8 * 512 + BEHIND) / w.numel())
    assert 0.01 < rare < 0.03


@pytest.mark.parametrize(
    "w", [torch.ones(3, 4), torch.ones(4, dtype=torch.bfloat16)], ids=["float32", "vector"]
)
def test_others_are_refused(w: Tensor) -> None:
    with pytest.raises(BackendError, match=r"Compressed takes bf16 matrices on the CPU, not torch\.\w+ \["):
        Compressed.pack(w)
