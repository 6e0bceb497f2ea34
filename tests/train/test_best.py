"""A run keeps its best model and ends when it no longer improves; a resumed run does so with the same bits."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints.folder import load_folder
from headway.errors import ConfigError
from headway.storage.tensors import open_tensors
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.ending import count
from headway.train.evaluation import Evaluation
from headway.train.metrics import read_metrics
from headway.train.tasks.base import Objective
from headway.train.tasks.text import CausalLM
from headway.train.trainer import Progress
from tests.checkpoints.shares import share
from tests.train.reversal import Reversal, ReversalConfig
from tests.train.test_dry_run import RECORDS, of
from tests.train.test_processes import as_one
from tests.train.test_resume import assert_same_bits, in_a_child, killed_at_micro_batch

Make = Callable[..., TextConfig]
HELD: dict[str, Any] = {"validation_share": 0.2, "eval_every": 1}


def losses(out: str) -> dict[int, float]:
    """Returns the held-out loss of each step: the first one logged, by which models are compared."""
    lines = [r for r in read_metrics(Path(out) / "metrics.jsonl") if "val_loss" in r]
    return {r["step"]: r["val_loss"] for r in reversed(lines)}


def scripted(monkeypatch: pytest.MonkeyPatch, task: type[Objective[Any]], *values: float) -> None:
    """Makes evaluations return these losses, one after the other."""
    remaining = iter(values)
    monkeypatch.setattr(task, "evaluate", lambda *_, **__: Evaluation(next(remaining), 1))


def same_weights(a: Path, b: Path) -> bool:
    """Returns whether `a` has all tensors of checkpoint `b`: saved translators have Marian's zero biases besides."""
    actual, expected = load_folder(a).tensors, load_folder(b).tensors
    return all(torch.equal(actual[name], expected[name]) for name in expected)


@share("task", [*RECORDS, "translation"], 0, 2)
def test_of_every_task_the_best_model_is_left(task: str, tmp_path: Path) -> None:
    """The learning rate is so high that the model soon gets worse; one more checkpoint is kept besides the best."""
    held: dict[str, Any] = {"validation_share": 0.2, "epochs": None, "lr": 0.3, "micro_batch": None}
    if task == "translation":
        files = of(task, tmp_path)
        held = {"validation_source": files.source, "validation_target": files.target, "lr_scale": 300.0}
    config = of(task, tmp_path, **held, steps=4, eval_every=1, keep_best=True, keep_last=1, seed=3)
    result = train(config, quiet=True)
    measured = losses(config.out)
    assert [*sorted(measured)] == [0, 1, 2, 3, 4]
    best = min(measured, key=lambda step: (measured[step], step))
    assert [p.name for p in checkpoints(result.out)] == sorted({f"checkpoint-{best}", "checkpoint-4"})
    assert same_weights(result.model, result.out / f"checkpoint-{best}")
    assert result.validation is not None
    assert result.validation.loss == pytest.approx(measured[best], rel=1e-6)


def test_the_best_is_by_any_measure_and_the_first_of_equals() -> None:
    def steps(name: str, *values: float) -> tuple[list[bool], Progress]:
        config, progress, better = ReversalConfig(eval_every=1, keep_best=True, best_by=name), Progress(), []
        for progress.step, value in enumerate(values):
            better.append(count(config, progress, Evaluation(value, 1, metrics={"f1": value})))
        return better, progress

    better, progress = steps("loss", 3.0, 2.0, 2.0, float("nan"), 1.5, 4.0)
    assert better == [True, True, False, False, True, False]
    assert (progress.best, progress.best_step, progress.evaluated, progress.waited) == (1.5, 4, 5, 1)
    better, progress = steps("f1", float("nan"), 0.3, 0.2, 0.4, 0.4, 0.1)
    assert better == [False, True, False, True, False, False]
    assert (progress.best, progress.best_step, progress.waited) == (0.4, 3, 2)
    with pytest.raises(
        ConfigError, match=r"best_by: there is no measure 'f11' \(did you mean .f1.\?\); .* have loss, f1"
    ):
        steps("f11", 1.0)


