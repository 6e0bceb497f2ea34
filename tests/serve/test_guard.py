"""Who may send requests, and which: attacks on a server that runs on one's own machine."""

import json
from typing import Any

import pytest

from tests.serve.conftest import BODY, House, answer, serving


def ask(
    house: House, path: str = "/v1/completions", body: Any = BODY, method: str = "POST", **headers: str
) -> tuple[int, dict[str, Any]]:
    status, _, content = answer(house, path, body, method, **headers)
    return status, json.loads(content)


def test_a_page_elsewhere_that_calls_itself_this_machine_is_refused() -> None:
    with serving(hosts=("localhost", "127.0.0.1", "[::1]")) as house:
        status, response = ask(house, Host="evil.example:8080")
        assert (status, response["error"]["type"]) == (403, "invalid_request_error")
        for host in ("localhost:1", "127.0.0.1", "[::1]:99"):
            assert ask(house, Host=host)[0] == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_forms_of_other_pages_are_refused(house: House, kind: str) -> None:
    assert ask(house, Content_Type=kind)[0] == 400


def test_bodies_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headway.serve.guard.MOST_BYTES", 1000)
    with serving() as house:
        assert ask(house, body={**BODY, "prompt": "x" * 2000})[0] == 413
        assert ask(house)[0] == 200


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"nul", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 60_000])
def test_what_is_no_json_is_said(house: House, body: bytes) -> None:
    status, response = ask(house, body=body)
    assert (status, response["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize(
    "more",
    [
        {"n": 1000},
        {"stop": ["x"] * 17},
        {"logit_bias": {str(i): 1 for i in range(1025)}},
        {"logprobs": 21},
        {"max_tokens": 10**12},
        {"prompt": [[5]] * 100_000},
    ],
)
def test_numbers_are_bounded(house: House, more: dict[str, Any]) -> None:
    status, response = ask(house, body={**BODY, **more})
    assert (status in (400, 413), response["error"]["type"]) == (True, "invalid_request_error")


def test_a_key_is_needed_where_there_are_keys() -> None:
    with serving(keys=["one", "two"]) as house:
        for headers in ({}, {"Authorization": "Bearer thr"}, {"X_Api_Key": "on"}):
            status, response = ask(house, **headers)
            assert (status, response["error"]["type"]) == (401, "authentication_error")
        assert ask(house, Authorization="Bearer two")[0] == ask(house, X_Api_Key="one")[0] == 200
        assert ask(house, "/v1/models", method="GET")[0] == ask(house, "/health", method="GET")[0] == 200


def test_no_more_than_may_wait_are_taken() -> None:
    with serving(most=0) as house:
        status, response = ask(house)
        assert (status, response["error"]["type"]) == (429, "rate_limit_error")


def test_there_is_no_other_path(house: House) -> None:
    for path in ("/v1/complete", "/../etc/passwd", "/docs/%2e%2e/x"):
        assert ask(house, path)[0] == 404
    assert ask(house, method="GET")[0] == 405
