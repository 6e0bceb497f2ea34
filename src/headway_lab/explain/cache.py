"""What a key-value cache saves, and that it changes nothing. (Shazeer 2019, "Fast Transformer Decoding".)"""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from headway.cache import DecoderCache
from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Window
from headway_lab.explain import TOPICS, Report

LENGTHS = (64, 128, 256, 512)
WINDOW, REPEATS, SEED = 64, 9, 0
EQUAL = 1e-5
SPEC = ModelSpec.of("llama", vocab=256, width=64, layers=2, heads=4, kv_heads=2, hidden=192)

FORMULA = """attention's operations in step T, with L layers of H heads of D, and the seconds of the whole step:
with a cache, q is of the last token only, k and v are kept: 4 D H L T
without, all T tokens are computed again: 4 D H L T^2
the logits are equal: keys and values of earlier tokens do not depend on later ones (the mask is causal)
with a window of w a ring of w slots is enough: 4 D H L min(T, w)"""


@dataclass(frozen=True)
class Step:
    """Step T, counted and timed: operations of the whole model, seconds."""

    length: int
    cached_flops: float
    full_flops: float
    ring_flops: float
    cached_seconds: float
    full_seconds: float
    ring_slots: int


def run() -> Report:
    """Decode one row token by token, with a growing cache and with a ring, and again by full forwards.

    On one thread: what is timed is too small to share, and others may be at work."""
    threads = torch.get_num_threads()
    full, window = model(SPEC), model(SPEC.with_patterns(Window.last(WINDOW)))
    ids = torch.randint(SPEC.vocab, (1, LENGTHS[-1]), generator=torch.Generator().manual_seed(SEED))
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            steps, off = measure(full, window, ids)
    finally:
        torch.set_num_threads(threads)
    return judge(steps, off)


def model(spec: ModelSpec) -> Decoder:
    """A small decoder with weights large enough that attention decides; scores are computed whole ("dense"),
    so that what is counted is what the formula says."""
    decoder = build(spec, seed=SEED, backend="dense").eval()
    assert isinstance(decoder, Decoder)
    source = torch.Generator().manual_seed(SEED)
    for parameter in decoder.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=spec.width**-0.5, generator=source)
    return decoder


def measure(full: Decoder, window: Decoder, ids: Tensor) -> tuple[list[Step], float]:
    """The steps of `LENGTHS`, and the largest difference of any logit from the full forward's, relative."""
    growing, ring = full.make_cache(1), window.make_cache(1)
    steps, seen, seen_ring = [], [], []
    for at in range(ids.shape[1]):
        new, length = ids[:, at : at + 1], at + 1
        if length not in LENGTHS:
            seen.append(full(new, cache=growing))
            seen_ring.append(window(new, cache=ring))
            continue
        cached_flops, logits = counted(full, new, growing)
        ring_flops, ring_logits = counted(window, new, ring)
        seen.append(logits)
        seen_ring.append(ring_logits)
        row, last = ids[:, :length], slice(at, length)
        with FlopCounterMode(display=False) as counter:
            full(row, logits_for=last)
        steps.append(
            Step(
                length,
                cached_flops,
                float(counter.get_total_flops()),
                ring_flops,
                min(again(full, new, growing) for _ in range(REPEATS)),
                min(clocked(full, row, logits_for=last) for _ in range(REPEATS)),
                ring[0].slots,
            )
        )
    off = [
        float((torch.cat(got, 1) - want).abs().max() / want.abs().max())
        for got, want in ((seen, full(ids)), (seen_ring, window(ids)))
    ]
    return steps, max(off)


def counted(decoder: Decoder, new: Tensor, cache: DecoderCache) -> tuple[float, Tensor]:
    """Operations of one step, and its logits."""
    with FlopCounterMode(display=False) as counter:
        logits: Tensor = decoder(new, cache=cache)
    return float(counter.get_total_flops()), logits


