"""Servers under load: what is requested, what is counted, and what is reported."""

import asyncio
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from urllib.parse import urlsplit

import pytest

from headway_lab.bench.client import Ask, Load, Told, loaded, run
from headway_lab.bench.inputs import OURS, UnsupportedCase
from headway_lab.bench.models import WORDS, written_models
from headway_lab.bench.rows import to_text
from headway_lab.bench.serving import (
    Effort,
    _figures,
    arriving,
    body,
    drawn,
    llama_server,
    serve,
    served,
    sessions,
    sides,
)
from tests.serve.conftest import House, serving

EFFORT = Effort(rounds=1, prompt=80, new=6)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    with serving() as running:
        yield running


def port(house: House) -> int:
    return urlsplit(house.url).port or 0


def test_tokens_are_those_of_usage_and_times_follow_one_another(house: House) -> None:
    asks = drawn(330, 6, EFFORT, 1)
    load = asyncio.run(run(port(house), asks, 3))
    for ask, answer in zip(asks, load.told, strict=True):
        assert (answer.prompt, answer.new) == (len(ask.body["prompt"]), 6)
        assert answer.begun < answer.pieces[0]
        assert [*answer.pieces] == sorted(answer.pieces)
        assert answer.first > 0
        assert len(answer.gaps) == len(answer.pieces) - 1
    assert load.seconds == max(answer.pieces[-1] for answer in load.told)
    assert load.rate == 36 / load.seconds
    assert load.cpu > 0
    assert loaded(json.dumps(asdict(load))) == load


def test_no_more_ask_at_once_than_may(house: House) -> None:
    load = asyncio.run(run(port(house), drawn(330, 4, EFFORT, 2), 1))
    ends = sorted((answer.begun, answer.pieces[-1]) for answer in load.told)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(ends))


def test_requests_begin_at_their_times(house: House) -> None:
    asks = arriving(drawn(330, 5, EFFORT, 3), 20.0, 4)
    assert [ask.at for ask in asks] == sorted(ask.at for ask in asks)
    load = asyncio.run(run(port(house), asks, 5))
    assert all(ask.at <= answer.begun < ask.at + 0.5 for ask, answer in zip(asks, load.told, strict=True))


def test_sessions_say_again_what_they_said(house: House) -> None:
    asks, again = sessions(330, 2, 3, EFFORT, 5)
    assert [len(ask.body["prompt"]) for ask in asks] == [80, 80, 160, 160, 240, 240]
    assert again == 2 * (80 + 160)
    assert asks[4].body["prompt"][:160] == asks[2].body["prompt"]
    load = asyncio.run(run(port(house), asks, 1))
    assert 0.8 * again - 1 <= sum(answer.cached for answer in load.told) <= again  # found in pages of 64
    assert "prefix_hits" in _figures([load], EFFORT, again)


def test_what_is_refused_is_told(house: House) -> None:
    with pytest.raises(ValueError, match=r"(?s)400 Bad Request: .*no prompts"):
        asyncio.run(run(port(house), [Ask(body([], 3))], 1))


def test_figures() -> None:
    answers = [Told(0.0, [1.0, 1.1, 1.2], 10, 4, 3), Told(1.0, [4.0, 4.5, 5.0], 10, 4, 3)]
    figures = _figures([Load(answers, 5.0, 0.5)], Effort(first=2.0, gap=0.2), 16)
    assert figures["tokens_per_second"] == pytest.approx(6 / 5)
    assert (figures["first_ms"], figures["gap_ms"]) == (pytest.approx(2000), pytest.approx(300))
    assert (figures["goodput"], figures["client_cpu"]) == (pytest.approx(1 / 5), pytest.approx(0.1))
    assert figures["prefix_hits"] == 0.5
    assert 498 < figures["gap_p99_ms"] <= 500


def test_a_server_that_is_not_there_is_said() -> None:
    for written, kind in written_models(["tiny"], ["int8"]):
        with (
            pytest.raises(UnsupportedCase, match="cannot be run"),
            served(llama_server("/nowhere/llama-server"), written.served(kind), 1, 64),
        ):
            pass


def test_transformers_is_asked_the_same_in_words() -> None:
    words = pytest.importorskip("transformers").AutoTokenizer
    for written, _ in written_models(["tiny"], ["bf16"]):
        (ask,) = drawn(written.spec.vocab, 1, EFFORT, 8)
        side = sides("llama-server")["transformers serve"]
        tokenizer = words.from_pretrained(side.file(written, "bf16"))
        assert tokenizer(side.ask(ask).body["prompt"])["input_ids"] == ask.body["prompt"]
        with pytest.raises(UnsupportedCase, match="int8"):
            side.file(written, "int8")


def test_the_client_is_a_process_of_its_own(house: House) -> None:
    plan = {"port": port(house), "asks": [asdict(ask) for ask in drawn(330, 2, EFFORT, 6)], "most": 2}
    program = [sys.executable, "-m", "headway_lab.bench.client"]
    completed = subprocess.run(program, input=json.dumps(plan), capture_output=True, text=True, check=True)
    assert [answer.new for answer in loaded(completed.stdout).told] == [6, 6]


@pytest.mark.slow
def test_rows_of_a_server() -> None:
    peers = ["llama-server", "transformers serve"]
    measured = serve(
        ["tiny"], ["bf16"], [2], "/nowhere/llama-server", peers, effort=EFFORT, say=lambda text: None
    )
    rows = list(measured)
    assert [row.case.rpartition(" ")[2] for row in rows] == ["clients=2", "load=80%", "sessions=4"]
    for row in rows:
        assert row.ours_ms is not None
        figures = row.extra["figures"]
        assert [*figures] == [OURS, "transformers serve"] == [OURS, *row.ratios]
        assert min(side["tokens_per_second"] for side in figures.values()) > 0
        assert "cannot be run" in row.notes[0]
    assert rows[2].extra["figures"][OURS]["prefix_hits"] > 0.6
    assert "tiny bf16 sessions=4" in to_text(rows)
    assert WORDS == 259
