"""Trained encoder heads: models and commands give the measures of the log, and `transformers` loads the models."""

import json
import shlex
from typing import Any

import pytest
from transformers import AutoModel

import headway
from headway.cli import run
from headway.metrics import accuracy, entity_f1, squad_exact
from headway.train import train
from tests.train.heads import DATA, settings

TASKS = list(DATA)
pytestmark = pytest.mark.filterwarnings("ignore:train_words")  # the corpora have few words


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns one run of each task, long enough to learn its data."""
    folder = tmp_path_factory.mktemp("heads")
    steps = {"answer": 150}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headway.train.tasks.rows.gemm_peak", lambda dtype: 1e12)
        return {
            task: train(settings(task, folder / task, steps=steps.get(task, 40), batch=32), quiet=True)
            for task in TASKS
        }


def held(result: Any) -> list[dict[str, Any]]:
    lines = (result.out.parent / "held.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def last(result: Any) -> dict[str, Any]:
    """Returns the evaluation after the last step from metrics.jsonl."""
    lines = [json.loads(line) for line in result.metrics.read_text().splitlines()]
    return next(line for line in reversed(lines) if "val_loss" in line)


def test_a_trained_classifier_is_as_right_as_the_log_says(trained: dict[str, Any]) -> None:
    result = trained["classify"]
    model = headway.load(result.model, task="classify")
    records = held(result)
    texts = [r["text"] if "text" in r else (r["text_a"], r["text_b"]) for r in records]
    labels = [row[0].label for row in model.classify(texts)]
    assert model.spec.head.labels == ("new york", "oslo", "rome")
    assert last(result)["val_accuracy"] == accuracy([r["label"] for r in records], labels) > 0.9
    assert result.validation.metrics["accuracy"] == last(result)["val_accuracy"]
    assert result.accuracy is not None


def test_a_trained_tagger_is_as_right_as_the_log_says(trained: dict[str, Any]) -> None:
    result = trained["tag"]
    model = headway.load(result.model, task="tag")
    expected, predicted = [], []
    for record in held(result):
        text = " ".join(record["tokens"])
        tags = ["O"] * len(record["tokens"])
        for span in model.tag(text):
            first, stop = text[: span.start].count(" "), text[: span.end].count(" ") + 1
            tags[first:stop] = [f"B-{span.label}", *[f"I-{span.label}"] * (stop - first - 1)]
        predicted.append(tags)
        expected.append(record["ner_tags"])
    assert last(result)["val_f1"] == pytest.approx(entity_f1(expected, predicted))
    assert last(result)["val_f1"] > 0.9


def test_a_trained_answerer_is_as_right_as_the_log_says(trained: dict[str, Any]) -> None:
    result = trained["answer"]
    model = headway.load(result.model, task="answer")
    exact = [
        squad_exact([r["answers"][0]["text"]], model.answer(r["question"], r["context"], stride=8)[0].text)
        for r in held(result)
    ]
    assert last(result)["val_exact"] == pytest.approx(sum(exact) / len(exact))
    assert last(result)["val_exact"] > 0.7
    assert last(result)["val_f1"] >= last(result)["val_exact"]


def test_row_90_a_trained_embedder_ranks_triplets(trained: dict[str, Any]) -> None:
    """The triplets have the form of CAIL2019-SCM: A, B, C, and which of B and C is more like A."""
    result = trained["embed"]
    model = headway.load(result.model, task="embed")
    correct = []
    for record in held(result):
        a, b, c = model.embed([record[name] for name in "ABC"])
        correct.append(("B" if a @ b > a @ c else "C") == record["label"])
    assert last(result)["val_accuracy"] == pytest.approx(sum(correct) / len(correct))
    assert last(result)["val_accuracy"] > 0.9


@pytest.mark.parametrize("task", TASKS)
def test_transformers_loads_what_was_trained(task: str, trained: dict[str, Any]) -> None:
    result = trained[task]
    assert result.transformers == "loads it"
    config = json.loads((result.model / "config.json").read_text())
    assert type(AutoModel.from_pretrained(result.model)).config_class.model_type == config["model_type"]


@pytest.mark.parametrize("task", TASKS)
def test_the_next_command_is_one(task: str, trained: dict[str, Any]) -> None:
    assert run(shlex.split(trained[task].next_command)[1:]) == 0


@pytest.mark.parametrize("task", TASKS)
def test_eval_measures_what_the_log_says(
    task: str, trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    result = trained[task]
    records = str(result.out.parent / "held.jsonl")
    command = ["eval", str(result.model), "--data", records, "--dtype", "fp32", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    for name, value in last(result).items():
        if name != "step":
            assert report[name.removeprefix("val_")] == pytest.approx(value, rel=1e-5)
    assert run([*command, "--limit", "5"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["loss"] != pytest.approx(report["loss"], rel=1e-5)
    assert f"5 of {len(held(result))} records are measured, drawn by a fixed seed\n" in err


def test_eval_reads_records_with_a_head_for_them_only(
    trained: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model, records = str(trained["classify"].model), str(trained["tag"].out.parent / "held.jsonl")
    assert run(["eval", model, "--data", records]) == 1
    assert "held.jsonl:1: this record is Tagged" in capsys.readouterr().err
    short = ["eval", model, "--data", str(trained["classify"].out.parent / "held.jsonl"), "--context", "8"]
    assert run(short) == 1
    assert (
        "tokens do not fit context 8; raise context, or cut off such texts (too_long=cut)"
        in capsys.readouterr().err
    )
    assert run([*short, "too_long=cut"]) == 0
    assert "texts are cut to 8 tokens" in capsys.readouterr().err
