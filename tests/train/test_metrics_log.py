"""metrics.jsonl line by line, and the progress line of a step."""

import io
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoints.folder import load_folder
from headway.models import cost
from headway.train import train
from headway.train.metrics import MetricsLog, Reporter, clock, read_metrics, running_mean, summary

RECORD: dict[str, Any] = {
    "step": 4, "loss": 3.41159, "tokens_per_s": 5321.4, "lr": 2.1e-3, "grad_norm": 0.8249, "eta_s": 200.4,
    "seconds": 8.0,
}  # fmt: skip


class Heard:
    def __init__(self) -> None:
        self.records: list[Any] = []

    def write(self, record: Any) -> None:
        self.records.append(record)


def test_lines_are_appended_and_what_is_not_finite_is_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 9}\n')
    log = MetricsLog(path)
    assert path.read_text() == "", "a run from the beginning keeps nothing"
    heard = Heard()
    log.send = heard.write
    record = {"step": 1, "loss": float("nan"), "lr": float("-inf"), "x": 0.5, "name": "a"}
    log.write(record)
    log.write({"step": 2})
    assert path.read_text() == ('{"step": 1, "loss": null, "lr": null, "x": 0.5, "name": "a"}\n{"step": 2}\n')
    assert heard.records == [record, {"step": 2}]


def test_after_a_checkpoint_later_lines_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1}\n{"note": 2}\n{"step": 2}\n{"step": 3}\n{"step": 2, "val_loss": 1.5}\n{"step": 4'
    )
    assert [record.get("step") for record in read_metrics(path)] == [1, None, 2, 3, 2]
    MetricsLog(path, 2)
    assert read_metrics(path) == [{"step": 1}, {"step": 2}, {"step": 2, "val_loss": 1.5}]
    MetricsLog(path, 0)
    assert path.read_text() == ""
    missing = tmp_path / "none.jsonl"
    MetricsLog(missing, 2)
    assert missing.read_text() == ""


def test_of_several_processes_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, 2, writes=False)
    heard = Heard()
    log.send = heard.write
    log.write({"step": 3})
    assert not path.exists()
    assert not heard.records


def test_a_step_in_a_line() -> None:
    line = "loss 3.412  5321 tok/s  lr 2.10e-03  |g| 0.82  eta 3:20"
    assert summary(RECORD) == line
    assert summary(RECORD, short=True) == "loss 3.412  5321 tok/s  eta 3:20"
    with_metrics = RECORD | {"bits_per_byte": 1.70649, "accuracy": 0.25}
    assert summary(with_metrics) == line.replace("3.412  ", "3.412  1.706 bits/byte  accuracy 0.250  ")
    without_numbers = RECORD | {"loss": None, "bits_per_byte": None, "accuracy": None}
    assert summary(without_numbers) == line.replace("3.412", "-")
    assert "bits/byte" in summary(RECORD | {"bits_per_byte": 0.0})


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (200, "3:20"), (3599, "59:59"), (3600, "1:00:00"),
     (3803, "1:03:23"), (90061, "25:01:01")],
)  # fmt: skip
def test_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text


def told(total: int | None, every: int, steps: list[tuple[int, float]], **options: Any) -> list[int]:
    """Returns the steps whose progress is printed, for pairs of a step and its seconds since the start."""
    stream = io.StringIO()
    with Reporter(total, every, stream=stream, **options) as reporter:
        for step, seconds in steps:
            reporter.step(RECORD | {"step": step, "seconds": seconds})
    lines = stream.getvalue().splitlines()
    suffix = f"/{total}" if total else ""
    numbers = [int(line.removeprefix("step ").partition("/" if total else " ")[0]) for line in lines]
    assert lines == [f"step {n}{suffix}  {summary(RECORD)}" for n in numbers]
    return numbers


def test_a_log_is_told_every_so_many_steps_the_last_and_after_a_minute() -> None:
    seconds = [(step, float(step)) for step in range(1, 12)]
    assert told(11, 4, seconds) == [4, 8, 11]
    assert told(None, 4, seconds) == [4, 8]
    slow = [(step, 30.0 * step) for step in range(1, 7)]
    assert told(100, 50, slow) == [2, 4, 6]
    assert told(100, 3, slow) == [2, 3, 5, 6], "a minute since the last line"
    assert told(11, 4, seconds, quiet=True) == []


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_a_bar_is_filled_by_steps_or_by_the_clock(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed to stdout stays on stdout and is not drawn above the bar."""
    for total, shown in ((None, (30.0, 120.0, "step 7")), (8, (7, 8, "7/8"))):
        terminal = Terminal()
        with Reporter(total, 10, stream=terminal) as reporter:
            reporter.step(RECORD | {"step": 7, "seconds": 30.0, "eta_s": 90.0})
            reporter.note("a [bold]remark")
            print("a result")
            assert reporter._bar is not None
            (task,) = reporter._bar.tasks
        output = terminal.getvalue()
        assert (task.completed, task.total) == shown[:2]
        assert all(text in output for text in (shown[2], "loss 3.412", "a [bold]remark"))
        assert capsys.readouterr().out == "a result\n"
        assert "a result" not in output


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
        reporter.step(RECORD)
        assert reporter.quiet


def test_a_running_mean_by_hand() -> None:
    assert running_mean([float(i % 2) for i in range(39)]) == [float(i % 2) for i in range(39)]
    values = [float(i * i) for i in range(80)]
    means = running_mean(values)
    assert means[0] == 0.0
    assert means[1] == pytest.approx((0 + 1 + 4) / 3)
    assert means[40] == pytest.approx(sum(values[38:43]) / 5)
    assert means[-2] == pytest.approx(sum(values[77:]) / 3)
    assert means[-1] == pytest.approx(79**2)
    assert running_mean([]) == []


def test_speed_is_tokens_read_and_its_share_of_the_peak_that_of_their_operations(
    settings: Any, steady_clock: None
) -> None:
    """Rows are full, so a step reads all of its 8 x 24 tokens, predicted or not; the peak is set to 1e12 here."""
    result = train(settings(steps=3), quiet=True)
    records = [record for record in read_metrics(result.metrics) if "tokens_per_s" in record]
    spec = load_folder(result.model).spec
    assert len(records) == 3
    for record in records:  # the clock is read twice per step, 0.01 s each
        assert record["tokens_per_s"] == pytest.approx(8 * 24 / 0.02, rel=1e-9)
        assert record["tokens"] < 8 * 24
        share = record["tokens_per_s"] * cost.train_flops(spec, 24) / 1e12
        assert record["share_of_gemm_peak"] == pytest.approx(share, rel=1e-12)
        assert record["peak_memory_bytes"] > 1 << 20
