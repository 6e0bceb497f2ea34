"""Kernels behind the fences of `fence.c`, which is loaded before all other libraries: the program of test_memory.py."""

import ctypes
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.errors import BackendError
from headway.models.decode_step import DecodeStep
from headway.native import build, compressed, loader, rows
from headway.native.block_panels import BlockPanels
from headway.native.linear import linear
from headway.native.panels import Panels
from headway.nn.fused import add_norm, gated
from headway.nn.weights import Nf4
from headway.patterns import Causal, Full, GlobalQueries, Pattern, Sink, Window
from headway.quantization import quantize_weights
from headway.tokens import Tokens
from tests.models.test_decode_step import model, native, read
from tests.native.calls import outcome, problem, steps
from tests.native.plain import Problem
from tests.native.test_block_panels import drawn

FENCE = ctypes.CDLL(None)
FENCE.fence_bytes.restype = ctypes.c_size_t
HALF, SINGLE = torch.bfloat16, torch.float32
Run = Callable[[], list[Tensor]]


@contextmanager
def fences() -> Iterator[None]:
    FENCE.fence_on(1)
    try:
        yield
    finally:
        FENCE.fence_on(0)


def of_problem(*arguments: object, threads: int = 1, **options: object) -> Run:
    torch.manual_seed(0)
    case = problem(*arguments, **options)  # type: ignore[arg-type]

    def run() -> list[Tensor]:
        copied = replace(case, q=case.q.clone(), k=case.k.clone(), v=case.v.clone())
        return outcome(copied, threads)

    return run


def long(
    pattern: object, tokens: Tokens, dims: tuple[int, int], dtype: torch.dtype, score: str = "none"
) -> Run:
    torch.manual_seed(0)
    case = Problem.random(pattern, tokens, tokens, dtype, 1, (2, 1), dims, score=steps(score, 2))  # type: ignore[arg-type]
    return lambda: outcome(replace(case, q=case.q.clone(), k=case.k.clone(), v=case.v.clone()))


def of_int8(queries: int, keys: int, dims: tuple[int, int], dtype: torch.dtype) -> Run:
    torch.manual_seed(0)
    q_tokens, k_tokens = Tokens.range(queries, start=keys - queries), Tokens.range(keys)
    case = Problem.random(Causal(), q_tokens, k_tokens, dtype, 2, (4, 2), dims)
    stored = KeyValues(case.k, case.v, k_tokens).quantized()

    def run() -> list[Tensor]:
        copied = replace(
            stored,
            k=stored.k.clone(),
            v=stored.v.clone(),
            k_scale=stored.k_scale.clone(),
            v_scale=stored.v_scale.clone(),
        )
        part = attend_keys(case.q.clone(), q_tokens, [copied], Causal(), backend="native")
        return [part.out, part.lse]

    return run


def of_products(count: int, outputs: int, inputs: int, dtype: torch.dtype) -> Run:
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.randn(n, inputs, generator=generator) for n in (count, outputs))
    bias = torch.randn(outputs, generator=generator)
    kinds: list[object] = [w, w.bfloat16(), compressed.Compressed.pack(w.bfloat16())]
    kinds += [Panels.pack(quantize_weights(w, bits, 32, symmetric=s)) for bits, s in ((8, True), (4, False))]
    if inputs % 256 == 0:
        kinds += [BlockPanels.pack(drawn(outputs, inputs, bits)) for bits in (4, 5, 6)]

    coded = [Nf4.pack(w)] if inputs % 64 == 0 else []

    def run() -> list[Tensor]:
        copies = [t.clone() if isinstance(t, Tensor) else t._replace(data=t.data.clone()) for t in kinds]  # type: ignore[attr-defined]
        copies += [
            replace(t, **{n: getattr(t, n).clone() for n in ("codes", "scales", "largest")}).native()
            for t in coded
        ]
        return list(linear(x.to(dtype), copies, [bias.clone()] * len(copies)))  # type: ignore[arg-type]

    return run


def of_rows(count: int, width: int, dtype: torch.dtype) -> Run:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(count, width, generator=generator).to(dtype) for _ in range(2))
    gain, targets = torch.randn(width, generator=generator).to(dtype), torch.arange(count) % width

    def run() -> list[Tensor]:
        results: list[Tensor] = []
        for kind in ("rms", "layer"):
            leaves = [t.clone().requires_grad_() for t in (x, y, gain, gain)]
            normed = add_norm(kind, *leaves, 1e-5)  # type: ignore[arg-type]
            results += [*normed, *torch.autograd.grad(normed, leaves, [y.clone(), x.clone()])]
            gate_and_up = [t.clone().requires_grad_() for t in (x, y)]
            out = gated(*gate_and_up, "gelu")
            results += [out, *torch.autograd.grad(out, gate_and_up, y.clone())]
        logits = x.clone()
        return [
            *results,
            *(t for t in rows.cross_entropy(logits, gain.clone(), targets.clone(), True) if t is not None),
            logits,
        ]

    return run


