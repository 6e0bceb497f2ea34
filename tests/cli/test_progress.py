"""Progress without a terminal: a line when work begins, then lines at intervals of time."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from headway.cli import _shared, run
from headway.cli._shared import progress
from headway.train import metrics
from tests.endpoints.scripted import completion, server
from tests.judge.test_judge import bench


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_a_log_is_told_by_time(clock: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with progress("reading") as advance:
        for done in range(1, 10):
            clock[0] += _shared.SILENCE / 4
            advance(done, 9)
    assert capsys.readouterr().err.splitlines() == ["reading ...", "reading: 4 of 9", "reading: 8 of 9"]
    with progress("for a program", only_on_terminals=True) as advance:
        clock[0] += 1e6
        advance(1, 2)
    assert capsys.readouterr().err == ""


def test_a_run_is_told_by_time_too() -> None:
    """Steps of 25 s each, of which only every 100th would be reported by number."""
    log = io.StringIO()
    record: dict[str, Any] = {"loss": 1.0, "tokens_per_s": 1.0, "lr": 1.0, "grad_norm": 1.0, "eta_s": 1.0}
    with metrics.Reporter(None, 100, stream=log) as reporter:
        for step in range(1, 8):
            reporter.step({**record, "step": step, "seconds": 25.0 * step})
    assert [line.split()[1] for line in log.getvalue().splitlines()] == ["3", "6"]
    assert metrics.SILENCE == 60


def test_a_judge_says_how_far_it_is(
    clock: list[float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions, a, b = bench(4)
    lines = [{"question_id": q.id, "category": q.category, "turns": q.turns} for q in questions]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, answers in (("a", a), ("b", b)):
        rows = [{"question_id": q, "choices": [{"turns": turns}]} for q, turns in answers.items()]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def slow(path: str, body: Any) -> Any:
        clock[0] += _shared.SILENCE / 3
        return completion("[[A]] [[5]]")

    files = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    with server(slow) as url:
        options = [
            "--questions",
            str(tmp_path / "q.jsonl"),
            "--by",
            f"{url}#m",
            "--out",
            str(tmp_path / "out"),
        ]
        assert run(["judge", *files, *options, "--mode", "pairs"]) == 0
    err = capsys.readouterr().err.splitlines()
    task = f"{url}#m compares answers to 4 questions"
    assert err == [f"{task} ...", *(f"{task}: {done} of 12" for done in (3, 6, 9, 12))]
