"""A server in operation: keys and their limits, request ids, logs, metrics, readiness, its end."""

import http.client
import json
import logging
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.checkpoints.adapters import save_adapter
from headway.errors import ConfigError
from headway.nn import Adapter, Lora
from headway.serve import guard, visits
from headway.serve.running import Lines
from headway.serve.visits import Key, read_keys
from tests.serve.conftest import House, serving, talker
from tests.serve.encoders import encoder, serving_encoders, words
from tests.serve.test_guard import BODY
from tests.serve.test_worker import LONG, engine_of, settles

SECRET = "sesame-opens-this"


def answer(
    house: House, path: str = "/v1/completions", body: Any = BODY, method: str = "POST", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    address = urlsplit(house.url)
    there = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    given = {"Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    there.request(method, path, json.dumps(body) if method == "POST" else None, given)
    response = there.getresponse()
    told = response.status, response.headers, response.read()
    there.close()
    return told


@contextmanager
def held(house: House) -> Iterator[None]:
    """While open, no step of the engine ends."""
    engine, gate = engine_of(house), threading.Event()
    whole = engine.reader.read

    def read(*args: Any, **named: Any) -> Any:
        gate.wait(20)
        return whole(*args, **named)

    engine.reader.read = read
    try:
        yield
    finally:
        gate.set()
        engine.reader.read = whole


@contextmanager
def asking(house: House, **how: Any) -> Iterator[list[Any]]:
    """A request that is asked beside what follows, and its answer behind it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(answer(house, **how)))
    before = len(house.server.open)
    thread.start()
    settles(lambda: len(house.server.open) > before)
    yield found
    thread.join()


# -- keys ----------------------------------------------------------------------------------------------


def test_a_key_has_so_many_requests_at_once() -> None:
    keys = [Key("few", requests=1), Key("many")]
    with serving(keys=keys) as house:
        with held(house), asking(house, X_Api_Key="few") as first:
            status, headers, body = answer(house, X_Api_Key="few")
            assert (status, headers["Retry-After"]) == (429, "1")
            assert json.loads(body)["error"]["type"] == "rate_limit_error"
            with asking(house, X_Api_Key="many") as other:
                house_gate(house)
        assert first[0][0] == other[0][0] == 200
        assert answer(house, X_Api_Key="few")[0] == 200
        assert keys[0].live == keys[1].live == 0


def house_gate(house: House) -> None:
    """Lets the steps go on that `held` holds."""
    engine_of(house).reader.read.__closure__[0].cell_contents.set()


def test_a_key_has_so_many_tokens_in_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [1000.0]
    monkeypatch.setattr(visits.time, "monotonic", lambda: clock[0])
    key = Key("k", tokens=60, _at=1000.0)
    with key.asking():
        pass
    key.spend(90)
    with pytest.raises(visits.Busy) as told, key.asking():
        pass
    assert told.value.again == 31
    clock[0] += 31
    with key.asking():
        pass
    key.spend(30)
    clock[0] += 3600
    key.spend(0)
    assert key._used == 0  # what was not used is not saved


def test_tokens_that_were_read_and_written_are_paid_for() -> None:
    key = Key("k", tokens=20)
    with serving(keys=[key]) as house:
        assert answer(house, body={"prompt": [5] * 15, "max_tokens": 9, "n": 2}, X_Api_Key="k")[0] == 200
        settles(lambda: key._used > 30)
        status, headers, _ = answer(house, X_Api_Key="k")
        assert status == 429
        assert int(headers["Retry-After"]) > 20


def test_what_encoders_read_is_paid_for(tmp_path: Path) -> None:
    key, model = Key("k"), encoder("embedder", words(tmp_path))
    with serving_encoders({"embedder": model}, keys=[key]) as house:
        status, _, body = answer(house, "/v1/embeddings", body={"input": "the cat sat"}, X_Api_Key="k")
        assert status == 200
        settles(lambda: key._used == json.loads(body)["usage"]["prompt_tokens"] > 0)
        place = house.models.places["embedder"]
        assert place.size == sum(p.nbytes for p in model.model.parameters())


def test_no_key_can_tell_what_another_asked() -> None:
    asked = {"prompt": [9] * 200, "max_tokens": 1}
    with serving(keys=[Key("a"), Key("b")]) as house:
        cached = []
        for key in ("a", "a", "b", "b"):
            told = json.loads(answer(house, body=asked, X_Api_Key=key)[2])
            cached.append(told["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 192, 0, 192]


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n\none name=me requests=2 tokens=100  # a remark\ntwo admin\n")
    one, two = read_keys(path)
    assert (one.secret, one.name, one.requests, one.tokens, one.admin) == ("one", "me", 2, 100, False)
    assert (two.secret, two.requests, two.tokens, two.admin) == ("two", None, None, True)
    for text in ("", "# none\n", "one reqests=2", "one requests=many", "one tokens=0", "one two"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_keys(path)


# -- request ids and logs ------------------------------------------------------------------------------


def test_an_answer_has_the_id_of_its_request(house: House) -> None:
    assert answer(house, X_Request_Id="mine-1")[1]["X-Request-Id"] == "mine-1"
    made = {answer(house, X_Request_Id=bad)[1]["X-Request-Id"] for bad in ("", "a b", "x" * 200, '"\\')}
    assert len(made) == 4
    assert all(len(name) == 32 for name in made)
    for path, status in (("/v1/none", 404), ("/health", 405)):
        told = answer(house, path, X_Request_Id="mine-2")
        assert (told[0], told[1]["X-Request-Id"]) == (status, "mine-2")


def test_logs_are_lines_without_prompts_and_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway.serve")
    asked = {"prompt": f"{SECRET} is my prompt", "max_tokens": 3, "user": SECRET}
    with serving(keys=[Key(SECRET, name="me")]) as house:
        answer(house, body=asked, X_Api_Key=SECRET, X_Request_Id="r1")
        answer(house, body={**asked, "model": SECRET}, X_Api_Key=SECRET)
        answer(house, body={**asked, "temperature": SECRET}, X_Api_Key=SECRET)
        answer(house, f"/v1/{SECRET}", X_Api_Key=SECRET)
        answer(house, X_Api_Key=f"{SECRET}?")
        engine_of(house).reader.read = broken
        assert answer(house, body=asked, X_Api_Key=SECRET)[0] == 500
        settles(lambda: not house.server.open)
        for path in ("/metrics", "/slots", "/props", "/v1/models"):
            status, _, said = answer(house, path, method="GET", X_Api_Key=SECRET)
            assert status == 200
            assert SECRET not in said.decode()
    lines = [Lines().format(record) for record in caplog.records]
    assert not [line for line in lines if SECRET in line]
    told = [json.loads(line) for line in lines]
    first = next(one for one in told if one.get("id") == "r1")
    assert (first["key"], first["route"], first["status"]) == ("me", "POST /v1/completions", 200)
    assert first["models"] == ["small"]
    assert first["new_tokens"] == 3
    assert [one["status"] for one in told if "status" in one] == [
        200,
        404,
        400,
        404,
        401,
        500,
        200,
        200,
        200,
        200,
    ]
    assert any(one.get("error") == "RuntimeError" for one in told)


def broken(*args: Any, **named: Any) -> Any:
    raise RuntimeError(f"a prompt: {SECRET}")


# -- metrics and readiness -----------------------------------------------------------------------------


def numbers(house: House) -> dict[tuple[str, str], float]:
    text = answer(house, "/metrics", method="GET")[2].decode()
    return {
        (sample.name, ",".join(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_what_answers_told() -> None:
    with serving() as house:
        usage = []
        for seed in range(3):
            asked = {"prompt": [7] * 150, "max_tokens": 5, "n": 2, "seed": seed}
            usage.append(json.loads(answer(house, body=asked)[2])["usage"])
        answer(house, body={"prompt": "x", "max_tokens": -1})
        settles(lambda: not house.server.open)
        found = numbers(house)
        prompt, new = (sum(one[f"{kind}_tokens"] for one in usage) for kind in ("prompt", "completion"))
        cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usage)
        assert found["vllm:prompt_tokens_total", "small"] == prompt
        assert found["vllm:generation_tokens_total", "small"] == new == 30
        assert found["vllm:prefix_cache_queries_total", "small"] == prompt
        assert found["vllm:prefix_cache_hits_total", "small"] == cached == 256
        assert found["vllm:request_success_total", "length,small"] == 6
        assert found["vllm:time_to_first_token_seconds_count", "small"] == 6
        assert found["vllm:e2e_request_latency_seconds_count", "small"] == 6
        assert found["vllm:inter_token_latency_seconds_count", "small"] == 24
        assert found["vllm:num_requests_running", "small"] == found["vllm:num_requests_waiting", "small"] == 0
        assert found["vllm:kv_cache_usage_perc", "small"] == 0
        assert found["headway_answers_total", "/v1/completions,200"] == 3
        assert found["headway_answers_total", "/v1/completions,400"] == 1
        assert found["headway_page_bytes", "small,kept"] > 0
        with held(house), asking(house, body=LONG):
            settles(lambda: numbers(house)["vllm:num_requests_running", "small"] == 1)
            house_gate(house)


def test_ready_once_each_model_has_been_checked() -> None:
    with serving() as house:
        engine, reads = engine_of(house), []
        whole = engine.reader.read
        engine.reader.read = lambda *args, **named: (reads.append(1), whole(*args, **named))[1]
        for _ in "12":
            status, _, body = answer(house, "/ready", method="GET")
            assert (status, json.loads(body)) == (200, {"status": "ready", "models": {"small": "loaded"}})
        assert len(reads) == 2  # cold and warm, and never again
        assert house.used() == 0


def test_a_model_that_finds_nothing_again_is_not_ready() -> None:
    with serving() as house:
        engine = engine_of(house)
        whole = engine.reader.open
        engine.reader.open = lambda ids, adapters, shares, salt: whole(ids, adapters, False, salt)
        status, _, body = answer(house, "/ready", method="GET")
        assert status == 503
        assert "is not found by the same prompt" in json.loads(body)["error"]["message"]


# -- what comes over the wire --------------------------------------------------------------------------


def raw(house: House, *parts: bytes, wait: float = 0.0) -> bytes:
    """What the server says to bytes that are sent in parts, to the end."""
    address = urlsplit(house.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as there:
        said = b""
        try:
            for part in parts:
                there.sendall(part)
                time.sleep(wait)
            while more := there.recv(1 << 16):
                said += more
        except ConnectionError:
            pass
        return said


def test_heads_are_bounded_while_they_come(house: House) -> None:
    endless = [b"GET /health HTTP/1.1\r\n", *[b"x-%d: %s\r\n" % (i, b"y" * 4000) for i in range(40)]]
    for parts in (endless, [b"GET /" + b"a" * 300_000]):
        assert raw(house, *parts)[:12] in (b"HTTP/1.1 431", b"")  # at once: more is not waited for
    assert raw(house, b"".join([*endless, b"host: x\r\n\r\n"])).startswith(b"HTTP/1.1 431")
    assert answer(house)[0] == 200


def test_heads_and_bodies_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.1)
    monkeypatch.setattr("headway.serve.running.PATIENCE", 0.1)
    with serving() as house:
        assert raw(house, b"POST /v1/comp") == b""  # closed, without a word
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        assert raw(house, head + b"Content-Length: 100\r\nConnection: close\r\n\r\n{").startswith(
            b"HTTP/1.1 408"
        )
        settles(lambda: not house.server.open)


def test_bodies_of_many_pieces_are_refused_before_they_are_read(house: House) -> None:
    for many, mark in (([0] * 300_000, ","), ([[]] * 70_000, "["), ([{}] * 70_000, "{")):
        status, _, body = answer(house, body={"prompt": "x", "z": many})
        told = f"the body has {mark} more than"
        assert (status, told in json.loads(body)["error"]["message"]) == (413, True)


def test_pages_of_other_origins_ask_where_they_may(house: House) -> None:
    asked = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    assert answer(house, method="OPTIONS", **asked)[1]["Access-Control-Allow-Origin"] is None
    with serving(cors=["https://a.example"], keys=[Key("k")]) as open_house:
        status, headers, _ = answer(open_house, method="OPTIONS", **asked)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://a.example")
        other = {**asked, "Origin": "https://b.example"}
        assert answer(open_house, method="OPTIONS", **other)[1]["Access-Control-Allow-Origin"] is None
        assert answer(open_house, Origin="https://a.example", X_Api_Key="k")[0] == 200


def test_admin_verbs_need_an_admin(house: House) -> None:
    asked = {"lora_name": "x", "lora_path": "/nowhere"}
    verbs = "load_lora_adapter", "unload_lora_adapter"
    for path in (f"/v1/{verb}" for verb in verbs):
        assert answer(house, path.removeprefix("/v1"), body=asked)[0] in (403, 404)
        body = asked if path.endswith("/load_lora_adapter") else {"lora_name": "x"}
        assert answer(house, path, body=body)[0] == 403
        with serving(keys=[Key("user"), Key("boss", admin=True)]) as keyed:
            assert answer(keyed, path, body=body)[0] == 401
            assert answer(keyed, path, body=body, X_Api_Key="user")[0] == 403
            assert answer(keyed, path, body=body, X_Api_Key="boss")[0] in (404, 503)


# -- its end -------------------------------------------------------------------------------------------


def test_it_ends_when_what_is_being_written_is_done() -> None:
    with serving() as house:
        expected = json.loads(answer(house, body=LONG)[2])["choices"]
        with held(house), asking(house, body=LONG) as found:
            house.listener.drain()
            status, headers, body = answer(house)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "ends" in json.loads(body)["error"]["message"]
            assert answer(house, "/ready", method="GET")[0] == 503
            assert answer(house, "/health", method="GET")[0] == 200
            house_gate(house)
        assert found[0][0] == 200
        assert json.loads(found[0][2])["choices"] == expected
        settles(lambda: house.listener.should_exit)


def test_it_does_not_wait_for_ever() -> None:
    with serving(listener={"patience": 0.1}) as house, held(house), asking(house, body=LONG) as found:
        house.listener.drain()
        settles(lambda: house.listener.should_exit)
        settles(lambda: bool(found) or not house.server.open)


CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""Of this machine, signed by itself; made by `openssl req -x509`."""


def test_it_answers_over_tls() -> None:
    files = {"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(CERTIFICATE)}
    with serving(listener=files) as house:
        assert house.url.startswith("https://127.0.0.1:")
        known = ssl.create_default_context(cafile=str(CERTIFICATE))
        with urlopen(f"{house.url}/health", timeout=10, context=known) as told:
            assert json.load(told) == {"status": "ok"}
        with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urlopen(f"{house.url}/health", timeout=10)


@contextmanager
def command(*arguments: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`headway serve ...` as a process of its own, and the address that it says."""
    asked = [sys.executable, "-m", "headway", "serve", *map(str, arguments), "--port", "0"]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        said = []
        for line in process.stderr:
            said.append(line)
            if line.startswith("listening: "):
                break
        try:
            yield process, "".join(said)
        finally:
            process.kill()


def api(said: str) -> str:
    """The address of the protocol, in what the command has said."""
    return said.splitlines()[-1].removeprefix("listening: ").partition(",")[0] + "/v1"


def streams(url: str, **more: Any) -> Iterator[str]:
    """Lines of a stream."""
    body = {"prompt": "go on", "max_tokens": 400, "seed": 1, "stream": True, **more}
    request = Request(f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    request.add_header("X-Api-Key", "boss")
    with urlopen(request, timeout=30) as told:
        for line in told:
            yield line.decode().strip()


@pytest.mark.slow
def test_the_command_loads_says_drains_and_logs(tmp_path: Path) -> None:
    lm = talker()
    lm.save(tmp_path / "small")
    (tmp_path / "bad").mkdir()
    fresh = Adapter.fresh(lm.model, Lora(rank=2, alpha=4))
    save_adapter(tmp_path / "adapter", fresh, lm.spec)
    (tmp_path / "keys").write_text("boss name=me admin\n")
    places = [tmp_path / "small", tmp_path / "bad", "--alias", f"mine={tmp_path / 'small'}"]
    more = ["--adapter", f"tuned={tmp_path / 'adapter'}", "--keys", tmp_path / "keys", "--memory", "2"]
    more += ["--prefixes", tmp_path / "kept"]
    with command(*places, *more, "--ttl", "60", "--log", tmp_path / "log") as (process, said):
        assert "mine is loaded" in said
        assert "bad cannot be loaded" in said
        url = api(said)
        with urlopen(f"{url}/models", timeout=10) as told:
            states = {one["id"]: one["state"] for one in json.load(told)["data"]}
        assert states == {"mine": "loaded", "bad": "failed", "tuned": "loaded"}
        lines = []
        for line in streams(url, model="tuned"):
            if not lines:
                process.send_signal(signal.SIGTERM)
            lines.append(line)
        assert "data: [DONE]" in lines
        assert process.wait(30) == 0
    assert len([*(tmp_path / "kept").glob("*/pages.safetensors")]) == 1
    told = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert told[-1]["models"] == ["tuned"]
    assert (told[-1]["status"], told[-1]["new_tokens"], told[-1]["key"]) == (200, 400, "me")


@pytest.mark.slow
def test_a_second_signal_ends_the_command_at_once(tmp_path: Path) -> None:
    talker().save(tmp_path / "small")
    with command(tmp_path / "small", "--on-demand") as (process, said):
        lines = streams(api(said), max_tokens=500)
        next(lines)
        process.send_signal(signal.SIGINT)
        time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert process.wait(2) == -signal.SIGINT
        assert "data: [DONE]" not in [*lines]


@pytest.mark.slow
def test_the_command_refuses_what_cannot_be(tmp_path: Path) -> None:
    for arguments, reason in (
        ([tmp_path / "none"], "none cannot be loaded"),
        ([tmp_path, "--tls-cert", "x"], "go together"),
        ([tmp_path, "--host", "0.0.0.0"], "--without-key"),
        ([tmp_path, "--alias", "x"], "write NAME=MODEL"),
    ):
        with command(*arguments) as (process, said):
            assert reason in said
            assert process.wait(30) == 1
