"""Conversations with a server: `headway chat --url`, and `headway run`."""

import io
from pathlib import Path

import pytest

from headway.cli import run
from headway.endpoints import ServerEndpoint
from headway.errors import EndpointError
from tests.endpoints.scripted import server
from tests.serve.conftest import House, serving, talker
from tests.serve.test_worker import engine_of, failing


def talks(lines: str, *arguments: str, code: int = 0) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO(lines))
        assert run([*arguments]) == code


def replies(*questions: str, system: str | None = None) -> str:
    """Returns the replies of `LanguageModel.chat`, a line for each turn."""
    lm, printed = talker(), ""
    messages = [] if system is None else [{"role": "system", "content": system}]
    for number, text in enumerate(questions, 1):
        messages.append({"role": "user", "content": text})
        options = {"max_new_tokens": 6, "temperature": 1.2, "seed": 2 * number, "top_k": 9}
        messages.append({"role": "assistant", "content": lm.chat(messages, **options).text})
        printed += messages[-1]["content"] + "\n"
    return printed


HOW = ["-n", "6", "-t", "1.2"]


def test_a_talk_with_a_server_is_that_with_its_model(
    house: House, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["chat", "--url", f"{house.url}/v1", *HOW, "--top-k", "9"]
    talks("hello\nand?\n/reset\n/quit\n", *command)
    out, err = capsys.readouterr()
    assert out == replies("hello", "and?")
    assert "forgotten" in err
    talks("hello\n", *command, "--system", "be brief")
    assert capsys.readouterr().out == replies("hello", system="be brief")
    talks("hello\n", "chat", "small", *command[1:])
    assert capsys.readouterr().out == replies("hello")


def test_what_a_server_cannot_be_told_is_refused(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--url", f"{house.url}/v1"]
    for flags, words in (
        (["--dtype", "bf16"], "--dtype is only for models that headway loads itself"),
        (["--plain"], "leave out --plain"),
        (["other"], "404 there is no model 'other'"),
    ):
        talks("hello\n", "chat", *flags, *url, code=0 if flags == ["other"] else 1)
        assert words in capsys.readouterr().err
    talks("", "chat", code=1)
    assert "name a model, or a server by --url" in capsys.readouterr().err


def test_a_stream_that_fails_or_breaks_off_is_no_reply() -> None:
    with serving() as house, failing(engine_of(house), RuntimeError(), after=4):
        pieces = ServerEndpoint(f"{house.url}/v1").stream([{"role": "user", "content": "x"}], max_tokens=50)
        with pytest.raises(EndpointError, match="internal server error"):
            "".join(pieces)
    broken = server(lambda path, body: (200, {}, b'data: {"choices": []}\n\n'))
    with broken as url, pytest.raises(EndpointError, match="ended before"):
        [*ServerEndpoint(url, "m").stream([])]
    with pytest.raises(EndpointError, match="refused"):
        [*ServerEndpoint("http://127.0.0.1:9/v1", "m").stream([])]


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ('{"error": {"message": "too long"}}', "too long"),
        ('{"error": "too long"}', "too long"),
        ('{"choices": [{}]}', "not a chunk of a chat completion"),
        ('{"choices": [{"delta": {"content": 1}}]}', "not a chunk"),
        ("[1]", "not a chunk"),
        ('{"choices":', "not a chunk"),
    ],
)
def test_an_event_that_is_none_is_an_error_of_the_endpoint(event: str, words: str) -> None:
    answer = server(lambda path, body: (200, {}, f"data:{event}\n\ndata: [DONE]\n\n".encode()))
    with answer as url, pytest.raises(EndpointError, match=words):
        [*ServerEndpoint(url, "m").stream([])]


def test_events_may_stand_behind_no_space_and_between_comments() -> None:
    events = b': waits\n\ndata:{"choices": [{"delta": {"content": "a"}}]}\n\nevent: x\ndata: [DONE]\n\n'
    with server(lambda path, body: (200, {}, events)) as url:
        assert "".join(ServerEndpoint(url, "m").stream([])) == "a"


def test_run_serves_and_talks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    talker().save(tmp_path / "mine")
    talks("hello\nand?\n", "run", str(tmp_path / "mine"), "-n", "6", "-t", "0")
    out, err = capsys.readouterr()
    lm = talker()
    first = lm.chat([{"role": "user", "content": "hello"}], max_new_tokens=6).text
    assert out.startswith(f"{first}\n")
    assert out.count("\n") == first.count("\n") + 2
    assert "mine is loaded" in err
    assert "#mine" in err  # the address for other programs
