"""Requests of self-instruct: what they are drawn from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from headway.endpoints import Reply
from headway.errors import DataError
from headway.instruct import Item, make_instructions
from tests.endpoints.scripted import Scripted

TASKS = [Item(f"Name {n} things that rhyme with number {n}", "", "one") for n in range(40)]
WORDS = [
    "amber",
    "birch",
    "cedar",
    "dune",
    "ember",
    "fjord",
    "grove",
    "heath",
    "inlet",
    "jetty",
    "knoll",
    "lagoon",
    "marsh",
    "nook",
]


def test_replies_without_text_are_the_cause_that_is_named(tmp_path: Path) -> None:
    """The error does not say that the replies were cut off, which other settings would mend."""
    silent = Scripted(lambda messages, seed: Reply("", "length"))
    with pytest.raises(DataError, match=r"20 replies in a row .* \(rejected so far: no text 20\)"):
        make_instructions(silent, TASKS, 3, tmp_path / "made.jsonl")
    assert "finish_reason length" in (tmp_path / "made.jsonl.rejects.jsonl").read_text()


def test_two_seeds_share_no_request(tmp_path: Path) -> None:
    """Neither the number sent with a request nor the tasks it shows: a second run makes other instructions."""
    sent: dict[int, list[tuple[int, str]]] = {}
    for seed in (0, 1):
        rounds = sent.setdefault(seed, [])

        def answer(messages: Sequence[Any], number: int, rounds: list[Any] = rounds) -> Reply:
            rounds.append((number, messages[0]["content"]))
            word = WORDS[len(rounds)]
            text = f" Draft {word} {word}s of {word}ish {word}\n4. Input:\n<noinput>\n4. Output:\n{word}\n"
            return Reply(text, "stop")

        make_instructions(Scripted(answer), TASKS, 8, tmp_path / f"{seed}.jsonl", seed=seed)
    for part in (0, 1):
        first, second = ({request[part] for request in sent[seed]} for seed in (0, 1))
        assert len(first) == len(second) == 8
        assert not first & second
