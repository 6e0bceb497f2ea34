"""What calls of the native kernels do: their names, times, bytes and FLOPs, from what they are called with."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from headway.native import interface as c
from headway.native.loader import search
from headway.native.panels import PANEL
from headway.nn.weights.nf4 import BLOCK as NF4_BLOCK
from headway_lab.bench.torch_operators import Found

ATTENTION, ATTENTION_BACKWARD = "attention", "attention, backward"
BLOCK = ("q, k, v", "rotations, cache", ATTENTION, "out", "gate, up", "down")
"""The native operators of a LLaMA's block, in their order (`DecodeStep`)."""
LOGITS = "logits"
SIZES = {number: dtype.itemsize for dtype, number in c.TYPES.items()}

Work = tuple[str, float, float]
"""An operator's name, bytes and FLOPs."""


def _there(*addresses: object) -> int:
    return sum(bool(one) for one in addresses)


def _of_norm(s: Any) -> Work:
    tensors = _there(s.x, s.residual, s.sum, s.y, s.dy, s.d_sum, s.dx)
    return _both_ways("norm", s.dy), tensors * s.rows * s.width * SIZES[s.type], 0.0


def _of_gate(s: Any) -> Work:
    tensors = _there(s.gate, s.up, s.y, s.dy, s.d_gate, s.d_up)
    return _both_ways("gate", s.dy), tensors * s.rows * s.width * SIZES[s.type], 0.0


def _of_rotation(s: Any) -> Work:
    numbers = s.batch * s.slots * s.dim * sum(s.heads[: s.count])
    return _both_ways("rotation", s.back), 2 * numbers * SIZES[s.type], 0.0


def _of_entropy(s: Any) -> Work:
    return "cross entropy", (1 + s.gradient) * s.rows * s.width * SIZES[s.type], 0.0


def _of_attention(s: Any) -> Work:
    """FLOPs depend on the pattern, which the caller knows."""
    widths = s.dim + s.dim_v
    numbers = s.batch * widths * (s.heads * s.queries.count + s.kv_heads * s.keys.count)
    back = bool(s.d_out.data)
    return _both_ways(ATTENTION, back), (2 if back else 1) * numbers * SIZES[s.type], 0.0


def _of_products(s: Any) -> Work:
    matrices = s.matrices[: s.count]
    outputs = sum(one.outputs for one in matrices)
    weights = sum(_weight_bytes(one, s.inputs) for one in matrices)
    rows = s.rows * SIZES[s.type] * (s.inputs + outputs)
    name = f"product {s.inputs} x {' + '.join(str(one.outputs) for one in matrices)}"
    return name, weights + rows, 2.0 * s.rows * s.inputs * outputs


def _weight_bytes(matrix: Any, inputs: int) -> int:
    panels = c.INT8 <= matrix.type < c.COMPRESSED
    rows = -(-matrix.outputs // PANEL) if panels else matrix.outputs
    scales = inputs // NF4_BLOCK if matrix.type == c.NF4 else 0
    size: int = rows * (matrix.step + scales)
    return size


def _of_heads(s: Any) -> Work:
    numbers = s.rows * (s.heads * s.dim + s.kv_heads * (s.dim + s.dim_v))
    return "heads", 2 * numbers * SIZES[s.type], 0.0


def _both_ways(name: str, back: object) -> str:
    return f"{name}, backward" if back else name


WORK: Mapping[str, Callable[[Any], Work]] = {
    "headway_norm_rows": _of_norm,
    "headway_gate_rows": _of_gate,
    "headway_rotate_rows": _of_rotation,
    "headway_entropy_rows": _of_entropy,
    "headway_forward": _of_attention,
    "headway_backward": _of_attention,
    "headway_linear": _of_products,
}
OPS = {
    c.PRODUCTS: (c.ProductsStruct, _of_products),
    c.HEADS: (c.HeadsStruct, _of_heads),
    c.ATTENTION: (c.CallStruct, _of_attention),
}


@contextmanager
def native_calls() -> Iterator[list[Found]]:
    """Calls of the native kernels inside the block, as they are made; a step of decoding operator by operator."""
    calls: list[Found] = []
    with ExitStack() as stack:
        if (found := search().library) is not None:
            replaced = {name: _timed(getattr(found.dll, name), work, calls) for name, work in WORK.items()}
            replaced["headway_step"] = _in_parts(found.dll.headway_step, calls)
            for name, call in replaced.items():
                stack.callback(setattr, found.dll, name, getattr(found.dll, name))
                setattr(found.dll, name, call)
        yield calls


def _timed(plain: Any, work: Callable[[Any], Work], calls: list[Found]) -> Callable[..., int]:
    def call(pointer: Any) -> int:
        begin = time.perf_counter()
        code: int = plain(pointer)
        seconds = time.perf_counter() - begin
        name, size, flops = work(pointer._obj)
        calls.append(Found(name, seconds, size, flops))
        return code

    return call


def _in_parts(plain: Any, calls: list[Found]) -> Callable[..., int]:
    def call(ops: Any, count: Any, threads: Any) -> int:
        for i in range(count.value):
            struct, work = OPS[ops[i].kind]
            _, size, flops = work(struct.from_address(ops[i].of))
            one, alone = ctypes.byref(ops, i * ctypes.sizeof(c.OpStruct)), ctypes.c_int64(1)
            begin = time.perf_counter()
            if code := plain(one, alone, threads):
                return int(code)
            name = LOGITS if i == len(ops) - 1 else BLOCK[i % len(BLOCK)]
            calls.append(Found(name, time.perf_counter() - begin, size, flops))
        return 0

    return call