@pytest.mark.parametrize(("values", "ends", "best"), [
    ((5, 4, 3, 3, 3.5, 9), 4, 2),
    ((5, 6, 7, 9), 2, 0),
    ((5, 6, 4, 6, 3, 2, 1, 9), 6, 6),
])  # fmt: skip
def test_a_run_ends_when_nothing_better_came(
    values: tuple[float, ...],
    ends: int,
    best: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Two evaluations in a row, counting the one before the first step, end a run; a better one restarts the count."""
    config = ReversalConfig(
        out=str(tmp_path / "run"),
        steps=6,
        eval_every=1,
        early_stopping_patience=2,
        keep_best=True,
        dtype="fp32",
    )
    scripted(monkeypatch, Reversal, *values)
    result = train(config)
    assert ("2 evaluations in a row brought no better loss\n" in capsys.readouterr().err) == (ends < 6)
    assert result.steps == ends
    assert same_weights(result.model, result.out / f"checkpoint-{best}")
    assert result.validation is not None
    assert result.validation.loss == values[ends + 1]


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_killed_and_resumed_it_is_the_run_that_was_not(dtype: str, tmp_path: Path, settings: Make) -> None:
    """The best model is from before the kill, and the count goes on, so that the run ends at the same step."""
    changes: dict[str, Any] = {**HELD, "steps": 12, "lr": 0.1, "lr_floor": 1.0, "keep_best": True, "keep_last": 1,
                           "early_stopping_patience": 3, "save_every": 2, "dtype": dtype, "dropout": 0.1}  # fmt: skip
    whole, killed = (settings(**changes, out=str(tmp_path / name)) for name in ("whole", "killed"))
    ended = train(whole, quiet=True)
    assert ended.steps == 7
    assert min(losses(whole.out), key=losses(whole.out).__getitem__) == 4
    assert in_a_child(killed_at_micro_batch(killed, 3 * 6 + 1)) == -signal.SIGKILL
    assert [p.name for p in checkpoints(Path(killed.out))] == ["checkpoint-4", "checkpoint-6"]
    assert train(killed, resume="auto", quiet=True).steps == ended.steps
    assert_same_bits(killed.out, whole.out)
    assert losses(killed.out) == losses(whole.out)
    names = [[p.name for p in checkpoints(Path(c.out))] for c in (killed, whole)]
    assert names[0] == names[1]
    again = train(killed, resume="auto", quiet=True)  # the run is over; no evaluation is counted twice
    assert again.steps == ended.steps
    assert_same_bits(killed.out, whole.out)


def test_a_measure_that_is_not_there_is_named_before_the_first_step(
    settings: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(**HELD, keep_best=True, best_by="acuracy")
    with pytest.raises(
        ConfigError, match=r"best_by: there is no measure 'acuracy'.* have loss, tokens, bits_per_byte"
    ):
        train(config, quiet=True)
    assert not checkpoints(Path(config.out))
    unmeasured = ReversalConfig(out=config.out + "-own", eval_every=1, keep_best=True)
    monkeypatch.setattr(Reversal, "evaluate", lambda *_, **__: None)
    with pytest.raises(ConfigError, match="need held-out data, and none is given"):
        train(unmeasured, quiet=True)


def test_the_best_adapter_is_left(
    tmp_path: Path, settings: Make, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = train(settings(steps=1, out=str(tmp_path / "base")), quiet=True)
    fields: dict[str, Any] = {"data": str(corpus), "model": str(base.model), "adapter": "lora", "context": 24, **HELD,
                           "batch_tokens": 24 * 8, "dtype": "fp32", "steps": 3, "workers": 1}  # fmt: skip
    scripted(monkeypatch, CausalLM, 5, 4, 6, 7, 4)
    result = train(TextConfig.of({**fields, "keep_best": True, "out": str(tmp_path / "run")}), quiet=True)
    files = [result.model / "adapter_model.safetensors"]
    files += [result.out / f"checkpoint-{step}" / "adapter.safetensors" for step in (1, 3)]
    final, best, last = (
        sorted(float(tensor.double().sum()) for tensor in open_tensors(file).values()) for file in files
    )
    assert final == best != last


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2"])
def test_several_processes_keep_the_best_of_one(mesh: str, tmp_path: Path, settings: Make) -> None:
    changes: dict[str, Any] = {**HELD, "steps": 12, "lr": 0.1, "lr_floor": 1.0, "keep_best": True, "micro_batch": 4,
                           "early_stopping_patience": 3, "workers": 1}  # fmt: skip
    as_one(settings(**changes), tmp_path, mesh=mesh)
    alone, shared = ([p.name for p in checkpoints(tmp_path / name)] for name in ("alone", "shared"))
    assert alone == shared
    assert len(shared) == 2
