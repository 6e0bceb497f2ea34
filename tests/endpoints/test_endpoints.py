"""Endpoints: the protocol, its errors, a folder as an endpoint; transcripts replay replies after a killed run."""

import json
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headway.api import LanguageModel
from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.endpoints import LocalEndpoint, Reply, ServerEndpoint, Transcript, open_endpoint
from headway.errors import ConfigError, DataError, EndpointError
from tests.endpoints.scripted import Answer, Scripted, completion, error, server
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import TURNS, with_template

ASKED: list[dict[str, str]] = [{"role": "user", "content": "the cat"}]
HOW = {"seed": 3, "temperature": 0.5, "max_tokens": 9}


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HEADWAY_API_KEY", "OPENAI_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)


def scripted(*answers: Answer) -> tuple[Any, list[tuple[str, Any]]]:
    remaining, requests = list(answers), []

    def answer(path: str, body: Any) -> Answer:
        requests.append((path, body))
        return remaining.pop(0)

    return answer, requests


def test_a_request_is_one_of_openais_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for OpenAI alone")
    answer, requests = scripted(completion("sat.", "length"), completion(None))
    with server(answer) as url:
        endpoint = open_endpoint(f"{url}#small")
        assert endpoint.chat(ASKED, **HOW) == Reply("sat.", "length")  # type: ignore[arg-type]
        monkeypatch.setenv("HEADWAY_API_KEY", "k")
        assert endpoint.chat(ASKED, **HOW) == Reply("", "stop")  # type: ignore[arg-type]
    assert endpoint.name == f"{url}#small"
    body = {"model": "small", "messages": ASKED, **HOW}
    assert requests[0] == ("/v1/chat/completions", {**body, "authorization": None})
    assert requests[1] == ("/v1/chat/completions", {**body, "authorization": "Bearer k"})


def test_a_server_with_one_model_need_not_be_told_which() -> None:
    answer, _ = scripted(
        (200, {}, {"data": [{"id": "only"}]}), (200, {}, {"data": [{"id": "b"}, {"id": "a"}]})
    )
    with server(answer) as url:
        assert open_endpoint(url).name.endswith("#only")
        with pytest.raises(EndpointError, match=r"has 2 models \(a, b\); name one: .*#MODEL"):
            open_endpoint(url)


def test_what_fails_for_now_is_tried_again_and_what_is_refused_is_not() -> None:
    waits: list[float] = []
    answer, requests = scripted(
        error(429, "slow down", Retry_After="7"), error(503, "busy"), error(500, "oops"), completion("ok")
    )
    with server(answer) as url:
        assert ServerEndpoint(url, "m", sleep=waits.append).chat(ASKED, **HOW).text == "ok"  # type: ignore[arg-type]
    assert waits == [7.0, 2.0, 4.0]
    refused = error(401, "wrong key"), error(404, "no such model"), error(501, "no chat here")
    answer, requests = scripted(*refused, *[error(500, "down")] * 2)
    with server(answer) as url:
        endpoint = ServerEndpoint(url, "m", sleep=waits.append, tries=2)
        for message in (
            "401 wrong key; the key is read from HEADWAY_API_KEY",
            "404 no such model; check the URL",
            "501 no chat here",
        ):
            with pytest.raises(EndpointError, match=message):
                endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]
        with pytest.raises(
            EndpointError,
            match=r"no reply after 2 tries; the last failed with: 500 down. Replies in a transcript are",
        ):
            endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]
    assert len(requests) == 5
    with pytest.raises(EndpointError, match=r"no reply after 2 tries; the last failed with: .*refused"):
        endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]


def test_each_failed_try_is_said_in_the_servers_words() -> None:
    messages: list[str] = []
    answer, _ = scripted(error(429, "slow down", Retry_After="7"), (503, {}, b"warming up"), completion("ok"))
    with server(answer) as url:
        endpoint = ServerEndpoint(url, "m", say=messages.append, sleep=lambda seconds: None)
        endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]
    assert messages == [
        f"{url}: 429 slow down; try 2 of 6 in 7 s",
        f"{url}: 503 warming up; try 3 of 6 in 2 s",
    ]
    del messages[:]
    endpoint = ServerEndpoint(url, "m", say=messages.append, sleep=lambda seconds: None, tries=3)
    with pytest.raises(EndpointError, match="refused"):
        endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]
    assert [line.partition("; ")[2] for line in messages] == ["try 2 of 3 in 1 s", "try 3 of 3 in 2 s"]
    assert all("refused" in line for line in messages)


def test_a_server_that_hangs_is_left_after_the_timeout() -> None:
    messages: list[str] = []
    release = threading.Event()

    def hangs(path: str, body: Any) -> Answer:
        release.wait(5)
        return completion("late")

    with server(hangs) as url:
        endpoint = ServerEndpoint(
            url, "m", timeout=0.05, tries=2, say=messages.append, sleep=lambda seconds: None
        )
        with pytest.raises(EndpointError, match=r"the last failed with: no answer within 0\.05 s"):
            endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]
        release.set()
    assert messages == [f"{url}: no answer within 0.05 s; try 2 of 2 in 1 s"]


