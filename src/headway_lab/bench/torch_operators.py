"""What torch's own operators do in a call, by its profiler: their names, times, bytes and FLOPs."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import ProfilerActivity, profile

SIZES = {
    "float": 4,
    "double": 8,
    "c10::BFloat16": 2,
    "c10::Half": 2,
    "long int": 8,
    "int": 4,
    "bool": 1,
    "unsigned char": 1,
    "signed char": 1,
    "TensorList": 4,
}
"""Bytes of a number by the profiler's names of types; lists of tensors are an optimizer's, in float32."""

VIEWS = "alias as_strided detach expand permute select slice split t transpose unsqueeze view _reshape_alias"
MEMORY = "empty empty_like empty_strided new_empty new_empty_strided"
NO_WORK = frozenset(f"{VIEWS} {MEMORY}".split())


class Found(NamedTuple):
    """Calls of an operator: seconds without those of the operators that it calls."""

    name: str
    seconds: float
    bytes: float = 0.0
    flops: float = 0.0
    calls: int = 1

    def with_calls(self, more: Found) -> Found:
        """These calls and more of the same."""
        return Found(
            self.name,
            self.seconds + more.seconds,
            self.bytes + more.bytes,
            self.flops + more.flops,
            self.calls + more.calls,
        )


def torch_operators(call: Callable[[], object]) -> list[Found]:
    """Every operator of torch that `call` runs in this thread, and in its backward."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        call()
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    own = _self_times([event for event in events if event.get("cat") == "cpu_op"])
    return [_found(event, seconds) for event, seconds in own if _works(event, seconds)]


def _works(event: dict[str, Any], seconds: float) -> bool:
    """Whether it reads or writes numbers itself: neither a view, nor memory, nor what calls other operators."""
    space, _, name = event["name"].rpartition("::")
    return space in ("aten", "mkldnn") and name not in NO_WORK and seconds > event["dur"] / 2e6


def _self_times(events: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], float]]:
    """Each event with its own seconds, those of the events inside it taken off."""
    own: list[tuple[dict[str, Any], float]] = []
    for thread in {event["tid"] for event in events}:
        some = sorted((e for e in events if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"]))
        inside: list[float] = []
        stack: list[int] = []
        for i, event in enumerate(some):
            while stack and some[stack[-1]]["ts"] + some[stack[-1]]["dur"] <= event["ts"]:
                stack.pop()
            if stack:
                inside[stack[-1]] += event["dur"]
            stack.append(i)
            inside.append(0.0)
        own += [
            (event, max(0.0, event["dur"] - less) / 1e6) for event, less in zip(some, inside, strict=True)
        ]
    return own


def _found(event: dict[str, Any], seconds: float) -> Found:
    name, given = event["name"].split("::")[-1], event["args"]
    dims, types, strides = (given.get(f"Input {key}", []) for key in ("Dims", "type", "Strides"))
    tensors = [
        (d, SIZES[kind], s) for d, kind, s in zip(dims, types, strides, strict=True) if d and kind in SIZES
    ]
    if (product := _product(name, tensors)) is not None:
        return product._replace(seconds=seconds)
    return Found(name, seconds, float(_moved(name, [_numbers(d) * size for d, size, _ in tensors])), 0.0)


def _moved(name: str, sizes: Sequence[int]) -> int:
    """Bytes read and written, of the sizes of what is given: results are taken to be as large as the largest of these,
    and those of operators in place (add_) are the first."""
    if name in ("copy_", "zero_", "fill_") or not sizes:
        return sum(sizes)
    if name == "_fused_adamw_":  # weights, gradients, moments; all but the gradients are written
        return 2 * sum(sizes) - sizes[1]
    return sum(sizes) + (sizes[0] if name.endswith("_") else max(sizes))


def _numbers(dims: Any) -> int:
    """Numbers of a tensor of these sizes, or of a list of tensors."""
    return sum(map(_numbers, dims)) if dims and isinstance(dims[0], list) else prod(dims)


def _product(name: str, tensors: Sequence[tuple[Any, int, Any]]) -> Found | None:
    """A product of two matrices, named by its role beside a W [O, I] ("I x O"): x W^T, dy W, or dy^T x. Which of them
    is transposed says which it is."""
    if name not in ("mm", "addmm", "addmm_", "_linear_pointwise"):
        return None
    (a, size, a_strides), (b, _, b_strides), *_ = tensors[1:] if name.startswith("addmm") else tensors
    if name == "_linear_pointwise":
        b, b_strides = b[::-1], b_strides[::-1]
    rows, inner, outputs = prod(a[:-1]), a[-1], b[-1]
    if a_strides[0] == 1 and len(a) == 2 and a[0] > 1:
        called = f"gradient of weights {outputs} x {rows}"
    elif b_strides[0] == 1:
        called = f"product {inner} x {outputs}"
    else:
        called = f"gradient of inputs {outputs} x {inner}"
    moved = size * (rows * inner + inner * outputs + rows * outputs)
    return Found(called, 0.0, float(moved), 2.0 * rows * inner * outputs)
