"""A translation run that ended goes on as if it had been longer, and refuses inputs that do not fit it."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.data.pairs import START, Pairs
from headway.errors import ConfigError
from headway.train import Interrupted, TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.tasks.base import StepStats
from headway.train.tasks.translation import TranslationConfig
from headway.train.trainer import Trainer
from tests.train.test_resume import assert_same_bits
from tests.train.translation import config

Make = Callable[..., TranslationConfig]


@pytest.fixture
def translation(tmp_path: Path) -> Make:
    return partial(config, tmp_path)


@pytest.mark.parametrize("end", [{"steps": 4}, {"max_seconds": 1e-9}])
def test_a_run_that_ended_goes_on_as_if_it_had_been_longer(
    translation: Make, tmp_path: Path, end: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    train(translation(out=str(tmp_path / "whole")), quiet=True)
    ended = train(translation(**end), quiet=True)
    assert ended.steps == end.get("steps", 0)
    checkpoint = headway.load(checkpoints(ended.out)[-1], task="translation")  # without the final model
    assert checkpoint.generation["decoder_start_token_id"] == START
    train(translation(), resume="auto")
    stderr = capsys.readouterr().err
    assert "going on from" in stderr
    assert "not bit for bit" not in stderr
    assert_same_bits(translation().out, str(tmp_path / "whole"))
    again = train(translation(), resume="auto", quiet=True)
    assert (again.steps, again.loss) == (10, None)  # nothing was left to do


def test_a_second_ctrl_c_saves_no_checkpoint(translation: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    run_config, plain_step = translation(), Trainer.step

    def twice(trainer: Trainer[Any]) -> StepStats:
        if trainer.progress.step == 1:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return plain_step(trainer)

    monkeypatch.setattr(Trainer, "step", twice)
    with pytest.raises(KeyboardInterrupt) as stop:
        train(run_config, quiet=True)
    assert not isinstance(stop.value, Interrupted)
    assert [p.name for p in checkpoints(Path(run_config.out))] == ["checkpoint-0"]


def test_other_pairs_are_refused(translation: Make) -> None:
    first = translation(steps=3)
    train(first, quiet=True)
    lines = Path(first.target).read_text("utf-8").splitlines()
    longer = translation(steps=4)
    Path(first.target).write_text("\n".join([lines[1], lines[0], *lines[2:]]), "utf-8")
    with pytest.raises(ConfigError, match=r"the training data differs: it was .*'pairs': 60"):
        train(longer, resume="auto", quiet=True)


def test_a_checkpoint_of_another_kind_of_run_is_refused(
    translation: Make, settings: Callable[..., TextConfig], tmp_path: Path
) -> None:
    text, pairs = settings(steps=1, out=str(tmp_path / "text")), translation(steps=1)
    train(text, quiet=True)
    train(pairs, quiet=True)
    elsewhere = str(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="its task is causal-lm, but this run's is translation"):
        train(translation(out=elsewhere), resume=f"{text.out}/checkpoint-1", quiet=True)
    with pytest.raises(ConfigError, match="its task is translation, but this run's is causal-lm"):
        train(settings(out=elsewhere), resume=f"{pairs.out}/checkpoint-1", quiet=True)
    assert not Path(elsewhere).exists()


def test_pairs_are_told_apart_by_ids_and_order() -> None:
    plain = Pairs([[5, 6], [7]], [[8], [9]])
    different = [
        Pairs([[5], [6, 7]], [[8], [9]]),
        Pairs([[7], [5, 6]], [[8], [9]]),
        Pairs([[5, 6], [7]], [[9], [8]]),
        Pairs([[5, 6]], [[7], [8], [9]]),
    ]
    assert plain.described() == Pairs([(5, 6), (7,)], [(8,), (9,)]).described()
    assert all(plain.described() != pairs.described() for pairs in different)
