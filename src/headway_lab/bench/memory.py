"""The rows of `headway bench memory`: what forward and backward hold beyond inputs and outputs, and how it grows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from headway.errors import BackendError, ConfigError, did_you_mean
from headway.patterns import Causal, Pattern, Window
from headway_lab.bench.cases import TRAIN, named
from headway_lab.bench.inputs import flops, tokens_of
from headway_lab.bench.machine import machine
from headway_lab.bench.peak_memory import Ask, Held
from headway_lab.bench.rows import Row
from headway_lab.bench.subprocess_runner import Child

OURS = "headway"
NOISE = 16 << 20
"""Bytes below which what is held says nothing about its growth."""


@dataclass(frozen=True, kw_only=True)
class Growth:
    """One pattern at growing lengths. `peers` says up to which length each is measured."""

    name: str
    says: str
    pattern: Pattern
    lengths: tuple[int, ...]
    peers: dict[str, int]
    kind: str = "attention"
    quick: int = 0

    def shorter(self, most: int) -> Growth:
        """The same up to `most` tokens; where that leaves none, at `most` and, for a growth, at two halvings of it."""
        lengths = tuple(n for n in self.lengths if n <= most)
        if not lengths:
            lengths = (most // 4, most // 2, most) if len(self.lengths) > 1 else (most,)
        return replace(self, lengths=lengths)


def powers(first: int, last: int) -> tuple[int, ...]:
    """first, 2 first, 4 first, ... up to last."""
    return tuple(first * 2**i for i in range(int(math.log2(last // first)) + 1))


GROWTHS = (
    Growth(
        name="window",
        says="window 512: linear in time and memory",
        pattern=Window.last(512),
        lengths=powers(2048, 131072),
        peers={"mask": 8192},
        quick=16384,
    ),
    Growth(
        name="causal",
        says="full attention: time grows with the square; where scores are stored, memory too",
        pattern=Causal(),
        lengths=powers(1024, 16384),
        peers={"sdpa": 16384, "stored": 4096},
        quick=4096,
    ),
    Growth(
        name="mistral",
        says="a training step of transformers' Mistral, window 512, with our attention and with torch's",
        pattern=Window.last(512),
        lengths=(8192,),
        peers={"sdpa": 8192},
        kind="mistral",
    ),
    Growth(
        name="linear",
        says="causal linear attention, rotary in the numerator: linear in time and memory",
        pattern=Causal(),
        lengths=powers(2048, 131072),
        peers={"attend": 16384},
        kind="linear",
    ),
)
NAMES = tuple(growth.name for growth in GROWTHS)


def chosen(names: Sequence[str] = (), *, quick: bool = False, tokens: int | None = None) -> list[Growth]:
    """The growths to measure. Raises ConfigError for a name that is none."""
    for name in names:
        if name not in NAMES:
            hint = did_you_mean(name, NAMES)
            raise ConfigError(f"bench: no memory case {name!r}{hint}; cases are {', '.join(NAMES)}")
    growths = [g for g in GROWTHS if (g.name in names if names else g.quick or not quick)]
    if quick:
        growths = [g.shorter(g.quick) if g.quick else g for g in growths]
    return [g.shorter(tokens) if tokens else g for g in growths]


def memory(
    growths: Sequence[Growth], dtypes: Sequence[str], backend: str, say: Callable[[str], None]
) -> Iterator[Row]:
    """Row by row: every length, then what was fitted over the lengths."""
    for growth in growths:
        for dtype in dtypes or ("float32",):
            held: dict[str, dict[int, Held]] = {}
            for n in growth.lengths:
                sides = [OURS, *(peer for peer, most in growth.peers.items() if n <= most)]
                say(f"{growth.name} n={n} {dtype}: {', '.join(sides)}")
                notes = []
                for side in sides:
                    try:
                        held.setdefault(side, {})[n] = apart(growth, side, n, dtype, backend)
                    except BackendError as why:
                        notes.append(f"{side} not measured: {why}")
                row = row_of(
                    growth, n, dtype, {s: by[n] for s, by in held.items() if n in by}, backend, notes
                )
                yield row
            if len(growth.lengths) > 1:
                yield fitted(growth, dtype, held, backend)


def apart(growth: Growth, side: str, tokens: int, dtype: str, backend: str) -> Held:
    """One step in a process of its own."""
    ask = Ask(side, str(growth.pattern), tokens, dtype, growth.kind, backend)
    with Child({}) as child:
        value = child.ask(what="held", ask=asdict(ask), threads=torch.get_num_threads())
    return Held(**value)


def row_of(growth: Growth, n: int, dtype: str, held: dict[str, Held], backend: str, notes: list[str]) -> Row:
    """The row of one length."""
    where = {**machine(), "backend": backend, "notes": notes}
    blank = Row("memory", f"{growth.name} n={n} {TRAIN}", dtype, machine=where)
    ours = held.get(OURS)
    if ours is None:
        return blank
    peers = {side: step for side, step in held.items() if side != OURS}
    work = None
    if growth.kind == "attention":
        case = replace(named("causal"), pattern=growth.pattern, tokens=n)
        work = flops(case, True, tokens_of(case))
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


def fitted(growth: Growth, dtype: str, held: dict[str, dict[int, Held]], backend: str) -> Row:
    """How time and memory grow with the length, per side: exponents, and bytes per token."""
    extra: dict[str, dict[str, float | None]] = {
        "time_exponent": {},
        "memory_exponent": {},
        "bytes_per_token": {},
    }
    for side, by in held.items():
        lengths = sorted(by)
        if len(lengths) < 2:
            continue
        beyond = [float(by[n].beyond) for n in lengths]
        extra["time_exponent"][side] = exponent(lengths, [by[n].seconds for n in lengths])
        flat = max(beyond) < NOISE or min(beyond) <= 0
        extra["memory_exponent"][side] = None if flat else exponent(lengths, beyond)
        extra["bytes_per_token"][side] = line(lengths, beyond)
    where = {**machine(), "backend": backend, "notes": []}
    return Row("memory", f"{growth.name} growth", dtype, machine=where, extra=dict(extra))


def line(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line through the points."""
    middle, level = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - middle) ** 2 for a in x)
    return sum((a - middle) * (b - level) for a, b in zip(x, y, strict=True)) / spread


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """p of the power law y = c x^p that fits best: the slope of log y over log x."""
    return line([math.log(a) for a in x], [math.log(b) for b in y])
