"""`headway bench growth`: forms up to a memory limit, their exponents, and the verdicts on them."""

import json
from pathlib import Path

import pytest

from headway.cli import run
from headway.errors import ConfigError
from headway.patterns import Window
from headway_lab.bench.cases import CAUSAL, FLOAT32, FORWARD, TRAIN, Case
from headway_lab.bench.forms import FORMS, Step
from headway_lab.bench.growth import Curve, Request, curve, to_row, verdicts
from headway_lab.bench.inputs import make
from headway_lab.bench.measure import difference
from headway_lab.profiling import doublings, exponent, power

MIB = 1 << 20
LENGTHS = doublings(512, 8192)
REQUEST = Request(
    window=Window.last(64), most=8192, direction=FORWARD, forms=(), limit=64 * MIB, seconds=10.0
)


def test_an_exponent_has_the_standard_error_of_its_residuals() -> None:
    exact = exponent(LENGTHS, [3.0 * n**1.5 for n in LENGTHS])
    assert exact == pytest.approx((1.5, 0.0), abs=1e-6)
    assert str(exponent((1, 2), (1, 4))) == "n^2.00"
    # log2 y = 0, 1, 2 + e, slope 1 + e/2: residuals (1, -2, 1) e / 6, so the error is |e| / sqrt(12)
    bent = exponent((1, 2, 4), (1, 2, 4 * 2**0.12))
    assert bent == pytest.approx((1.06, 0.12 / 12**0.5))
    assert str(bent) == "n^1.06 ± 0.03"


def test_the_exponent_of_a_power_law_is_found() -> None:
    x = doublings(1024, 16384)
    assert x == (1024, 2048, 4096, 8192, 16384)
    for p in (0.0, 1.0, 1.5, 2.0):
        assert power(x, [7.0 * n**p for n in x]) == pytest.approx(p)


def curves(**changed: Curve) -> dict[str, Curve]:
    """Returns curves as the figure claims them: full attention up to a limit, windows linear, the loop slow, chunks
    twice as large as the loop."""
    rates = {"loop": (8, 90), "chunks": (16, 30), "banded": (3, 20), "native": (2, 10), "flex": (2, 40)}
    by_name = {
        name: Curve(name, {n: Step(held * 1024 * n, ns * 1e-6 * n) for n in LENGTHS})
        for name, (held, ns) in rates.items()
    }
    by_name["full"] = Curve("full", {n: Step(16 * n * n, 1e-8 * n * n) for n in LENGTHS[:3]}, 4096, "memory")
    return by_name | changed


def seen(**changed: Curve) -> list[bool]:
    return [line.endswith(": seen") for line in verdicts(list(curves(**changed).values()), 64 * MIB)]


def test_row_102_verdicts_are_seen_where_the_numbers_are_so() -> None:
    lines = verdicts(list(curves().values()), 64 * MIB)
    assert seen() == [True] * 4
    assert lines[0] == (
        "full attention grows with exponent n^2.00 ± 0.00 in memory (n^2.00 ± 0.00 in time) "
        "until the limit of 64 MiB at n=4,096: seen"
    )
    assert "(ms: native 81.9, banded 164, chunks 246, flex 328, loop 737): seen" in lines[2]
    assert "(2.00 times): seen" in lines[3]


@pytest.mark.parametrize(
    ("name", "other", "expected"),
    [
        ("full", Curve("full", {n: Step(16 * n * n, n * n) for n in LENGTHS}), [False, True, True, True]),
        ("full", Curve("full", {n: Step(n, n) for n in LENGTHS}, 9, "memory"), [False, True, True, True]),
        ("banded", Curve("banded", {n: Step(n, 1e-9 * n**1.5) for n in LENGTHS}), [True, False, True, True]),
        ("banded", Curve("banded", {n: Step(int(n**0.6), 1e-9 * n**0.6) for n in LENGTHS}), [True] * 4),
        ("loop", Curve("loop", {n: Step(8192 * n, 2e-5 * n) for n in LENGTHS}), [True, True, False, True]),
        ("native", Curve("native", {n: Step(n, 3e-5 * n) for n in LENGTHS}), [True, True, False, True]),
        (
            "chunks",
            Curve("chunks", {n: Step(8192 * n, 3e-5 * n) for n in LENGTHS}),
            [True, True, True, False],
        ),
    ],
    ids=[
        "not stopped",
        "linear",
        "not linear",
        "slower than linear",
        "loop is fast",
        "kernel is slow",
        "chunks are small",
    ],
)
def test_a_verdict_follows_from_its_own_numbers(name: str, other: Curve, expected: list[bool]) -> None:
    assert seen(**{name: other}) == expected


def test_every_form_is_the_same_attention() -> None:
    """All forms of the window give one result, all forms over all keys another."""
    results = {}
    for name, form in FORMS.items():
        if name == "flex":
            continue  # its compilation takes seconds; tests/bench/test_peers.py has it
        pattern = CAUSAL if form.full else Window.last(9)
        case = Case(name=name, pattern=pattern, tokens=70, heads=2, kv_heads=2)
        at = make(case, FLOAT32, TRAIN)
        results[name] = at.run(form.build(at))()
    for name in results:
        if name == "linear":
            continue
        base = results["full" if FORMS[name].full else "banded"]
        assert max(difference(a, b) for a, b in zip(results[name], base, strict=True)) < 1e-5, name
    assert difference(results["full"][0], results["banded"][0]) > 0.1


def test_a_form_is_stopped_at_the_limit_of_memory_in_a_process_of_its_own() -> None:
    """4 heads x 4096 x 4096 scores are 256 MiB each, and two are held; at 2048 they are 64 MiB, at 1024 16 MiB."""
    full = curve("full", Request(**vars(REQUEST) | {"limit": 300 * MIB, "most": 4096}))
    assert (full.stopped_by, full.stopped_at) == ("memory", 4096)
    assert 2 * 16 * MIB < full.steps[1024].held < 5 * 16 * MIB
    row = to_row(full, REQUEST)
    assert (row.extra["n"], row.extra["quadratic"]) == ([512, 1024, 2048], True)


def test_a_step_that_would_take_too_long_is_not_begun() -> None:
    loop = curve("loop", Request(**vars(REQUEST) | {"seconds": 1e-9}))
    assert (list(loop.steps), loop.stopped_by, loop.stopped_at) == ([512], "time", 1024)
    assert (
        curve("flex", Request(**vars(REQUEST) | {"direction": TRAIN})).stopped_by
        == "it has no backward on a CPU"
    )


def test_a_limit_that_the_machine_does_not_have_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"--memory-limit 9\d+ MiB, but \d+ MiB are free.*give --memory-limit \d+"
    ):
        Request(**vars(REQUEST) | {"limit": 10**15})


@pytest.mark.slow
def test_the_command_and_its_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quick = ["--quick", "--tokens", "512", "--window", "16", "--memory-limit", "256"]
    assert run(["bench", "growth", *quick, "--json", "--out", str(tmp_path)]) == 0
    *rows, report = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["case"] for row in rows] == [name for name in FORMS if name != "flex"]
    for row in rows:
        assert row["n"] == [64, 128, 256, 512]
        assert all(len(row[column]) == 4 and min(row[column]) > 0 for column in ("ms", "mib")), row["case"]
    assert len(report["verdicts"]) == 4
    assert (tmp_path / "growth.png").stat().st_size > 10_000
