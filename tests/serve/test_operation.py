"""A server in operation: request ids, logs, metrics, readiness, input over the wire, shutdown."""

import json
import logging
import socket
import ssl
import time
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headway.serve import guard
from headway.serve.running import Lines
from headway.serve.visits import Key
from tests.serve.conftest import House, serving, settles
from tests.serve.operation import answer, asking, held, house_gate
from tests.serve.test_worker import LONG, engine_of

SECRET = "sesame-opens-this"


# -- request ids and logs ------------------------------------------------------------------------------


def test_an_answer_has_the_id_of_its_request(house: House) -> None:
    assert answer(house, X_Request_Id="mine-1")[1]["X-Request-Id"] == "mine-1"
    ids = {
        answer(house, X_Request_Id=unsuitable)[1]["X-Request-Id"]
        for unsuitable in ("", "a b", "x" * 200, '"\\')
    }
    assert len(ids) == 4
    assert all(len(name) == 32 for name in ids)
    for path, status in (("/v1/none", 404), ("/health", 405)):
        response = answer(house, path, X_Request_Id="mine-2")
        assert (response[0], response[1]["X-Request-Id"]) == (status, "mine-2")


def test_logs_are_lines_without_prompts_and_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="headway.serve")
    body = {"prompt": f"{SECRET} is my prompt", "max_tokens": 3, "user": SECRET}
    with serving(keys=[Key(SECRET, name="me")]) as house:
        answer(house, body=body, X_Api_Key=SECRET, X_Request_Id="r1")
        answer(house, body={**body, "model": SECRET}, X_Api_Key=SECRET)
        answer(house, body={**body, "temperature": SECRET}, X_Api_Key=SECRET)
        answer(house, f"/v1/{SECRET}", X_Api_Key=SECRET)
        answer(house, X_Api_Key=f"{SECRET}?")
        engine_of(house).reader.read = broken
        assert answer(house, body=body, X_Api_Key=SECRET)[0] == 500
        settles(lambda: not house.server.open)
        for path in ("/metrics", "/slots", "/props", "/v1/models"):
            status, _, content = answer(house, path, method="GET", X_Api_Key=SECRET)
            assert status == 200
            assert SECRET not in content.decode()
    lines = [Lines().format(record) for record in caplog.records]
    assert not [line for line in lines if SECRET in line]
    records = [json.loads(line) for line in lines]
    first = next(record for record in records if record.get("id") == "r1")
    assert (first["key"], first["route"], first["status"]) == ("me", "POST /v1/completions", 200)
    assert first["models"] == ["small"]
    assert first["new_tokens"] == 3
    assert [record["status"] for record in records if "status" in record] == [
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
    assert any(record.get("error") == "RuntimeError" for record in records)


def broken(*args: Any, **named: Any) -> Any:
    raise RuntimeError(f"a prompt: {SECRET}")


# -- metrics and readiness -----------------------------------------------------------------------------


def numbers(house: House) -> dict[tuple[str, str], float]:
    text = answer(house, "/metrics", method="GET")[2].decode()
    return {
        (sample.name, ",".join(label for _, label in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_are_what_answers_told() -> None:
    with serving() as house:
        usage = []
        for seed in range(3):
            body = {"prompt": [7] * 150, "max_tokens": 5, "n": 2, "seed": seed}
            usage.append(json.loads(answer(house, body=body)[2])["usage"])
        answer(house, body={"prompt": "x", "max_tokens": -1})
        settles(lambda: not house.server.open)
        samples = numbers(house)
        prompt, new = (sum(counts[f"{kind}_tokens"] for counts in usage) for kind in ("prompt", "completion"))
        cached = sum(counts["prompt_tokens_details"]["cached_tokens"] for counts in usage)
        assert samples["vllm:prompt_tokens_total", "small"] == prompt
        assert samples["vllm:generation_tokens_total", "small"] == new == 30
        assert samples["vllm:prefix_cache_queries_total", "small"] == prompt
        assert samples["vllm:prefix_cache_hits_total", "small"] == cached == 256
        assert samples["vllm:request_success_total", "length,small"] == 6
        assert samples["vllm:time_to_first_token_seconds_count", "small"] == 6
        assert samples["vllm:e2e_request_latency_seconds_count", "small"] == 6
        assert samples["vllm:inter_token_latency_seconds_count", "small"] == 24
        assert (
            samples["vllm:num_requests_running", "small"]
            == samples["vllm:num_requests_waiting", "small"]
            == 0
        )
        assert samples["vllm:kv_cache_usage_perc", "small"] == 0
        assert samples["headway_answers_total", "/v1/completions,200"] == 3
        assert samples["headway_answers_total", "/v1/completions,400"] == 1
        assert samples["headway_page_bytes", "small,kept"] > 0
        with held(house), asking(house, body=LONG):
            settles(lambda: numbers(house)["vllm:num_requests_running", "small"] == 1)
            house_gate(house)


def test_ready_once_each_model_has_been_checked() -> None:
    with serving() as house:
        engine, reads = engine_of(house), []
        read = engine.reader.read
        engine.reader.read = lambda *args, **kwargs: (reads.append(1), read(*args, **kwargs))[1]
        for _ in "12":
            status, _, body = answer(house, "/ready", method="GET")
            assert (status, json.loads(body)) == (200, {"status": "ready", "models": {"small": "loaded"}})
        assert len(reads) == 2  # once cold and once warm; the second request reads nothing
        assert house.used() == 0


def test_a_model_that_finds_nothing_again_is_not_ready() -> None:
    with serving() as house:
        engine = engine_of(house)
        original = engine.reader.open
        engine.reader.open = lambda ids, adapters, shares, salt: original(ids, adapters, False, salt)
        status, _, body = answer(house, "/ready", method="GET")
        assert status == 503
        assert "is not found in the prefix cache" in json.loads(body)["error"]["message"]


# -- what comes over the wire --------------------------------------------------------------------------


def raw(house: House, *parts: bytes, wait: float = 0.0) -> bytes:
    """Sends bytes in parts; returns what the server answers until it closes the connection."""
    address = urlsplit(house.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        received = b""
        try:
            for part in parts:
                connection.sendall(part)
                time.sleep(wait)
            while chunk := connection.recv(1 << 16):
                received += chunk
        except ConnectionError:
            pass
        return received


def test_heads_are_bounded_while_they_come(house: House) -> None:
    endless = [b"GET /health HTTP/1.1\r\n", *[b"x-%d: %s\r\n" % (i, b"y" * 4000) for i in range(40)]]
    for parts in (endless, [b"GET /" + b"a" * 300_000]):
        assert raw(house, *parts)[:12] in (b"HTTP/1.1 431", b"")  # at once, without waiting for the rest
    assert raw(house, b"".join([*endless, b"host: x\r\n\r\n"])).startswith(b"HTTP/1.1 431")
    assert answer(house)[0] == 200


def test_heads_and_bodies_come_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "PATIENCE", 0.1)
    monkeypatch.setattr("headway.serve.running.PATIENCE", 0.1)
    with serving() as house:
        assert raw(house, b"POST /v1/comp") == b""  # closed without an answer
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        assert raw(house, head + b"Content-Length: 100\r\nConnection: close\r\n\r\n{").startswith(
            b"HTTP/1.1 408"
        )
        settles(lambda: not house.server.open)


def test_bodies_of_many_pieces_are_refused_before_they_are_read(house: House) -> None:
    for values, mark in (([0] * 300_000, ","), ([[]] * 70_000, "["), ([{}] * 70_000, "{")):
        status, _, body = answer(house, body={"prompt": "x", "z": values})
        message = f"of {mark!r}; send less"
        assert (status, message in json.loads(body)["error"]["message"]) == (413, True)


def test_pages_of_other_origins_ask_where_they_may(house: House) -> None:
    headers_of_request = {"Origin": "https://a.example", "Access_Control_Request_Method": "POST"}
    assert answer(house, method="OPTIONS", **headers_of_request)[1]["Access-Control-Allow-Origin"] is None
    with serving(cors=["https://a.example"], keys=[Key("k")]) as open_house:
        status, headers, _ = answer(open_house, method="OPTIONS", **headers_of_request)
        assert (status, headers["Access-Control-Allow-Origin"]) == (200, "https://a.example")
        of_other_origin = {**headers_of_request, "Origin": "https://b.example"}
        assert (
            answer(open_house, method="OPTIONS", **of_other_origin)[1]["Access-Control-Allow-Origin"] is None
        )
        assert answer(open_house, Origin="https://a.example", X_Api_Key="k")[0] == 200


# -- its end -------------------------------------------------------------------------------------------


def test_it_ends_when_what_is_being_written_is_done() -> None:
    with serving() as house:
        expected = json.loads(answer(house, body=LONG)[2])["choices"]
        with held(house), asking(house, body=LONG) as answers:
            house.listener.drain()
            status, headers, body = answer(house)
            assert (status, headers["Retry-After"]) == (503, "1")
            assert "is shutting down" in json.loads(body)["error"]["message"]
            assert answer(house, "/ready", method="GET")[0] == 503
            assert answer(house, "/health", method="GET")[0] == 200
            house_gate(house)
        assert answers[0][0] == 200
        assert json.loads(answers[0][2])["choices"] == expected
        settles(lambda: house.listener.should_exit)


def test_it_does_not_wait_for_ever() -> None:
    with serving(listener={"patience": 0.1}) as house, held(house), asking(house, body=LONG) as answers:
        house.listener.drain()
        settles(lambda: house.listener.should_exit)
        settles(lambda: bool(answers) or not house.server.open)


CERTIFICATE = Path(__file__).with_name("localhost.pem")
"""A certificate of this machine, signed by itself; made by `openssl req -x509`."""


def test_it_answers_over_tls() -> None:
    files = {"ssl_certfile": str(CERTIFICATE), "ssl_keyfile": str(CERTIFICATE)}
    with serving(listener=files) as house:
        assert house.url.startswith("https://127.0.0.1:")
        context = ssl.create_default_context(cafile=str(CERTIFICATE))
        with urlopen(f"{house.url}/health", timeout=10, context=context) as response:
            assert json.load(response) == {"status": "ok"}
        with pytest.raises(URLError, match="CERTIFICATE_VERIFY_FAILED"):
            urlopen(f"{house.url}/health", timeout=10)
