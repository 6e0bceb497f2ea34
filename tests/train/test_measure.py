"""`headway eval --task` of a run's model on the run's held-out data repeats the last evaluation of the run."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.report import cell
from headway.train import TextConfig, train
from headway.train.config import TrainConfig
from headway.train.metrics import read_metrics
from headway.train.tasks import TASKS
from headway.train.tasks.translation import TranslationConfig
from tests.checkpoints.shares import share
from tests.train import heads, test_chat, test_preference
from tests.train.conftest import documents
from tests.train.heads import write
from tests.train.test_chat import SHORT, conversations
from tests.train.test_preference import pairs
from tests.train.translation import TINY, corpus

pytestmark = pytest.mark.filterwarnings("ignore:train_words")  # the corpora have few words
Case = Callable[[Path], tuple[TrainConfig, list[str]]]
ROWS = ["context=64"]


def chat(folder: Path) -> tuple[TrainConfig, list[str]]:
    """Answers end with a token other than EOS, which eval learns from generation_config.json only."""
    held = write(folder / "held.jsonl", conversations(20, seed=1))
    other = SHORT.replace("{{ eos_token }}", "{{ bos_token }}")
    config = test_chat.config(folder, validation=held, train_on="last", template=other, stop=("<|begin|>",))
    return config, ["--data", held, "train_on=last", *ROWS]


def share_of_chats(folder: Path) -> tuple[TrainConfig, list[str]]:
    config = test_chat.config(folder, validation_share=0.2, seed=3)
    return config, ["--data", config.data, "validation_share=0.2", "seed=3", *ROWS]


def adapter(folder: Path) -> tuple[TrainConfig, list[str]]:
    """Returns the case of an adapter whose own chat template differs from its base's."""
    base = train(
        test_chat.config(folder, template=SHORT.replace("A:", "B:"), steps=1, out=str(folder / "base")),
        quiet=True,
    )
    held = write(folder / "held.jsonl", conversations(20, seed=1))
    fresh = dict.fromkeys(("vocab", "depth", "width", "heads", "kv_heads", "hidden"))
    trained = {"model": str(base.model), "adapter": "lora", "rank": 2}
    return test_chat.config(folder, validation=held, **fresh, **trained), ["--data", held, *ROWS]


def dpo(folder: Path) -> tuple[TrainConfig, list[str]]:
    held = write(folder / "held.jsonl", pairs(30)[10:])
    config = test_preference.config(folder, validation=held, validation_share=0.0, beta=0.3)
    return config, ["--data", held, "beta=0.3", f"reference={config.out}/checkpoint-0", *ROWS]


def orpo(folder: Path) -> tuple[TrainConfig, list[str]]:
    held = write(folder / "held.jsonl", pairs(30)[10:])
    config = test_preference.config(folder, validation=held, validation_share=0.0, loss="orpo", beta=0.3)
    return config, ["--data", held, "beta=0.3", "loss=orpo", *ROWS]


def translation(folder: Path) -> tuple[TrainConfig, list[str]]:
    files = corpus(folder)
    held = {"validation_source": files["source"], "validation_target": files["target"]}
    short = {**TINY, "steps": 4, "out": str(folder / "run")}
    return TranslationConfig.of({**short, **files, **held}), [
        f"{name}={path}" for name, path in files.items()
    ]


def text(**changes: Any) -> Case:
    def made(folder: Path) -> tuple[TrainConfig, list[str]]:
        files = [
            write(folder / f"{i}.jsonl", [{"text": document} for document in documents(i, 30)])
            for i in (0, 1)
        ]
        defaults: dict[str, Any] = {
            "data": files[0], "validation": files[1], "vocab": 300, "depth": 1, "width": 16, "heads": 2,
            "hidden": 24, "context": 24, "batch_tokens": 96, "steps": 4, "dtype": "fp32", "workers": 1,
            "backend": "sdpa", "out": str(folder / "run"),
        }  # fmt: skip
        return TextConfig.of(defaults | changes), ["--data", files[1], "--context", "24"]

    return made


def head(task: str) -> Case:
    def made(folder: Path) -> tuple[TrainConfig, list[str]]:
        config = heads.settings(task, folder)
        return config, ["--data", str(config.validation)]

    return made


