"""The rows of `headway bench memory` and `headway bench linear`: how time and memory grow with the length.

Legend: H heads, N tokens, D per head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

from headway.attention import attend
from headway.attention.linear_attention import LinearAttentionSpec, choose_form, linear_attend
from headway.errors import BackendError
from headway.patterns import Causal, Pattern, Window
from headway.positions import Rotary
from headway_lab.bench.cases import FLOAT32, FORWARD, TRAIN, Case, check_names, named
from headway_lab.bench.inputs import OURS, Problem, flops, make, tokens_of
from headway_lab.bench.measure import Effort, timed
from headway_lab.bench.rows import Row, machine
from headway_lab.bench.subprocess_runner import Peak, SubprocessRunner, peak
from headway_lab.profiling import doublings, line, power

NOISE = 16 << 20
"""Bytes below which a peak says nothing about its growth."""
MOST = 16384
"""The longest row at which softmax attention is timed beside linear attention: it grows with the square."""
USUAL = Effort(repeats=5, seconds=10.0)

Say = Callable[[str], None]


# -- memory --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One pattern at growing lengths. `peers`: the longest length at which each is measured."""

    name: str
    pattern: Pattern
    lengths: tuple[int, ...]
    peers: dict[str, int]
    kind: str = "attention"
    quick: int = 0

    def shorter(self, most: int) -> Growth:
        """The same up to `most` tokens; where no length is left, at `most` and, for a growth, at two halvings of it."""
        lengths = tuple(n for n in self.lengths if n <= most)
        if not lengths:
            lengths = (most // 4, most // 2, most) if len(self.lengths) > 1 else (most,)
        return replace(self, lengths=lengths)


GROWTHS = (
    Growth(
        name="window",
        pattern=Window.last(512),
        lengths=doublings(2048, 131072),
        peers={"mask": 8192},
        quick=16384,
    ),
    Growth(
        name="causal",
        pattern=Causal(),
        lengths=doublings(1024, 16384),
        peers={"sdpa": 16384, "stored": 4096},
        quick=4096,
    ),
    Growth(name="mistral", pattern=Window.last(512), lengths=(8192,), peers={"sdpa": 8192}, kind="mistral"),
    Growth(
        name="linear",
        pattern=Causal(),
        lengths=doublings(2048, 131072),
        peers={"attend": 16384},
        kind="linear",
    ),
)
NAMES = tuple(growth.name for growth in GROWTHS)


def chosen(names: Sequence[str] = (), *, quick: bool = False, tokens: int | None = None) -> list[Growth]:
    """The growths to measure. Raises ConfigError for a name that does not exist."""
    check_names(names, NAMES, "memory case")
    growths = [g for g in GROWTHS if (g.name in names if names else g.quick or not quick)]
    if quick:
        growths = [g.shorter(g.quick) if g.quick else g for g in growths]
    return [g.shorter(tokens) if tokens else g for g in growths]


def memory(growths: Sequence[Growth], dtypes: Sequence[str], backend: str, say: Say) -> Iterator[Row]:
    """Row by row: every length, then what was fitted over the lengths."""
    for growth, dtype in product(growths, dtypes or (FLOAT32,)):
        peaks: dict[str, dict[int, Peak]] = {}
        for n in growth.lengths:
            sides = [OURS, *(peer for peer, most in growth.peers.items() if n <= most)]
            say(f"{growth.name} n={n} {dtype}: {', '.join(sides)}")
            notes = []
            for side in sides:
                try:
                    peaks.setdefault(side, {})[n] = peak_of(growth, side, n, dtype, backend)
                except BackendError as why:
                    notes.append(f"{side} not measured: {why}")
            here = {side: by[n] for side, by in peaks.items() if n in by}
            yield memory_row(growth, n, dtype, here, backend, notes)
        if len(growth.lengths) > 1:
            yield fitted_memory(growth, dtype, peaks, backend)


def peak_of(growth: Growth, side: str, tokens: int, dtype: str, backend: str) -> Peak:
    """One step in a process of its own."""
    with SubprocessRunner({}) as runner:
        return runner.call(peak, side, growth.pattern, tokens, dtype, growth.kind, backend)


def memory_row(
    growth: Growth, n: int, dtype: str, peaks: Mapping[str, Peak], backend: str, notes: Sequence[str]
) -> Row:
    """The row of one length."""
    blank = Row("memory", f"{growth.name} n={n} {TRAIN}", dtype, machine=machine(backend, notes))
    peers = dict(peaks)
    ours = peers.pop(OURS, None)
    if ours is None:
        return blank
    case = replace(named("causal"), pattern=growth.pattern, tokens=n)
    work = flops(case, True, tokens_of(case)) if growth.kind == "attention" else None
    return replace(
        blank,
        ours_ms=ours.seconds * 1e3,
        rate=None if work is None else work / ours.seconds,
        peers={side: step.seconds * 1e3 for side, step in peers.items()},
        ratios={side: step.seconds / ours.seconds for side, step in peers.items()},
        extra={
            "ours_mib": ours.beyond / 2**20,
            "peers_mib": {side: step.beyond / 2**20 for side, step in peers.items()},
            "given_mib": (ours.inputs + ours.outputs) / 2**20,
        },
    )


def fitted_memory(growth: Growth, dtype: str, peaks: Mapping[str, Mapping[int, Peak]], backend: str) -> Row:
    """How time and memory grow with the length, per side: exponents (None: memory is flat), and bytes per token."""
    times, sizes, slopes = {}, {}, {}
    for side, by in peaks.items():
        if len(by) > 1:
            lengths, beyond = list(by), [step.beyond for step in by.values()]
            flat = max(beyond) < NOISE or min(beyond) <= 0
            times[side] = power(lengths, [step.seconds for step in by.values()])
            sizes[side] = None if flat else power(lengths, beyond)
            slopes[side] = line(lengths, beyond)
    extra = {"time_exponent": times, "memory_exponent": sizes, "bytes_per_token": slopes}
    return Row("memory", f"{growth.name} growth", dtype, machine=machine(backend), extra=extra)


# -- linear attention ----------------------------------------------------------------------------------------------


def linear(
    spec: LinearAttentionSpec,
    lengths: Sequence[int],
    passes: Sequence[str] = (FORWARD, TRAIN),
    effort: Effort = USUAL,
    *,
    say: Say,
) -> Iterator[Row]:
    """Causal linear attention at each length, row by row; after the lengths of a pass, a row with the power of the
    length that the time grows with. Inputs are float32: linear attention computes in it, whatever they are."""
    for direction in passes:
        times: dict[str, dict[int, float]] = {}
        for n in lengths:
            say(f"{spec.feature} n={n} {direction}")
            blank = Row("linear", f"linear n={n} {direction}", FLOAT32, machine=machine("auto"))
            row = timed(blank, linear_problem(spec, n, direction), effort)
            assert row.ours_ms is not None
            for side, ms in {OURS: row.ours_ms, **row.peers}.items():
                times.setdefault(side, {})[n] = ms
            yield row
        yield fitted_times(direction, times)


def linear_problem(spec: LinearAttentionSpec, n: int, direction: str) -> Problem:
    """Linear attention, and softmax attention with the same rotation where the row is not too long for it.

    Its limit is torch's matrix product, which is what the form is made of."""
    at = make(Case(name="linear", tokens=n), FLOAT32, direction)
    rotation = Rotary(pairing="halves").rotation(torch.arange(n), at.case.width)
    calls = {OURS: lambda: linear_attend(at.q, at.k, at.v, spec, Causal(), rotation=rotation)}
    if n <= MOST:
        calls["softmax"] = lambda: attend(rotation.apply(at.q), rotation.apply(at.k), at.v, Causal())
    sides = {name: at.run(call) for name, call in calls.items()}
    return Problem(sides, linear_flops(spec, at.case, direction), "matmul")


def linear_flops(spec: LinearAttentionSpec, case: Case, direction: str) -> float:
    """The products that the form makes: those of every block, above the diagonal too, and of the sums. The backward
    makes five of each kind where the forward makes two."""
    n, width = case.tokens, case.width
    forward = choose_form(Causal(), n, n, spec.features(width), width).flops
    assert forward is not None
    return case.heads * forward * (3.5 if direction == TRAIN else 1.0)


def fitted_times(direction: str, times: Mapping[str, Mapping[int, float]]) -> Row:
    """How the time grows with the length, by side: the p of n^p that fits best."""
    fitted = {side: power(list(by), list(by.values())) for side, by in times.items() if len(by) > 1}
    listed = ", ".join(f"{side} n^{p:.2f}" for side, p in fitted.items())
    where, extra = machine("auto", [f"time grows as: {listed}"] if listed else []), {"time_exponent": fitted}
    return Row("linear", f"linear growth {direction}", FLOAT32, machine=where, extra=extra)
