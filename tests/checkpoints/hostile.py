"""Shared by the tests of hostile files: a small model, hand-made files, and a bound on memory."""

import json
import struct
import tracemalloc
from contextlib import contextmanager

from headway.models import ModelSpec

SPEC = ModelSpec.of("llama", vocab=61, width=16, layers=2, heads=4, kv_heads=2, hidden=24, init_std=0.3)


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@contextmanager
def small_memory(limit=30 << 20):
    """Asserts that Python allocates less than `limit` bytes inside the block."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def safetensors(path, header, values=bytes(8), length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + values)
    return path
