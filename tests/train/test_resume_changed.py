"""Resuming with other settings, another model or another text is refused or reported."""

from collections.abc import Callable
from pathlib import Path

import pytest

from headway.errors import CheckpointError, ConfigError
from headway.train import TextConfig, train
from headway.train.checkpoint import checkpoints
from headway.train.metrics import read_metrics

Make = Callable[..., TextConfig]


def test_what_does_not_fit_a_checkpoint_is_refused(settings: Make, tmp_path: Path) -> None:
    config = settings(steps=2)
    train(config, quiet=True)
    other = settings(steps=4, lr=1.0, seed=3)
    with pytest.raises(
        ConfigError, match=r"cannot resume from .*checkpoint-2: lr was 0.003, is 1.0; seed was 0, is 3"
    ):
        train(other, resume="auto", quiet=True)
    with pytest.raises(CheckpointError, match=r"nowhere is not a training checkpoint: no such folder"):
        train(config, resume=str(tmp_path / "nowhere"), quiet=True)
    config_file = Path(config.out) / "checkpoint-2" / "config.json"
    original = config_file.read_text("utf-8")
    config_file.write_text(original.replace('"sliding_window": 8', '"sliding_window": 7'), "utf-8")
    with pytest.raises(CheckpointError, match=r"checkpoint-2: its model differs from that of the settings"):
        train(settings(steps=4), resume="auto", quiet=True)
    config_file.write_text(original, "utf-8")
    with (Path(config.data)).open("a") as file:
        file.write('{"text": "more"}\n')
    again = settings(steps=4, out=str(tmp_path / "again"))
    with pytest.raises(ConfigError, match=r"the training data differs: it was .*'documents': 60"):
        train(again, resume=str(Path(config.out) / "checkpoint-2"), quiet=True)


def test_more_steps_go_on_and_say_that_the_schedule_is_another(
    settings: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(steps=2), quiet=True)
    assert train(settings(steps=4), resume="auto").steps == 4
    stderr = capsys.readouterr().err
    assert "not bit for bit the same run: steps was 2, is 4" in stderr
    assert "going on from" in stderr
    steps = [r["step"] for r in read_metrics(Path(settings().out) / "metrics.jsonl") if "loss" in r]
    assert steps == [1, 2, 3, 4]


def test_a_checkpoint_is_not_overtaken_by_later_ones_of_another_history(
    settings: Make, tmp_path: Path
) -> None:
    config = settings(steps=4, save_every=2, keep_last=9)
    train(config, quiet=True)
    middle = Path(config.out) / "checkpoint-2"
    with pytest.raises(
        ConfigError, match=r"holds checkpoint-4, which go beyond .*checkpoint-2; choose another folder"
    ):
        train(config, resume=str(middle), quiet=True)
    other = settings(out=str(tmp_path / "other"), steps=4)
    train(other, quiet=True)
    with pytest.raises(ConfigError, match=r"other holds checkpoint-0, checkpoint-4, which do not come from"):
        train(other, resume=str(middle), quiet=True)


def test_a_text_that_has_changed_is_not_gone_on_with_unless_told(
    settings: Make, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resumed run reads the tokens it has encoded: if the text has changed, only with cached_tokens, and says so."""
    config = settings(steps=2, validation_share=0.1)
    train(config, quiet=True)
    longer, original = config.model_copy(update={"steps": 4}), corpus.read_bytes()
    from_cache = longer.model_copy(update={"cached_tokens": True})
    corpus.write_bytes(original + b'{"text": "one more"}\n')
    with pytest.raises(
        ConfigError, match=rf"{corpus} has changed since this run encoded it; restore it.*--cached-tok"
    ):
        train(longer, resume="auto", quiet=True)
    assert checkpoints(Path(config.out))[-1].name == "checkpoint-2"
    corpus.unlink()
    with pytest.raises(ConfigError, match=rf"data {corpus}: no such file"):
        train(longer, resume="auto", quiet=True)
    train(from_cache.model_copy(update={"steps": 3}), resume="auto")
    assert (
        f"{corpus} is gone since this run encoded it: going on with the tokens in" in capsys.readouterr().err
    )
    corpus.write_bytes(original)  # the same text, though written later
    assert train(longer, resume="auto").steps == 4
    assert "since this run encoded it" not in capsys.readouterr().err
