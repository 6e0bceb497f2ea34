"""`headway bench`: rows on stdout, progress on stderr, and what is printed when it is stopped."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway_lab.bench.rows import Row

KEYS = {
    "bench",
    "case",
    "dtype",
    "peers",
    "ours_ms",
    "ratio_best_peer",
    "share_of_limit",
    "machine",
}


def row(number: int, *notes: str) -> Row:
    machine = {"notes": list(notes), "threads": 1, "cpu": "toy", "limit": "register peak"}
    measured = {
        "ours_ms": 1.0,
        "rate": 1e9,
        "peers": {"sdpa": 2.0},
        "ratios": {"sdpa": 2.0},
        "share_of_limit": 0.5,
    }
    return Row("attention", f"case {number}", "float32", machine=machine, **measured)  # type: ignore[arg-type]


def test_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    cases = ["--case", "causal", "--case", "decode-4", "--case", "packed"]
    toy = ["--tokens", "32", "--repeats", "1", "--threads", "1"]
    assert run(["bench", "attention", "--json", *cases, *toy]) == 0
    out, err = capsys.readouterr()
    rows = [json.loads(line) for line in out.splitlines()]
    assert len(rows) == 4 + 2 + 4
    for record in rows:
        unit = "ours_gbs" if record["case"].startswith("decode") else "ours_gflops"
        assert set(record) == {*KEYS, unit}
        assert record["machine"]["threads"] == 1
    assert rows[0]["case"] == "causal n=32 forward"
    assert "causal n=32 forward float32, 1 thread" in err


def test_the_table_and_the_chart(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    toy = ["--tokens", "32", "--repeats", "1", "--backend", "banded", "--pass", "forward"]
    assert run(["bench", "attention", "--case", "causal", "--out", "charts", *toy]) == 0
    out = capsys.readouterr().out
    assert "best peer" in out
    assert "backend banded" in out
    assert (tmp_path / "charts" / "attention.png").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["attention", "--case", "casual"], "no case 'casual' (did you mean \"causal\"?); known: causal,"),
        (
            ["attention", "--dtype", "float16"],
            "no dtype 'float16' (did you mean \"bfloat16\"?); known: float32, bfloat16",
        ),
        (["attention", "--backend", "nativ"], "unknown backend 'nativ'"),
        (["attention", "--scaling", "--threads", "1"], "leave out --threads"),
        (
            ["serve", "--model", "minilm", "--weights", "int8"],
            "leave them out, or add --model with a decoder",
        ),
        (["growth", "--form", "lop"], "no form 'lop' (did you mean \"loop\"?); known: full,"),
    ],
)
def test_wrong_values_are_told_what_there_is(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", *arguments]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_a_pass_that_is_neither_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "attention", "--pass", "backward"]) == 2
    assert "'backward' is not one of 'forward', 'forward+backward'" in capsys.readouterr().err


def test_an_unknown_bench_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "atention"]) == 2
    assert "attention" in capsys.readouterr().err


@pytest.mark.parametrize("json_too", [False, True])
def test_stopped_it_prints_what_it_has(
    json_too: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: Any, **__: Any) -> Iterator[Row]:
        yield row(1)
        yield row(2)
        raise KeyboardInterrupt

    monkeypatch.setattr("headway_lab.bench.attention.attention", stopped)
    assert run(["bench", "attention", *(["--json"] if json_too else [])]) == 130
    out, err = capsys.readouterr()
    assert "case 1" in out
    assert "case 2" in out
    assert "interrupted" in err


def test_rows_are_told_as_they_come(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are reported one by one, also if SIGTERM ends the bench."""
    captured = []

    def terminated(*_: Any, **__: Any) -> Iterator[Row]:
        for number in (1, 2):
            yield row(number)
            captured.append(capsys.readouterr())
        os.kill(os.getpid(), signal.SIGTERM)
        yield row(3)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("headway_lab.bench.attention.attention", terminated)
    assert run(["bench", "attention"]) == 130
    line = "  case {} float32: 1 ms, the best peer takes 2.00x\n"
    assert [err for _, err in captured] == [line.format(1), line.format(2)]
    out = capsys.readouterr().out
    assert ("case 2" in out, "case 3" in out) == (True, False)
    assert signal.getsignal(signal.SIGTERM) is before
    captured.clear()
    assert run(["bench", "attention", "--json"]) == 130
    assert [json.loads(out)["case"] for out, _ in captured] == ["case 1", "case 2"]


def test_another_result_is_an_error_after_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row(1), row(2, "sdpa is left out: its output differs from ours by 1e-1")]
    monkeypatch.setattr("headway_lab.bench.attention.attention", lambda *_, **__: iter(rows))
    assert run(["bench", "attention"]) == 1
    out, err = capsys.readouterr()
    assert "case 2 *" in out
    assert "headway: error: case 2 float32: sdpa is left out" in err


def test_a_backend_that_can_measure_nothing_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    toy = ["--case", "causal", "--tokens", "32", "--repeats", "1", "--dtype", "float32"]
    assert run(["bench", "attention", *toy, "--backend", "triton"]) == 1
    out, err = capsys.readouterr()
    assert out.count('backend="triton" cannot run this call') == 1, "a note is said once"
    assert "nothing could be measured" in err
