"""A translator's run that was stopped ends with the bits of one that never was, and refuses what does not fit."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.cli import run
from headway.data.pairs import START, Pairs
from headway.errors import CheckpointError, ConfigError
from headway.train import Interrupted, TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.tasks.base import StepStats
from headway.train.tasks.translation import TranslationConfig
from headway.train.trainer import Trainer
from tests.checkpoints.shares import share
from tests.train.test_resume import (
    assert_same_bits,
    in_a_child,
    killed_at_disk_call,
    killed_at_micro_batch,
    weights,
)
from tests.train.test_translation import TINY, corpus

Make = Callable[..., TranslationConfig]


@pytest.fixture
def translation(tmp_path: Path) -> Make:
    """Some three steps an epoch, with dropout: its seeds are drawn from torch's generator step by step."""
    usual = {**TINY, **corpus(tmp_path), "batch_tokens": 128, "dropout": 0.1, "steps": 10, "save_every": 3}

    def make(**changes: Any) -> TranslationConfig:
        return TranslationConfig.of({**usual, "out": str(tmp_path / "run"), **changes})

    return make


def interrupted_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the midst of the step after `step`."""
    plain = Trainer.step

    def interrupting(trainer: Trainer[Any]) -> StepStats:
        if trainer.progress.step == step:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(trainer)

    monkeypatch.setattr(Trainer, "step", interrupting)


@share("dtype", ["fp32", "bf16"], 1, 2)
def test_killed_inside_steps_and_inside_a_save(translation: Make, tmp_path: Path, dtype: str) -> None:
    held = {f"validation_{side}": getattr(translation(), side) for side in ("source", "target")}
    usual = translation(dtype=dtype, out=str(tmp_path / "killed"), eval_every=2, **held)
    whole = translation(dtype=dtype, out=str(tmp_path / "whole"), save_every=None)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    train(whole, quiet=True)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)  # what the caller drew before has no part in it
    assert in_a_child(killed_at_micro_batch(usual, 5, train)) == -signal.SIGKILL
    assert [p.name for p in checkpoints(Path(usual.out))] == ["checkpoint-0", "checkpoint-3"]
    assert in_a_child(killed_at_disk_call(usual, "checkpoint-6", 9, train)) == -signal.SIGKILL
    assert [p.name for p in checkpoints(Path(usual.out))] == ["checkpoint-0", "checkpoint-3"]
    assert in_a_child(killed_at_micro_batch(usual, 5, train)) == -signal.SIGKILL
    assert checkpoints(Path(usual.out))[-1].name == "checkpoint-6"
    train(usual, resume="auto", quiet=True)
    assert_same_bits(usual.out, whole.out)


def test_resumed_from_every_step_across_epochs(translation: Make, tmp_path: Path) -> None:
    whole = translation(save_every=1, keep_last=99, steps=5)
    done = train(whole, quiet=True)
    assert len(checkpoints(Path(whole.out))) == done.steps + 1
    for checkpoint in checkpoints(Path(whole.out))[:-1]:
        again = translation(steps=5, out=str(tmp_path / f"from-{checkpoint.name}"))
        assert train(again, resume=str(checkpoint), quiet=True).loss == done.loss
        a, b = weights(again.out), weights(whole.out)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in b), checkpoint.name


@pytest.mark.parametrize("end", [{"steps": 4}, {"max_seconds": 1e-9}])
def test_a_run_that_ended_goes_on_as_if_it_had_been_longer(
    translation: Make, tmp_path: Path, end: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train(translation(out=str(tmp_path / "whole")), quiet=True)
    assert train(translation(**end), quiet=True).steps == end.get("steps", 0)
    train(translation(), resume="auto")
    said = capsys.readouterr().err
    assert "going on from" in said
    assert "not bit for bit" not in said
    assert_same_bits(translation().out, str(tmp_path / "whole"))
    again = train(translation(), resume="auto", quiet=True)
    assert (again.steps, again.loss) == (10, None)  # nothing was left to do


def test_ctrl_c_saves_says_how_to_resume_and_goes_on(
    translation: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = translation()
    train(translation(out=str(tmp_path / "whole")), quiet=True)
    values = config.model_dump(exclude_none=True).items()
    given = [f"--{name.replace('_', '-')}={value}" for name, value in values if value not in (False, ())]
    with monkeypatch.context() as patched:
        interrupted_at(4, patched)
        assert run(["train", *given]) == 130
    said = capsys.readouterr().err
    own = f"{config.out}/config.yaml"
    assert f"saved {config.out}/checkpoint-5" in said
    assert f"resume with: headway train --config {own} --resume auto" in said
    assert not (Path(config.out) / "final").exists()
    found = headway.load(f"{config.out}/checkpoint-5", task="translation")  # and is a translator by itself
    assert found.generation["decoder_start_token_id"] == START
    assert run(["train", "--config", own, "--resume", "auto", "--json"]) == 0
    assert '"steps": 10' in capsys.readouterr().out
    assert_same_bits(config.out, str(tmp_path / "whole"))


def test_a_second_ctrl_c_ends_at_once(translation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    config, plain = translation(), Trainer.step

    def twice(trainer: Trainer[Any]) -> StepStats:
        if trainer.progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return plain(trainer)

    monkeypatch.setattr(Trainer, "step", twice)
    with pytest.raises(KeyboardInterrupt) as stop:
        train(config, quiet=True)
    assert not isinstance(stop.value, Interrupted)
    assert [p.name for p in checkpoints(Path(config.out))] == ["checkpoint-0"]


def test_what_does_not_fit_a_checkpoint_is_refused(translation: Make, tmp_path: Path) -> None:
    config = translation(steps=3)
    train(config, quiet=True)
    last = Path(config.out) / "checkpoint-3"
    with pytest.raises(
        ConfigError, match=r"already holds a run \(checkpoint-3\); resume it with --resume auto"
    ):
        train(config, quiet=True)
    with pytest.raises(
        ConfigError, match=r"from .*checkpoint-3: hidden was 64, is 32; seed was 0, is 3\. Start"
    ):
        train(translation(hidden=32, seed=3), resume="auto", quiet=True)
    with pytest.raises(CheckpointError, match=r"nowhere is no training checkpoint: it has no training.json"):
        train(config, resume=str(tmp_path / "nowhere"), quiet=True)
    with pytest.raises(ConfigError, match=r"run holds checkpoint-3, which go beyond .*checkpoint-0; choose"):
        train(config, resume=str(last.with_name("checkpoint-0")), quiet=True)
    lines = Path(config.target).read_text("utf-8").splitlines()
    Path(config.target).write_text("\n".join([lines[1], lines[0], *lines[2:]]), "utf-8")
    with pytest.raises(ConfigError, match=r"the training data is not the same: it was .*'pairs': 60"):
        train(translation(steps=4), resume="auto", quiet=True)


def test_a_checkpoint_of_another_kind_of_run_is_refused(
    translation: Make, settings: Callable[..., TextConfig], tmp_path: Path
) -> None:
    text, pairs = settings(steps=1, out=str(tmp_path / "text")), translation(steps=1)
    train(text, quiet=True)
    train(pairs, quiet=True)
    elsewhere = str(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a checkpoint of task causal-lm, and this run's is translation"):
        train(translation(out=elsewhere), resume=f"{text.out}/checkpoint-1", quiet=True)
    with pytest.raises(ConfigError, match="a checkpoint of task translation, and this run's is causal-lm"):
        train(settings(out=elsewhere), resume=f"{pairs.out}/checkpoint-1", quiet=True)
    assert not Path(elsewhere).exists()


def test_pairs_are_told_apart_by_ids_and_order() -> None:
    plain = Pairs([[5, 6], [7]], [[8], [9]])
    others = [
        Pairs([[5], [6, 7]], [[8], [9]]),
        Pairs([[7], [5, 6]], [[8], [9]]),
        Pairs([[5, 6], [7]], [[9], [8]]),
        Pairs([[5, 6]], [[7], [8], [9]]),
    ]
    assert plain.described() == Pairs([(5, 6), (7,)], [(8,), (9,)]).described()
    assert all(plain.described() != other.described() for other in others)