def of_step(dtype: torch.dtype) -> Run:
    """Computes the logits of the next token of two rows."""
    decoder = model().to(dtype)
    cache = read(decoder, 2)

    def run() -> list[Tensor]:
        with torch.inference_mode():
            copy = cache.fork()
            return [native(DecodeStep(decoder, copy.pages), copy, torch.tensor([[3], [5]]))]

    return run


LONG = Tokens.range(1500)
SHORT: dict[str, Run] = {
    "keys in parts": of_problem(Full(), "chunk", 4200, (4, 2), (16, 16), SINGLE),
    "global queries": long(Window.around(9) | GlobalQueries(), LONG.with_global([7]), (16, 16), SINGLE),
    "a table": of_problem(Window.last(65), "range", 131, (2, 1), (16, 16), SINGLE, "table"),
    "keys in stretches": of_problem(Causal(), "range", 300, (2, 1), (256, 160), SINGLE),
    "rows": of_rows(3, 33, SINGLE),
    "a step": of_step(SINGLE),
}
"""Calls in which the kernels request every kind of memory that they use."""


def calls(dtype: torch.dtype) -> Iterator[tuple[str, Run]]:
    for pattern, kind, n, heads, dims, score, dropout in (
        (Causal(), "range", 65, (2, 1), (33, 33), "none", 0.0),
        (Full(), "chunk", 63, (7, 1), (7, 9), "none", 0.0),
        (Window.last(33, step=2), "right", 131, (1, 1), (80, 40), "table", 0.3),
        (Window.around(40), "packed", 97, (2, 1), (32, 129), "both", 0.0),
        (Window.last(60) | Causal() & Sink(3), "left", 200, (1, 1), (17, 512), "none", 0.0),
        (Full(), "ring", 200, (6, 2), (64, 64), "none", 0.0),
    ):
        yield f"{pattern} {kind} {n}", of_problem(pattern, kind, n, heads, dims, dtype, score, dropout)
    for queries, keys, dims in ((1, 129, (33, 47)), (5, 65, (7, 15)), (65, 65, (17, 100)), (3, 64, (64, 49))):
        yield f"int8 {queries} {keys} {dims}", of_int8(queries, keys, dims, dtype)
    for count, outputs, inputs in ((1, 1, 1), (3, 17, 33), (5, 3, 704), (9, 50, 256), (70, 33, 256)):
        yield f"products {count} {outputs} {inputs}", of_products(count, outputs, inputs, dtype)
    for count, width in ((1, 1), (3, 33), (17, 131)):
        yield f"rows {count} {width}", of_rows(count, width, dtype)
    yield "a step", of_step(dtype)


def same(name: str, actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b), name


def nothing_lies_outside() -> None:
    """The bits are the same with fences at the end of each tensor and of all memory that the kernels request."""
    for name, run in (*SHORT.items(), *calls(SINGLE), *calls(HALF)):
        expected = run()
        with fences():
            same(name, run(), expected)


def refusing(run: Run, number: int) -> list[Tensor] | None:
    """Refuses the request with this number. Returns None if the call ends with the expected error."""
    FENCE.fence_refuse(number)
    try:
        with fences():
            return run()
    except BackendError as error:
        if "out of memory" not in str(error):
            raise
        return None


def no_memory_is_said() -> None:
    """Whichever request is refused, an error says so, and the next call is right."""
    for name, run in SHORT.items():
        expected, refused = run(), 0
        while (actual := refusing(run, refused)) is None:
            refused += 1
        same(name, actual, expected)
        assert refused == FENCE.fence_requests() > 1, name


def asked_by_backward(pattern: Pattern, n: int, heads: int, dims: tuple[int, int]) -> int:
    """Returns the bytes that a backward pass requests beyond its forward pass."""
    tokens = Tokens.range(n)
    case = Problem.random(pattern, tokens, tokens, rows=1, heads=(heads, heads), dims=dims)
    sizes = []
    with fences():
        for run in (case.run, lambda: outcome(case)):
            FENCE.fence_refuse(-1)
            run()
            sizes.append(FENCE.fence_bytes())
    return sizes[1] - sizes[0]


def long_rows_need_no_more() -> None:
    """Sums of keys are kept where two parts of the queries read them, for windows and first keys: as many in rows twice
    as long. Keys that outgrow a cache are taken in stretches: only the gradients of queries grow."""
    for pattern in (Window.last(70), Window.last(70) | Causal() & Sink(70)):
        once, twice = (asked_by_backward(pattern, n, 8, (1, 1)) for n in (4032, 8064))
        assert once == twice, (pattern, once, twice)
    once, twice = (asked_by_backward(Causal(), n, 1, (256, 160)) for n in (480, 960))
    assert twice - once == 480 * 256 * 4, (once, twice)


if __name__ == "__main__":
    folder = Path(os.environ.get("HEADWAY_NATIVE_DIR") or build.LIBRARIES)
    torch.set_num_threads(1)
    for number, level in enumerate(sys.argv[1:]):
        library = loader.Found(loader.open_library(folder, level))
        loader.search = lambda library=library: library  # type: ignore[assignment]
        nothing_lies_outside()
        if not number:
            no_memory_is_said()
            long_rows_need_no_more()
