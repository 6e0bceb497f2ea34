"""Trackers get each line of metrics.jsonl once, even if the run is killed in between, and never stop a run."""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from headway.errors import ConfigError
from headway.train import Callback, CallbackContext, TextConfig, train
from headway.train.metrics import read_metrics
from headway.train.trackers import numbers

Make = Callable[..., TextConfig]
Sent = dict[str, list[tuple[int, dict[str, float]]]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Sent]:
    """Returns a function that installs a module with wandb's calls under a name and returns what is logged, by run."""

    def make(name: str) -> Sent:
        sent: Sent = {}
        module: Any = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.login = lambda prompt, verify: prompt or verify

        def init(**options: Any) -> Any:
            assert options["project"] == "headway"
            assert options["config"]["depth"] == 2
            assert (options["resume"], options.get("id", options["name"])) == ("allow", options["name"])
            calls = sent.setdefault(options["name"], [])
            return SimpleNamespace(
                log=lambda values, step: calls.append((step, dict(values))),
                finish=lambda: calls.append((-1, {})),
            )

        module.init = init
        monkeypatch.setitem(sys.modules, name, module)
        return sent

    return make


def die(context: CallbackContext) -> None:
    if context.step == 4:
        raise RuntimeError("killed")


def expected(out: Path) -> list[tuple[int, dict[str, float]]]:
    return [
        (record["step"], numbers(record))
        for record in read_metrics(out / "metrics.jsonl")
        if "step" in record
    ]


CHANGES: dict[str, Any] = {"save_every": 2, "eval_every": 3, "validation_share": 0.2}


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_each_line_is_sent_once_whatever_was_killed(
    name: str,
    settings: Make,
    fake: Callable[[str], Sent],
    monkeypatch: pytest.MonkeyPatch,
    steady_clock: None,
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    sent = fake(name)
    config = settings(**CHANGES, report=[name])
    with pytest.raises(RuntimeError, match="killed"):
        train(config, callbacks=[Callback(die, every_steps=1)], quiet=True)
    before = [step for step, _ in next(iter(sent.values())) if step >= 0]
    assert before == [1, 2, 3, 3, 4]
    train(config, resume="auto", quiet=True)
    ((_, lines),) = sent.items()
    lines = [line for line in lines if line[0] >= 0]
    logged = expected(Path(config.out))
    assert [step for step, _ in lines] == [step for step, _ in logged] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert [values["loss"] for _, values in lines if "loss" in values] == [
        values["loss"] for _, values in logged if "loss" in values
    ]
    train(config, resume="auto", quiet=True)
    assert sum(len(calls) for calls in sent.values()) == 8 + 3  # and three calls of finish


def test_a_run_that_is_reported_late_is_sent_from_its_beginning(
    settings: Make, fake: Callable[[str], Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = fake("trackio")
    with pytest.raises(RuntimeError, match="killed"):
        train(settings(**CHANGES), callbacks=[Callback(die, every_steps=1)], quiet=True)
    assert not sent
    config = settings(**CHANGES, report=["trackio"])
    train(config, resume="auto", quiet=True)
    ((_, lines),) = sent.items()
    assert lines[:-1] == expected(Path(config.out))


def test_a_tracker_that_fails_costs_the_run_nothing(
    settings: Make, fake: Callable[[str], Sent], capsys: pytest.CaptureFixture[str]
) -> None:
    fake("trackio")
    sys.modules["trackio"].init = lambda **options: 1 / 0  # type: ignore[attr-defined]
    assert train(settings(report=["trackio"])).steps == 6
    assert (
        "trackio: no more metrics are sent (ZeroDivisionError: division by zero)" in capsys.readouterr().err
    )


def test_what_is_missing_is_said_before_anything_is_written(
    settings: Make, fake: Callable[[str], Sent], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(report=["trackio"])
    monkeypatch.setattr("headway.train.trackers.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r'report: trackio is not installed; pip install "headway\[trackio\]"'
    ):
        train(config)
    monkeypatch.undo()
    monkeypatch.delenv("WANDB_MODE", raising=False)
    fake("wandb")
    with pytest.raises(
        ConfigError, match=r"report: wandb has no API key; set WANDB_API_KEY.*WANDB_MODE=offline"
    ):
        train(settings(report=["wandb"]))
    assert not Path(config.out).exists()
    with pytest.raises(
        ConfigError, match=r"report = 'mlflow': input should be 'tensorboard', 'wandb' or 'trackio'"
    ):
        settings(report=["mlflow"])


@pytest.mark.slow
def test_the_events_of_tensorboard_are_the_lines_of_metrics(settings: Make) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = settings(**CHANGES, report=["tensorboard"])
    with pytest.raises(RuntimeError, match="killed"):
        train(config, callbacks=[Callback(die, every_steps=1)], quiet=True)
    train(config, resume="auto", quiet=True)
    events = EventAccumulator(str(Path(config.out) / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    logged = expected(Path(config.out))
    assert {"loss", "lr", "grad_norm", "val_loss"} <= set(events.Tags()["scalars"])
    for tag in events.Tags()["scalars"]:
        actual = [(event.step, event.value) for event in events.Scalars(tag)]
        of_tag = [(step, values[tag]) for step, values in logged if tag in values]
        assert [step for step, _ in actual] == [step for step, _ in of_tag]
        assert [value for _, value in actual] == pytest.approx([value for _, value in of_tag], rel=1e-6)
