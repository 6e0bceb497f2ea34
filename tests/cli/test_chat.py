"""`headway chat`: replies on stdout, remarks on stderr, and a conversation that ends when its input does."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

import headway
from headway.checkpoints.saving import save_folder
from headway.cli import main, run
from headway.patterns import Causal, Sink, Window
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template


def chat(
    folder: str, lines: str, *arguments: str, capsys: pytest.CaptureFixture[str]
) -> tuple[list[str], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(lines))
        assert run(["chat", folder, "-n", "6", "-t", "0", *arguments]) == 0
    out, err = capsys.readouterr()
    return out, err


def test_a_talk_through_a_pipe(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    lm = headway.load(folder)
    first = lm.chat([{"role": "user", "content": "hello"}], max_new_tokens=6).text
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": first}]
    second = lm.chat([*messages, {"role": "user", "content": "and?"}], max_new_tokens=6).text
    out, err = chat(folder, "hello\n\nand?\n/reset\nhello\n/quit\nnever\n", capsys=capsys)
    assert out == f"{first}\n{second}\n{first}\n"
    assert "forgotten" in err
    system = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    out, _ = chat(folder, "hello", "--system", "be brief", capsys=capsys)
    assert out == lm.chat(system, max_new_tokens=6).text + "\n"


def test_a_turn_that_fails_is_forgotten(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone, _ = chat(folder, "hello\n", capsys=capsys)
    out, err = chat(folder, f"{'猫' * 600}\n/nonsense\nhello\n", capsys=capsys)
    assert out == alone
    assert "this message has 1211 tokens, but beside a reply only 506 fit in the context of 512" in err
    assert "--" not in err, "no option of another command"
    assert "unknown command /nonsense: /reset forgets the conversation" in err


def test_a_model_that_cannot_talk(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", bare]) == 1
    message = capsys.readouterr().err
    assert "chat all the same with --plain or --template NAME" in message
    assert f"continue a text with: headway generate {bare}" in message


def test_a_model_without_a_template_talks_all_the_same(bare: str, capsys: pytest.CaptureFixture[str]) -> None:
    """--plain is one text, a line for each turn, and a reply ends with its line; --template names a chat template."""
    lm = headway.load(bare)
    first = lm.generate("hello\n", max_new_tokens=6, stop=["\n"]).text
    second = lm.generate(f"hello\n{first}\nand?\n", max_new_tokens=6, stop=["\n"]).text
    out, _ = chat(bare, "hello\nand?\n", "--plain", capsys=capsys)
    assert out == f"{first}\n{second}\n"
    assert lm.tokenizer is not None
    lm.tokenizer = lm.tokenizer.with_chat_template("chatml")
    expected = lm.chat([{"role": "user", "content": "hello"}], max_new_tokens=6).text
    out, _ = chat(bare, "hello\n", "--template", "chatml", capsys=capsys)
    assert out == f"{expected}\n"
    assert run(["chat", bare, "--plain", "--template", "chatml"]) == 1
    assert "leave out one of --plain and --template" in capsys.readouterr().err


def turns(system: list[dict[str, str]], questions: list[str], replies: list[str]) -> list[dict[str, str]]:
    """Returns the messages of a conversation that has one reply fewer than questions."""
    messages = list(system)
    for question, reply in zip(questions, [*replies, None], strict=True):
        messages.append({"role": "user", "content": question})
        messages += [] if reply is None else [{"role": "assistant", "content": reply}]
    return messages


def latest(
    lm: headway.LanguageModel, questions: list[str], system: list[dict[str, str]], room: int
) -> tuple[list[str], int]:
    """Returns the model's replies to the latest turns that have room, and how many turns were forgotten."""
    render, replies, begin = lm.need_tokenizer().render_chat, list[str](), 0
    for count in range(1, len(questions) + 1):
        while len(render(turns(system, questions[begin:count], replies[begin:]))) > room:
            begin += 1
        messages = turns(system, questions[begin:count], replies[begin:])
        replies.append(lm.chat(messages, max_new_tokens=6, temperature=0, beyond_context=True).text)
    return replies, begin


@pytest.mark.parametrize("system", [None, "be brief"])
def test_a_full_context_forgets_the_oldest_turns_and_says_so(
    system: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reply is the model's to the system message and to the latest turns that have room."""
    save_folder(tmp_path / "m", small(context=160), tokenizer=with_template(byte_level(), TURNS))
    questions = [f"what is number {i}?" for i in range(9)]
    options = [] if system is None else ["--system", system]
    out, err = chat(str(tmp_path / "m"), "\n".join(questions), *options, capsys=capsys)
    system_messages = [] if system is None else [{"role": "system", "content": system}]
    replies, forgotten = latest(headway.load(tmp_path / "m"), questions, system_messages, 160 - 6)
    assert out == "".join(f"{reply}\n" for reply in replies)
    assert forgotten >= 4
    remarks = re.findall(
        r"the context of 160 tokens is full: the (?:(\d+) )?oldest turns? (?:is|are) forgotten", err
    )
    assert sum(int(count or 1) for count in remarks) == forgotten
    assert "error" not in err


@pytest.mark.parametrize(
    ("pattern", "ends"), [(Window.last(16), False), (Window.last(16) | (Causal() & Sink(2)), True)]
)
def test_where_all_layers_see_windows_nothing_is_forgotten(
    pattern: Any, ends: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_folder(tmp_path / "m", small(pattern, context=64), tokenizer=with_template(byte_level(), TURNS))
    questions = [f"number {i}?" for i in range(6)]
    out, err = chat(str(tmp_path / "m"), "\n".join(questions), capsys=capsys)
    replies, forgotten = latest(headway.load(tmp_path / "m"), questions, [], 64 - 6 if ends else 10_000)
    assert out == "".join(f"{reply}\n" for reply in replies)
    assert (forgotten > 0) == ("forgotten" in err) == ends


def test_new_tokens_that_leave_no_room_are_refused(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["chat", folder, "-n", "512"]) == 1
    message = "--max-new-tokens 512 leaves no room for a question in the 512 tokens of this model's context"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_no_utf_8_is_left_out(
    errors: str, folder: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With both ways in which a locale decodes such bytes: strict with UTF-8, surrogateescape in the C locale."""
    lines = b"caf\xe9\nhello \xc3\xa9\n"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="ascii", errors=errors))
    with pytest.raises(SystemExit) as end:
        main(["chat", folder, "-n", "6", "-t", "0"])
    assert end.value.code == 0
    out, err = capsys.readouterr()
    messages = [{"role": "user", "content": "hello é"}]
    assert out == headway.load(folder).chat(messages, max_new_tokens=6, temperature=0).text + "\n"
    assert "standard input: not UTF-8 at byte 3 (this line is skipped)" in err
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8", errors=errors))
    with pytest.raises(SystemExit):
        main(["generate", folder, "-n", "6"])
    assert "standard input: not UTF-8 at byte 3" in capsys.readouterr().err
