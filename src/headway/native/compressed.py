"""Lossless compression of bf16 weights to about 11 bits each.

Trained weights use few exponents: seven of 256 cover 97 of 100 weights. So signs and mantissas (8 bits) are kept as
they are, and exponents become codes of 3 bits; the eighth code says that the exponent itself follows. Decoding is
bound by reading the weights, and these are about 70 % of the bytes.

The idea of exponents of variable length is DFloat11's (Zhang et al. 2025, arXiv 2504.11651, section 2), which uses
Huffman codes; codes of one length are decoded by a few instructions for 64 weights (`csrc/compressed.h`, on CPUs with
AVX-512 VBMI2 and bf16; elsewhere one by one, slowly).

Legend: O outputs, I inputs.
"""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.errors import BackendError
from headway.hardware import large_pages
from headway.native.loader import library, threads, why_missing

CODES, BEHIND = 7, 64
"""Number of exponents that have a code; number of bytes that the kernels may read after the last weight."""


class Compressed(NamedTuple):
    """A matrix of bf16 weights in the kernels' layout.

    Attributes:
        data: uint8; the rows in the layout of `csrc/compressed.h`, and `BEHIND` bytes of padding.
        starts: int64 [O], the byte at which each row begins.
        table: the exponents that have codes, one byte each, the first in the lowest byte.
        outputs, inputs: O and I.
    """

    data: Tensor
    starts: Tensor
    table: int
    outputs: int
    inputs: int

    @classmethod
    def pack(cls, weight: Tensor) -> "Compressed":
        """Compresses a weight. Raises BackendError unless it is bf16 [O, I] on the CPU, and if there are no native
        kernels."""
        dll = _kernels()
        if weight.dtype != torch.bfloat16 or weight.ndim != 2 or weight.device.type != "cpu":
            raise BackendError(
                f"Compressed takes bf16 matrices on the CPU, not {weight.dtype} {[*weight.shape]} on {weight.device}"
            )
        weight = weight.detach() if weight.stride(1) == 1 else weight.detach().contiguous()
        (outputs, inputs), row = weight.shape, weight.stride(0)
        parts = [(a, b) for a, b in pairwise(_edges(outputs)) if a < b]

        def at(first: int) -> int:
            return weight.data_ptr() + 2 * first * row

        counts = torch.zeros(len(parts), 256, dtype=torch.int64)
        _each(lambda n, a, b: dll.headway_exponents(at(a), b - a, inputs, row, counts[n].data_ptr()), parts)
        frequent = counts.sum(0).topk(CODES).indices.tolist()
        table = int.from_bytes(frequent, "little")
        starts = torch.empty(outputs, dtype=torch.int64)

        def measured(number: int, a: int, b: int) -> int:
            size: int = dll.headway_compress(at(a), b - a, inputs, row, table, None, starts[a:].data_ptr())
            return size

        sizes = _each(measured, parts)
        begins = [sum(sizes[:number]) for number in range(len(parts))]
        data = torch.empty(sum(sizes) + BEHIND, dtype=torch.uint8)
        data[-BEHIND:] = 0
        large_pages([data])

        def written(number: int, a: int, b: int) -> None:
            to = data.data_ptr() + begins[number]
            dll.headway_compress(at(a), b - a, inputs, row, table, to, None)
            starts[a:b] += begins[number]

        _each(written, parts)
        return cls(data, starts, table, outputs, inputs)

    def unpack(self, first: int = 0, count: int | None = None, *, into: Tensor | None = None) -> Tensor:
        """Returns the weights of `count` outputs (default: all) from `first` on, bf16 [O, I], bit-identical. They are
        written to `into`, which has as many bf16 elements or more, or to new memory."""
        dll, starts = _kernels(), self.starts[first:] if count is None else self.starts[first : first + count]
        size = len(starts) * self.inputs
        out = torch.empty(size, dtype=torch.bfloat16) if into is None else into[:size]
        out = out.view(len(starts), self.inputs)

        def written(_: int, a: int, b: int) -> None:
            to, begins = out[a:].data_ptr(), starts[a:].data_ptr()
            dll.headway_decompress(to, b - a, self.inputs, self.data.data_ptr(), begins, self.table)

        _each(written, [(a, b) for a, b in pairwise(_edges(len(starts))) if a < b])
        return out

    @property
    def nbytes(self) -> int:
        """Bytes of the data and the starts."""
        return self.data.nbytes + self.starts.nbytes


def _kernels() -> Any:
    kernels = library()
    if kernels is None:
        raise BackendError(f"compressed weights need the native kernels: {why_missing()}")
    dll, size, table, address = kernels.dll, ctypes.c_int64, ctypes.c_uint64, ctypes.c_void_p
    dll.headway_exponents.restype = dll.headway_decompress.restype = None
    dll.headway_exponents.argtypes = [address, size, size, size, address]
    dll.headway_compress.restype = size
    dll.headway_compress.argtypes = [address, size, size, size, table, address, address]
    dll.headway_decompress.argtypes = [address, size, size, address, address, table]
    return dll


def _edges(rows: int) -> list[int]:
    parts = threads()
    return [rows * part // parts for part in range(parts + 1)]


def _each(do: Any, parts: list[tuple[int, int]]) -> list[Any]:
    """Returns the results of `do` for every part, run in threads: kernel calls release the GIL."""
    if len(parts) < 2:
        return [do(number, *part) for number, part in enumerate(parts)]
    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(lambda numbered: do(numbered[0], *numbered[1]), enumerate(parts)))
