"""The rows of `headway bench linear`: causal linear attention at growing lengths, beside softmax attention.

Legend: H heads, N tokens, D per head, C of a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.attention import attend
from headway.attention.linear_attention import LinearAttentionSpec, linear_attend
from headway.attention.linear_attention.attend import choose_form
from headway.patterns import Causal
from headway.positions import Rotary
from headway_lab.bench.cases import FLOAT32, FORWARD, TRAIN
from headway_lab.bench.machine import machine
from headway_lab.bench.memory import exponent, powers
from headway_lab.bench.problems import OURS
from headway_lab.bench.roofline import PRODUCT, Limit
from headway_lab.bench.rows import Row
from headway_lab.bench.timing import Effort, Samples, interleave

HEADS, WIDTH = 8, 64
LENGTHS = powers(2048, 131072)
SOFTMAX = "softmax"
MOST = 16384
"""The longest row at which softmax attention is measured, too: it grows with the square."""

USUAL = Effort(repeats=5, seconds=10.0)

Say = Callable[[str], None]
Sides = dict[str, Callable[[], object]]


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What is measured: both passes of `linear` at each of `lengths`. Inputs are float32: whatever they are,
    linear attention computes in it."""

    linear: LinearAttentionSpec
    lengths: Sequence[int] = LENGTHS
    passes: Sequence[str] = (FORWARD, TRAIN)
    effort: Effort = USUAL


def linear(growth: Growth, say: Say) -> Iterator[Row]:
    """Row by row; after the lengths of a pass, a row with the power of the length that the time grows with."""
    limit = product()
    for direction in growth.passes:
        times: dict[str, dict[int, float]] = {}
        for n in growth.lengths:
            say(f"{growth.linear.feature} n={n} {direction}")
            samples = interleave(sides(growth.linear, n, direction), limit.measure, growth.effort)
            for side in samples.seconds:
                times.setdefault(side, {})[n] = samples.milliseconds(side)
            yield row_of(growth.linear, n, direction, samples, limit.name)
        yield fitted(direction, times)


def sides(linear: LinearAttentionSpec, n: int, direction: str) -> Sides:
    """Ours, and softmax attention with the same rotation where the row is not too long for it."""
    noise = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.empty(1, HEADS, n, WIDTH).normal_(generator=noise) for _ in range(4))
    rotation = Rotary(pairing="halves").table(torch.arange(n), WIDTH)

    def run(call: Callable[[], Tensor]) -> Callable[[], object]:
        def forward() -> object:
            with torch.no_grad():
                return call()

        def both() -> object:
            leaves = [t.requires_grad_() for t in (q, k, v)]
            return torch.autograd.grad(call(), leaves, grad)

        return both if direction == TRAIN else forward

    made: Sides = {OURS: run(lambda: linear_attend(q, k, v, linear, Causal(), rotation=rotation))}
    if n <= MOST:
        made[SOFTMAX] = run(lambda: attend(rotation.apply(q), rotation.apply(k), v, Causal()))
    return made


def product() -> Limit:
    """torch's float32 matrix product: what the form is made of."""
    a = torch.ones(PRODUCT, PRODUCT)

    def measure() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            torch.matmul(a, a)
        return 2.0 * PRODUCT**3 / (time.perf_counter() - begin)

    measure()
    return Limit("torch's matrix product", measure)


def flops(linear: LinearAttentionSpec, n: int, direction: str) -> float:
    """The products that the form makes: those of every block, above the diagonal too, and of the sums. The backward
    makes five of each kind where the forward makes two."""
    forward = choose_form(Causal(), n, n, linear.features(WIDTH), WIDTH).flops
    assert forward is not None
    return HEADS * forward * (3.5 if direction == TRAIN else 1.0)


def row_of(linear: LinearAttentionSpec, n: int, direction: str, samples: Samples, limit: str) -> Row:
    """The row of one length."""
    work, ours = flops(linear, n, direction), samples.milliseconds(OURS)
    peers = [side for side in samples.seconds if side != OURS]
    middle = sorted(samples.limit)[len(samples.limit) // 2]
    where = {**machine(), "backend": "auto", "limit": limit, "limit_rate": middle / 1e9}
    return Row(
        "linear",
        f"linear n={n} {direction}",
        FLOAT32,
        ours_ms=ours,
        rate=work / (ours / 1e3),
        peers={side: samples.milliseconds(side) for side in peers},
        ratios={side: samples.ratio(side, OURS) for side in peers},
        share_of_limit=samples.share(OURS, work),
        machine={**where, "turns": len(samples.limit), "notes": []},
    )


def fitted(direction: str, times: dict[str, dict[int, float]]) -> Row:
    """How the time grows with the length, by side: the p of n^p that fits best."""
    powers = {side: exponent(list(by), list(by.values())) for side, by in times.items() if len(by) > 1}
    said = ", ".join(f"{side} n^{p:.2f}" for side, p in powers.items())
    where = {**machine(), "backend": "auto", "notes": [f"time grows as: {said}"] if said else []}
    return Row(
        "linear", f"linear growth {direction}", FLOAT32, machine=where, extra={"time_exponent": powers}
    )
