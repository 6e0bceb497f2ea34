"""The live bar of a run by the clock, and the running mean of its curve."""

import io
from typing import Any

import pytest

from headway.train.metrics import Reporter, running_mean


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def record(step: int, seconds: float, left: float) -> dict[str, Any]:
    numbers = {"loss": 2.5, "bits_per_byte": 1.5, "tokens_per_s": 100.0, "lr": 1e-3, "grad_norm": 1.0}
    return {**numbers, "step": step, "seconds": seconds, "eta_s": left}


def test_the_bar_of_a_run_by_the_clock_fills_by_the_clock() -> None:
    with Reporter(None, 10, stream=Terminal()) as reporter:
        reporter.step(record(7, 30.0, 90.0))
        assert reporter._bar is not None
        (task,) = reporter._bar.tasks
    assert (task.completed, task.total, task.percentage) == (30.0, 120.0, 25.0)
    assert "step 7" in reporter.stream.getvalue()  # type: ignore[attr-defined]


def test_results_go_to_stdout_also_under_the_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(None, 10, stream=Terminal()) as reporter:
        print("a result")
    assert capsys.readouterr().out == "a result\n"
    assert "a result" not in reporter.stream.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [Terminal, io.StringIO])
def test_a_reader_that_is_gone_does_not_end_a_run(
    kind: type[io.StringIO], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(text: str) -> int:
        raise OSError(5, "Input/output error")

    stream = kind()
    with Reporter(None, 1, stream=stream) as reporter:
        monkeypatch.setattr(stream, "write", gone)
        reporter.note("a remark")
        reporter.step(record(1, 1.0, 3.0))
        assert reporter.quiet


@pytest.mark.parametrize("count", [1, 2, 39, 40, 1000])
def test_the_running_mean_does_not_lag(count: int) -> None:
    """Of a line it is the line; of values that alternate, their middle; every value counts alike."""
    line = [3.0 - 0.01 * i for i in range(count)]
    assert running_mean(line) == pytest.approx(line)
    if count == 1000:
        inside = running_mean([float(i % 2) for i in range(count)])[25:-25]
        assert inside == pytest.approx([0.5] * 950, abs=0.02)
