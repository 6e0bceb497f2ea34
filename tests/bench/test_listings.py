"""The tables of the bench, what its options request, and what it reports of rows, as listed in tests/bench/listings."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from headway.cli import run
from headway.models import cost
from headway.patterns import Window
from headway_lab.bench import (
    attention,
    decoders,
    forms,
    growth,
    measure,
    models,
    train,
)
from headway_lab.bench.cases import CASES, FORWARD, TRAIN, Case
from headway_lab.bench.growth import Curve
from headway_lab.bench.inputs import make, tokens_of
from headway_lab.bench.measure import Effort
from headway_lab.bench.rows import Row
from tests.bench import listed
from tests.bench.test_peers import toy
from tests.listings import constants, facts, number

ONCE = Effort(repeats=1, least=1, sample=0.0)
MIB = 1 << 20


def test_the_cases_are_as_listed() -> None:
    lines = []
    for case in CASES.values():
        lines += [facts(case), f"  at 64: {facts(case.at(64))}"]
        if case.kind == "attention":
            tokens, work = tokens_of(case), make(case, "float32", TRAIN).flops
            sizes = [int(tokens.valid.sum()), int(tokens.globals.sum()), tokens.documents.unique().numel()]
            lines.append(f"  tokens {sizes}, {case.label(TRAIN)}: {number(work)} FLOPs")
    for quick in (case.sized(quick=True) for case in CASES.values() if case.quick):
        lines.append(f"quick {quick.label(FORWARD)}: {', '.join(quick.peers)}")
    for name, spec in models.DECODERS.items():
        lines.append(f"{name}: {facts(spec)}; {cost.parameter_count(spec)} parameters")
    for job in train.CASES.values():
        lines.append(
            f"{job.name} {job.rows} x {job.tokens} {job.trains}: {job.targets} targets, {job.unread} not"
        )
        lines.append(f"  {number(job.flops)} FLOPs")
    listed.check("cases", lines)


@pytest.mark.usefixtures("steady")
def test_the_sides_of_a_case_are_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "COLD_BYTES", 1 << 20)
    lines = []
    for case in map(toy, CASES.values()):
        small = case.with_peers([peer for peer in case.peers if peer != "flex"])
        for direction in small.passes:
            problem = attention.build(small, small.dtypes[0], direction)
            lines.append(f"{small.label(direction)} {small.dtypes[0]}: {', '.join(problem.sides)}")
            lines.append(
                f"  {number(float(problem.work))} of {problem.bound}, scale {listed.shown(problem.scale)}"
            )
            lines.append(f"  {problem.tolerance} {problem.notes}")
    other = CASES["window"].at(96)
    problem = attention.build(replace(other, peers=("sdpa", "flex")), "float32", TRAIN)
    lines += problem.notes
    listed.check("sides", lines)


@pytest.mark.usefixtures("steady")
def test_rows_that_are_measured_are_as_listed() -> None:
    """At toy size, with a clock that is the same everywhere."""
    rows: list[Row] = []
    effort = Effort(repeats=2, least=1, sample=2e-3)
    for case in (toy(CASES[name]) for name in ("causal", "packed", "decode-4-int8")):
        for direction in case.passes:
            rows.append(attention.measure(case, case.dtypes[0], direction, "banded", effort))
    listed.check("measured", [*listed.rows_of(rows), constants(measure), constants(growth)])


def made(number: int, **fields: Any) -> Row:
    where = {"cpu": "toy", "threads": 1, "notes": [], "limit": "register peak", "backend": "auto"}
    usual = {"ours_ms": 1.5 * number, "rate": 3e9 / number, "share_of_limit": 0.4 / number, "machine": where}
    return Row(
        **{"bench": "attention", "case": f"case {number} forward", "dtype": "float32", **usual, **fields}
    )


def some() -> dict[str, list[Row]]:
    """Returns invented rows of every bench."""
    peers = {"peers": {"sdpa": 2.0, "mask": 9.0}, "ratios": {"sdpa": 4 / 3, "mask": 6.0}}
    where = made(1).machine
    held = {"ours_mib": 3.0, "peers_mib": {"mask": 0.05}}
    windows = {n: forms.Step(n * 4096, n * 1e-6) for n in (512, 1024, 2048)}
    curves = [
        Curve("full", {n: forms.Step(n * n * 16, n * n * 1e-8) for n in (512, 1024)}, 2048, "memory"),
        *(Curve(name, {n: forms.Step(s.held * held, s.seconds * slow) for n, s in windows.items()})
          for name, held, slow in (("loop", 1, 9), ("chunks", 2, 3), ("native", 1, 1))),
        Curve("flex", {512: forms.Step(1, 1.0)}, 1024, "memory"),
        Curve("banded", {}, 512, "no library"),
    ]  # fmt: skip
    request = growth.Request(
        window=Window.last(64), most=4096, direction=FORWARD, forms=[], limit=64 << 20, seconds=1.0
    )
    verdicts = growth.verdicts(curves, request.limit)
    return {
        "attention": [
            made(1, **peers),
            made(2, dtype="bfloat16", ratios={"headway causal": 0.5}, peers={"headway causal": 1.5}),
            made(1, **peers, rate=5e9, machine={**where, "threads": 2, "notes": ["mask: no", "one"]}),
            made(3, ours_ms=None, rate=None, share_of_limit=None, machine={**where, "notes": ["one"]}),
            made(4, bound="reads", extra={"tokens_per_second": 12.0, **held}),
        ],
        "growth": [
            *(growth.to_row(curve, request) for curve in curves),
            Row("growth", "verdicts", "float32", machine=where, extra={"verdicts": verdicts}),
        ],
    }  # fmt: skip


@pytest.mark.parametrize("bench", ["attention", "growth"])
def test_a_table_and_its_charts_are_as_listed(bench: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = some()[bench]
    listed.check(f"table-{bench}", [*listed.rows_of(rows), *listed.drawn(rows, monkeypatch)])


COMMANDS = (
    "attention",
    "attention --quick",
    "attention --case causal --case window --dtype bfloat16 --pass forward --tokens 64 --repeats 2",
    "attention --repeats 99 --threads 1",
    "attention --scaling --backend banded",
    "growth",
    "growth --quick --pass forward+backward",
    "growth --tokens 128 --window 16 --memory-limit 64 --seconds 0.5 --form linear --form loop",
    "decode",
    "decode --quick",
    "decode --model tiny --weights int8 --rows 3 --context 9",
    "prefill",
    "prefill --quick",
    "prefill --model tiny --weights compressed --tokens 7",
    "train",
    "train --quick",
    "train --case tiny-2x64 --dtype float32 --no-compiled --no-memory",
)


def test_what_the_options_ask_for_is_as_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    def told(name: str, *values: Any, **options: Any) -> Iterator[Any]:
        for value in values:
            if isinstance(value, list) and all(isinstance(case, Case) for case in value):
                lines.append(f"  {', '.join(f'{case.name} {case.tokens}' for case in value)}")
            elif not callable(value):
                lines.append(f"  {value}")
        lines.extend(f"  {name} {value}" for name, value in options.items() if name != "say")
        return iter([made(1, machine={})])

    for module, name in (
        (attention, "attention"), (growth, "growth"), (decoders, "decode"), (decoders, "prefill"), (train, "train"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, partial(told, name))
    monkeypatch.setattr("headway.hardware.memory_available", lambda: 1 << 40)
    monkeypatch.setattr("headway_lab.bench.attention.cores", lambda: 6)
    for words in COMMANDS:
        lines.append(words)
        assert run(["bench", *words.split(), "--json"]) == 0
    capsys.readouterr()
    listed.check("options", lines)
