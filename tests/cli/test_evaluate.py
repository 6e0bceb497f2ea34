"""`headway eval` takes a text or tasks, not both."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch

from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.models import ModelSpec, build
from headway.text import train_bpe


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "eval needs either a text (--data FILE) or tasks (--harness TASK[,TASK])"),
        (["--data", "x", "--harness", "y"], "eval needs either"),
        (["--data", "x", "--shots", "2"], "--tasks, --shots, --chat and --batch-size are for --harness"),
        (["--data", "x", "--batch-size", "2"], "and --batch-size are for --harness"),
        (["--data", "x", "--dtype", "float32"], "no-such-folder does not exist"),
        (["--data", "x", "--dtype", "bfloat16"], "no-such-folder does not exist"),
        (["--harness", "y"], 'pip install "headway[harness]"'),
    ],
)
def test_what_eval_cannot_do_is_said_before_a_model_is_read(
    options: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "headway.integrations.lm_eval", raising=False)
    monkeypatch.delattr("headway.integrations.lm_eval", raising=False)
    assert run(["eval", "no-such-folder", *options]) == 1
    assert message in capsys.readouterr().err


WORDS = "one two three four five six seven " * 60


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 32 tokens of context and a text, in the working folder."""
    monkeypatch.chdir(tmp_path)
    tokenizer = train_bpe([WORDS], 280)
    spec = ModelSpec.of_depth(1, tokenizer.vocab_size, width=16, heads=2, kv_heads=1, trained_context=32)
    save_folder("m", build(spec, seed=0).eval(), tokenizer=tokenizer)
    Path("text.txt").write_text(WORDS, encoding="utf-8")
    return Path("m")


def test_rows_beyond_the_trained_length_are_named(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for context, beyond in (("32", False), ("48", True)):
        arguments = ["eval", str(model), "--data", "text.txt", "--dtype", "fp32", "--context", context]
        assert run([*arguments, "--limit", "40"]) == 0
        out, err = capsys.readouterr()
        assert ("rows of 48 tokens are longer than the 32 that this model was trained on" in err) == beyond
        assert "encoding text.txt ..." in err
        assert f"evaluating 40 tokens in rows of {context} ..." in err
        assert re.search(r"tokens +40\n", out)


@pytest.mark.parametrize("limit", [None, 1, 40, 41, 97, 5000])
def test_what_is_announced_is_what_is_scored(
    limit: int | None, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first token of each document is read but not scored, as nothing predicts it."""
    lines = [json.dumps({"text": WORDS[: 7 * n]}) + "\n" for n in (1, 9, 4, 30)]
    Path("text.jsonl").write_text("".join(lines), encoding="utf-8")
    arguments = ["eval", str(model), "--data", "text.jsonl", "--dtype", "fp32", "--json"]
    assert run([*arguments, *([] if limit is None else ["--limit", str(limit)])]) == 0
    out, err = capsys.readouterr()
    assert f"evaluating {json.loads(out)['tokens']} tokens in rows of 32 ..." in err


def test_weights_that_are_no_numbers_are_an_error(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from headway.checkpoints.restore import load_model

    broken = load_model(model)
    with torch.no_grad():
        broken.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    save_folder("broken", broken, tokenizer=train_bpe([WORDS], 280))
    assert run(["eval", "broken", "--data", "text.txt", "--dtype", "fp32"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert (
        "the loss on this text is nan: these weights are not finite: model.layers.0.mlp.down_proj.weight"
        in err
    )
