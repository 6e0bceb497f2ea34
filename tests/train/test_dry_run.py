"""A dry run describes the run of any task and writes nothing; paths are checked before anything else."""

import json
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.errors import BackendError, ConfigError
from headway.models import cost
from headway.nn import Attention
from headway.train import train
from headway.train.dry_run import describe_run
from headway.train.start import checked
from headway.train.tasks import TASKS, settings_of
from headway.train.tasks.translation import TranslationConfig
from tests.train.prepared import prepared
from tests.train.reversal import ReversalConfig
from tests.train.translation import TINY, corpus

SMALL = {"vocab": 261, "depth": 1, "width": 16, "heads": 2, "context": 256, "dtype": "fp32", "epochs": 3}
RECORDS: dict[str, dict[str, Any]] = {
    "causal-lm": {"text": "one two three"},
    "masked-lm": {"text": "one two three"},
    "chat": {"prompt": "one", "completion": "two"},
    "preference": {"prompt": "one", "chosen": "two", "rejected": "three"},
    "classify": {"text": "one two", "label": 1},
    "tag": {"tokens": ["one", "two"], "tags": ["O", "B-X"]},
    "answer": {"question": "who?", "context": "one two", "answers": [{"text": "two", "answer_start": 4}]},
    "embed": {"anchor": "one", "positive": "two", "negative": "three"},
}
"""A record of each task that trains on a file of records."""


def of(task: str, folder: Path, **changes: Any) -> Any:
    if task == "translation":
        return TranslationConfig.of({**TINY, **corpus(folder), "out": str(folder / "run"), **changes})
    file = folder / "data.jsonl"
    rows = [RECORDS[task], RECORDS[task] | ({"label": 0} if task == "classify" else {})]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows) * 25)
    template = {"template": "vicuna"} if task == "preference" else {}
    defaults = {"data": str(file), "task": task, "out": str(folder / "run"), **SMALL, **template}
    return settings_of(task).of(defaults | changes)


@pytest.mark.parametrize("task", TASKS)
def test_every_task_says_what_a_run_would_do(task: str, tmp_path: Path) -> None:
    """With the task's default family; first with a tokenizer yet to be trained, then with a trained one."""
    config = of(task, tmp_path)
    files = sorted(tmp_path.iterdir())
    plan = describe_run(config)
    assert sorted(tmp_path.iterdir()) == files
    assert sum(plan.groups.values()) == cost.parameter_count(plan.spec)
    ready = prepared(config, tmp_path / "made")
    assert type(ready.model.spec.head) is type(plan.spec.head)
    assert ready.model.spec.head == plan.spec.head
    assert f"\n  optimizer steps            {plan.steps}" in plan.text()
    if plan.exact or task == "translation":
        assert plan.steps == ready.steps
    if task == "translation":
        return
    ready.tokenizer.save(tmp_path / "tokenizer")
    with_tokenizer = of(task, tmp_path, vocab=None, tokenizer=str(tmp_path / "tokenizer"))
    plan, ready = describe_run(with_tokenizer), prepared(with_tokenizer, tmp_path / "again")
    assert plan.exact == (task not in ("causal-lm", "masked-lm"))
    assert plan.spec == ready.model.spec
    if plan.exact:
        assert (plan.steps, plan.rows) == (ready.steps, ready.plan.rows)
        assert plan.micro_batches == len(ready.batches(0))


@pytest.mark.parametrize("task", TASKS)
def test_settings_of_the_machine_reach_every_model(task: str, tmp_path: Path) -> None:
    ready = prepared(of(task, tmp_path, gradient_checkpointing="block", backend="sdpa"))
    assert ready.model.gradient_checkpointing == "block"
    mixers = [m.mixer.backend for m in ready.model.modules() if isinstance(m, Attention)]
    assert mixers
    assert set(mixers) == {"sdpa"}
    with pytest.raises(BackendError, match="unknown backend 'cuda_core'"):
        checked(of(task, tmp_path, backend="cuda_core"), 1)


def test_the_command_has_it_for_every_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = of("tag", tmp_path)
    assert run(["train", "--task", "tag", "--data", config.data, "--depth", "1", "--dry-run"]) == 0
    assert "training records           50\n" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="a dry run needs the method `foresee`, which Reversal lacks"):
        describe_run(ReversalConfig(out=str(tmp_path / "run")))


def test_all_paths_are_looked_at_before_anything_is_done(tmp_path: Path) -> None:
    config = of("translation", tmp_path)
    missing = {
        "validation_source": str(tmp_path / "a.em"),
        "validation_target": str(tmp_path / "none" / "b.de"),
    }
    with pytest.raises(ConfigError) as refused:
        train(config.model_copy(update=missing), quiet=True)
    assert str(refused.value) == (
        f'validation_source {tmp_path}/a.em: no such file or folder (did you mean "a.en"?); '
        f"validation_target {tmp_path}/none/b.de: no such file or folder. Paths are relative to {Path.cwd()}"
    )
    assert not Path(config.out).exists()
    chat = of("chat", tmp_path, template="vicunna", data=str(tmp_path / "x"), moments=str(tmp_path / "m"))
    message = r"data .*/x: no such.*; moments .*/m: no such.*; template vicunna: neither a built-in chat template \(did"
    with pytest.raises(ConfigError, match=message):
        train(chat, quiet=True)
