"""Patterns over HTTP: the answers are those of `headway show`."""

import http.client
import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from headway.cache import pattern_facts
from headway.patterns import Causal, Global, PerHead, Sink, Window, parse, visible
from headway.tokens import Tokens
from tests.serve.conftest import House
from tests.serve.test_guard import ask

PAGE = Path(__file__).parents[3] / "src" / "headway" / "serve" / "page"
FILES = sorted(PAGE.iterdir())


@pytest.mark.parametrize(
    ("pattern", "marked"),
    [
        (Causal(), []),
        (Window.last(4) | Causal() & Sink(2), []),
        (Window.last(3, step=2), []),
        (Window.around(2) | Global(), [0, 5]),
        (PerHead(Causal(), Window.last(3)), []),
    ],
)
def test_facts_and_cells_are_those_of_the_library(house: House, pattern: Any, marked: list[int]) -> None:
    body = {"pattern": str(pattern), "tokens": 12, "globals": marked, "layers": 3}
    status, response = ask(house, "/v1/pattern", body=body)
    assert status == 200
    tokens = Tokens.range(12).with_global(marked) if marked else Tokens.range(12)
    facts = json.loads(json.dumps(pattern_facts(pattern, tokens, 3)))
    assert response == {**facts, "cells": response["cells"]}
    allowed = visible(pattern, tokens, tokens)[0]
    assert [[[c == "#" for c in row] for row in head] for head in response["cells"]] == allowed.tolist()
    assert parse(response["pattern"]) == pattern


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"pattern": "Window.lats(3)"}, "did you mean"),
        ({"pattern": "__import__('os')"}, "unknown name"),
        ({"pattern": "("}, "cannot be read"),
        ({"pattern": "(" * 400}, "cannot be read"),
        ({"pattern": "-" * 400 + "1"}, "pattern"),
        ({"pattern": "x" * 501}, "pattern"),
        ({"pattern": "|".join(f"Window.last(9, step={n})" for n in range(2, 11))}, "at most 16 heads of 8"),
        ({"pattern": "Causal()", "tokens": 129}, "tokens"),
        ({"pattern": "Causal()", "globals": [32]}, "globals"),
        ({"pattern": "Causal()", "colour": 1}, "colour"),
    ],
)
def test_what_is_wrong_is_said(house: House, body: dict[str, Any], words: str) -> None:
    status, response = ask(house, "/v1/pattern", body=body)
    assert (status, response["error"]["type"]) == (400, "invalid_request_error")
    assert words in response["error"]["message"]


def test_the_page_may_ask_its_own_server_and_run_its_own_files_alone(house: House) -> None:
    address = urlsplit(house.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=10)
    for path in ("/", *(f"/page/{file.name}" for file in FILES)):
        connection.request("GET", path)
        answer = connection.getresponse()
        content = answer.read()
        assert answer.status == 200
        policy = answer.headers["content-security-policy"]
        assert policy.startswith(
            "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'"
        )
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert content
    connection.close()
    for path in ("/page/../guard.py", "/page/%2e%2e/guard.py", "/page/none.js", "/page/"):
        assert ask(house, path, method="GET")[0] == 404


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_files_hold_no_markup_of_texts_and_name_no_other_server(file: Path) -> None:
    text = file.read_text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not re.search(r"\son\w+=|style=|<script>", text) or file.suffix == ".js"


def test_both_languages_have_every_text() -> None:
    text = (PAGE / "texts.js").read_text()
    table = text[text.index("const TEXTS") : text.index("export let")]
    pairs = re.findall(r"(\w+): \[(\"[^\n]*?\"), (\"[^\n]*?\")\],", table)
    assert len(pairs) == table.count(": [") > 80
    for name, english, chinese in pairs:
        assert sorted(re.findall(r"\{\d\}", english)) == sorted(re.findall(r"\{\d\}", chinese)), name
    known = {name for name, _, _ in pairs}
    for file in FILES:
        used = re.findall(r"\bt\(\"(\w+)\"", file.read_text()) + re.findall(
            r'data-(?:t|label|hint)="(\w+)"', file.read_text()
        )
        assert {*used} <= known, file.name