def again(decoder: Decoder, new: Tensor, cache: DecoderCache) -> float:
    """Seconds of the step that was just done, done again."""
    cache.trim(1)
    return clocked(decoder, new, cache=cache)


def clocked(decoder: Decoder, ids: Tensor, **rest: Any) -> float:
    begin = time.perf_counter()
    decoder(ids, **rest)
    return time.perf_counter() - begin


def attention_flops(flops: float, tokens: int) -> float:
    """What is left of a step's operations beside the products with weights: those of `tokens` tokens, and the
    output layer for one."""
    return flops - 2.0 * (tokens * cost.matrix_weights(SPEC) + SPEC.width * SPEC.vocab)


def judge(steps: list[Step], off: float) -> Report:
    """The verdict: equal logits; attention grows with exponent 1 with the cache, 2 without, 0 with the ring."""
    rows = tuple(
        (
            s.length,
            attention_flops(s.cached_flops, 1),
            attention_flops(s.full_flops, s.length),
            attention_flops(s.ring_flops, 1),
            s.full_flops / s.cached_flops,
            1e3 * s.cached_seconds,
            1e3 * s.full_seconds,
            s.ring_slots,
        )
        for s in steps
    )
    with_cache, without, with_ring = (exponent(rows, column) for column in (1, 2, 3))
    last = steps[-1]
    right = abs(with_cache - 1) < 1e-6 and abs(without - 2) < 1e-6 and abs(with_ring) < 1e-6
    return Report(
        topic="cache",
        question=TOPICS["cache"][1],
        formula=FORMULA,
        columns=(
            "T",
            "cache (FLOPs)",
            "no cache (FLOPs)",
            "ring (FLOPs)",
            "model, no cache / cache",
            "cache (ms)",
            "no cache (ms)",
            "ring slots",
        ),
        rows=rows,
        seen=off <= EQUAL and right and all(s.ring_slots <= WINDOW for s in steps),
        setting=(
            f"one row of {last.length} tokens, {SPEC.layers} layers of width {SPEC.width}, {SPEC.heads} query and "
            f"{SPEC.kv_heads} kv heads, random weights, window {WINDOW}, float32, one thread, seed {SEED}"
        ),
        finding=(
            f"the logits of all {last.length} steps equal the full forward's within {off:.1e} (growing cache and "
            f"ring); the attention of step T grows as T^{with_cache:.2f} with a cache, T^{without:.2f} without and "
            f"T^{with_ring:.2f} with a ring; step {last.length} takes {1e3 * last.cached_seconds:.1f} ms instead "
            f"of {1e3 * last.full_seconds:.1f} ms"
        ),
    )


def exponent(rows: tuple[tuple[float, ...], ...], column: int) -> float:
    """The slope of log(column) against log(T), by least squares."""
    x = [math.log(row[0]) for row in rows]
    y = [math.log(row[column]) for row in rows]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    above = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return above / sum((a - mean_x) ** 2 for a in x)


def draw(figure: Any, report: Report) -> None:
    """Left: operations of a step's attention against T. Right: the measured time of a step."""
    figure.set_size_inches(9, 3.8)
    left, right = figure.subplots(1, 2)
    length = report.column("T")
    names = {"no cache": "#c8453c", "cache": "#2f6fb3", "ring": "#3c9b6b"}
    for name, colour in names.items():
        left.loglog(length, report.column(f"{name} (FLOPs)"), "o-", color=colour, label=name)
    left.set(title="attention in step T", xlabel="T", ylabel="operations")
    for name in ("no cache", "cache"):
        right.loglog(length, report.column(f"{name} (ms)"), "o-", color=names[name], label=name)
    right.set(title="time of step T", xlabel="T", ylabel="ms")
    for axes in (left, right):
        axes.set_xticks(length, [str(n) for n in length])
        axes.minorticks_off()
        axes.legend()