CASES: dict[str, Case] = {
    "causal-lm": text(),
    "masked-lm": text(family="bert", dropout=0.0),
    "translation": translation,
    "chat": chat,
    "chat, a share": share_of_chats,
    "chat, an adapter": adapter,
    "preference": dpo,
    "preference, orpo": orpo,
    **{task: head(task) for task in heads.DATA},
}


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    code = run([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


@share("case", CASES, 1, 2)
def test_eval_of_what_a_run_left_is_the_runs_last_evaluation(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, arguments = CASES[case](tmp_path)
    result = train(config, quiet=True)
    last = next(line for line in reversed(read_metrics(result.metrics)) if "val_loss" in line)
    command = ["eval", str(result.model), "--task", case.partition(",")[0], "--dtype", "fp32", *arguments]
    evaluation = report(command, capsys)
    measured = {name.removeprefix("val_"): value for name, value in last.items() if name.startswith("val_")}
    assert "loss" in measured
    for name, value in measured.items():
        assert evaluation[name] == pytest.approx(value, rel=1e-5), name
    assert run([*command, "--limit", "7"]) == 0
    assert run([*command, "lr=1"]) == 1
    assert f"eval of task {case.partition(',')[0]} has no setting 'lr'" in capsys.readouterr().err


def test_every_task_is_measured() -> None:
    assert {case.partition(",")[0] for case in CASES} == set(TASKS)


def test_what_is_measured_is_said_before_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, arguments = orpo(tmp_path)
    result = train(config, quiet=True)
    held, model = arguments[1], str(result.model)
    for options, message in (
        (["--task", "classify", "--data", held], "trained on next tokens, not an encoder"),
        (["--task", "preferences", "--data", held], 'did you mean "preference"?'),
        (
            ["--task", "preference", "--data", held],
            "give its folder (reference=FOLDER), or loss=orpo",
        ),
        (
            ["--task", "preference", "--data", held, "data=x"],
            "data=x is given as an option too; give it once",
        ),
        (["--task", "preference", "--harness", "x"], "--task and KEY=VALUE are for headway's own tasks"),
        (["--task", "translation", "source=a", "target=b"], "not an encoder-decoder (transformer"),
        (["--task", "tests.train.reversal:Reversal", "letters=3"], "`measure`, which task Reversal lacks"),
    ):
        assert run(["eval", model, *options]) == 1
        assert message in capsys.readouterr().err


def test_a_classifier_is_printed_class_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = heads.settings("classify", tmp_path)
    command = ["eval", str(train(config, quiet=True).model), "--data", str(config.validation)]
    evaluation = report(command, capsys)
    labels = [json.loads(line)["label"] for line in Path(str(config.validation)).read_text().splitlines()]
    assert [sum(row) for row in evaluation["confusion"]] == [
        labels.count(label) for label in evaluation["labels"]
    ]
    correct = sum(row[i] for i, row in enumerate(evaluation["confusion"]))
    assert evaluation["accuracy"] == pytest.approx(correct / len(labels))
    assert run(command) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for scored, row in zip(evaluation["classes"], evaluation["confusion"], strict=True):
        scores = [cell(scored[name]) for name in ("precision", "recall", "f1", "count")]
        assert [*scored["label"].split(), *scores] in printed
        assert [*scored["label"].split(), *map(str, row)] in printed


def test_records_of_a_limit_are_drawn_from_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The file is sorted by class, so its first records are all of one class."""
    config = heads.settings("classify", tmp_path)
    result = train(config, quiet=True)
    lines = Path(str(config.validation)).read_text().splitlines()
    lines.sort(key=lambda line: json.loads(line)["label"])
    (tmp_path / "sorted.jsonl").write_text("\n".join(lines) + "\n")
    command = [
        "eval",
        str(result.model),
        "--data",
        str(tmp_path / "sorted.jsonl"),
        "--limit",
        str(len(lines) // 4),
    ]
    evaluation = report(command, capsys)
    assert evaluation["records"] == len(lines) // 4
    assert all(scored["count"] for scored in evaluation["classes"])