def test_a_reply_without_text_says_why() -> None:
    """One model thinks until its tokens are used up, another one refuses."""
    messages: list[str] = []
    code, headers, body = completion(None, "length")
    body["choices"][0]["message"] |= {"reasoning_content": "Let me see", "tool_calls": []}
    _, _, refused = completion(None)
    refused["choices"][0]["message"]["refusal"] = "I will not."
    answer, _ = scripted((code, headers, body), (code, headers, refused))
    with server(answer) as url:
        endpoint = ServerEndpoint(url, "m", say=messages.append)
        assert endpoint.chat(ASKED, **HOW) == Reply("", "length")  # type: ignore[arg-type]
        assert endpoint.chat(ASKED, **HOW) == Reply("I will not.", "stop")  # type: ignore[arg-type]
    assert messages == [
        f"{url}#m: a reply without text: its finish_reason is length, and it has reasoning_content"
    ]


def test_a_timeout_is_of_servers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"timeout is for servers .*, and nowhere is not one"):
        open_endpoint("nowhere", timeout=3)
    for command in (
        ["instruct", "--seeds", "x", "-n", "3", "--endpoint", "m"],
        ["judge", "a", "b", "--questions", "q", "--by", "m"],
    ):
        assert run([*command, "--out", str(tmp_path / "x"), "--timeout", "3"]) == 1
        assert "--timeout is only for servers, and no server is given" in capsys.readouterr().err


def test_what_is_no_reply_is_said() -> None:
    answer, _ = scripted((200, {}, {"choices": []}), (200, {}, b"<html>"), (400, {}, b"plain words"))
    with server(answer) as url:
        endpoint = ServerEndpoint(url, "m")
        for message in (
            "the answer is not a chat completion: .*/v1",
            "the answer is not JSON",
            "400 plain words",
        ):
            with pytest.raises(EndpointError, match=message):
                endpoint.chat(ASKED, **HOW)  # type: ignore[arg-type]


def test_a_folder_is_an_endpoint(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", small(), tokenizer=with_template(byte_level(), TURNS))
    endpoint = open_endpoint(str(tmp_path / "m"))
    assert isinstance(endpoint, LocalEndpoint)
    reply = endpoint.chat(ASKED, seed=3, temperature=0.9, max_tokens=5)
    generation = endpoint.lm.chat(ASKED, seed=3, temperature=0.9, max_new_tokens=5)
    assert reply == Reply(generation.text, "length" if generation.finish_reason == "length" else "stop")
    model = small()
    model.spec = replace(model.spec, max_context=40)
    shorter = LocalEndpoint(LanguageModel(model, with_template(byte_level(), TURNS)), "shorter")
    for limited in (endpoint, shorter):  # to what the context has room for
        assert limited.chat(ASKED, seed=3, temperature=0.9, max_tokens=10**6)
    with pytest.raises(DataError, match="the model's context of 64 has no room for a reply"):
        endpoint.chat([{"role": "user", "content": "the cat " * 64}], seed=0, temperature=0, max_tokens=1)
    with pytest.raises(DataError, match="no chat template, so it cannot answer messages"):
        LocalEndpoint(LanguageModel(small(), byte_level()), "plain")


def fill(path: Path, endpoint: Scripted, count: int) -> list[Reply]:
    with Transcript(path) as transcript:
        return [
            transcript.chat(endpoint, f"{i}", [{"role": "user", "content": f"{i}"}], **HOW)
            for i in range(count)
        ]  # type: ignore[arg-type]


def echo(messages: Sequence[Any], seed: int) -> str:
    return f"{messages[-1]['content']}: naïve 🙂 \ud83d\n"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_run_that_was_killed_anywhere_goes_on_as_if_it_was_not(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "transcript.jsonl"
    path.unlink(missing_ok=True)
    replies = fill(path, Scripted(echo), 4)
    full = path.read_bytes()
    assert len(full.splitlines()) == 4
    cut = data.draw(st.integers(0, len(full)))
    path.write_bytes(full[:cut])
    resumed = Scripted(echo)
    assert fill(path, resumed, 4) == replies
    assert resumed.asked == 4 - full[:cut].count(b"\n")
    assert path.read_bytes() == full


def test_another_request_under_a_key_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    fill(path, Scripted(echo), 2)
    with pytest.raises(
        ConfigError,
        match=r"the request '0' differs from the one in the file: endpoint was 'scripted' and is 'b'; use",
    ):
        fill(path, Scripted(echo, "b"), 2)
    with Transcript(path) as transcript:
        with pytest.raises(ConfigError, match="its messages differ"):
            transcript.chat(Scripted(echo), "1", ASKED, **HOW)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="is in use by another process"):
            Transcript(path)


def test_a_file_that_is_no_transcript_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "transcript.jsonl"
    fill(path, Scripted(echo), 1)
    path.write_bytes(path.read_bytes() + json.dumps({"key": "x"}).encode() + b"\n")
    with pytest.raises(DataError, match=r"transcript.jsonl:2: not a line of a transcript: 'request'"):
        Transcript(path)


@pytest.mark.slow
def test_the_openai_client_and_ours_ask_and_read_alike() -> None:
    import openai

    answer, requests = scripted(completion("sat.", "length"), completion("sat.", "length"))
    with server(answer) as url, openai.OpenAI(base_url=url, api_key="k") as client:
        theirs = client.chat.completions.create(model="small", messages=ASKED, **HOW)  # type: ignore[call-overload]
        ours = ServerEndpoint(url, "small").chat(ASKED, **HOW)  # type: ignore[arg-type]
    assert (ours.text, ours.finish_reason) == (
        theirs.choices[0].message.content,
        theirs.choices[0].finish_reason,
    )
    (path, body), (our_path, our_body) = requests
    assert path == our_path
    assert {**body, "authorization": None} == our_body
