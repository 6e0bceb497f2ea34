"""`headway eval`: a text or tasks, one of them."""

import sys

import pytest

from headway.cli import run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "eval needs a text (--data FILE) or tasks (--harness TASK[,TASK]), one of them"),
        (["--data", "x", "--harness", "y"], "one of them"),
        (["--data", "x", "--shots", "2"], "--tasks, --shots, --chat and --batch-size are for --harness"),
        (["--data", "x", "--batch-size", "2"], "and --batch-size are for --harness"),
        (["--data", "x", "--dtype", "int3"], "--dtype int3: auto, bf16 and fp32 are known"),
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
