"""Self-instruct with an endpoint of known replies: what is kept, what is rejected and why, and resuming."""

import json
import random
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from headway.cli import run
from headway.data.record_kinds import Chat
from headway.data.records import read_records
from headway.endpoints import Reply
from headway.errors import ConfigError, DataError
from headway.instruct import Item, make_instructions, read_seeds, rouge_l, words
from headway.instruct.items import Rejected, parse, prompt
from tests.endpoints.scripted import Scripted, completion, server

VERBS = ("name", "sort", "count", "praise", "translate", "correct", "shorten", "describe", "compare", "guess")
THINGS = ("rivers", "numbers", "verbs", "poems", "recipes", "towns", "colours", "birds", "letters", "laws")


def seeds() -> list[Item]:
    """Returns tasks that none of `writer`'s resembles, some with an input."""
    return [
        Item(
            f"Explain to {other}, as if they could listen, why {thing} matter more",
            input_text,
            f"Because of {thing}.",
        )
        for thing, other in permutations(THINGS, 2)
        for input_text in ([""] if thing < other else [f"a remark on {other}"])
    ]


def seed_file(folder: Path) -> Path:
    """Writes the seeds in the form of Wang et al., and every third in Alpaca's."""
    path = folder / "seed_tasks.jsonl"
    with path.open("w", encoding="utf-8") as file:
        for number, seed in enumerate(seeds()):
            instance = {"input": seed.input, "output": seed.output}
            task = instance if number % 3 == 0 else {"id": f"seed_task_{number}", "instances": [instance, {}]}
            file.write(json.dumps({"instruction": seed.instruction, **task}) + "\n")
    return path


def writer(messages: Sequence[Any], seed: int) -> Reply:
    """Replies with a list of tasks: some good, some of every bad kind, the last one sometimes cut off."""
    draw = random.Random(seed)
    items = []
    for number in range(4, 4 + draw.randrange(3, 9)):
        verb, thing, other = draw.choice(VERBS), draw.choice(THINGS), draw.choice(THINGS)
        place, ways = draw.randrange(10**9), draw.randrange(10**9)
        instruction = f"{verb.capitalize()} the {thing} of {place} {other} in {ways} ways"
        kind = draw.randrange(12)
        instruction = {0: f"Draw the {thing}, please do", 1: "Do it", 2: seeds()[0].instruction}.get(
            kind, instruction
        )
        input_text = draw.choice(["<noinput>", "<NoInput>", f"some {thing}"])
        output = "" if kind == 3 else f"{thing} and {other}"
        label = "Outcome" if kind == 4 else "Output"
        items.append(f" {instruction}\n{number}. Input:\n{input_text}\n{number}. {label}:\n{output}\n")
    heads = [f"{number}. Instruction:" for number in range(5, 4 + len(items))]
    text = items[0] + "".join(f"###\n{head}{item}" for head, item in zip(heads, items[1:], strict=True))
    return Reply(text, draw.choice(["stop", "length"]))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_row_42_seeds_become_new_instructions_without_near_duplicates(tmp_path: Path) -> None:
    assert read_seeds(seed_file(tmp_path)) == seeds()
    result = make_instructions(Scripted(writer), seeds(), 40, tmp_path / "made.jsonl")
    records = lines(result.out)
    assert [Item(**record) for record in records] == result.items
    assert len(records) == 40
    known = [words(seed.instruction) for seed in seeds()]
    for record in records:
        tokens = words(record["instruction"])
        assert max(rouge_l(tokens, other) for other in known) <= 0.7
        known.append(tokens)
    chats = list(read_records(result.out, Chat))
    assert len(chats) == 40
    rejects = lines(result.rejects)
    assert len(rejects) == sum(result.rejected.values()) == result.asked - 40
    expected = {"near-duplicate", "unsuitable word", "too short", "no output", "malformed", "cut off"}
    assert set(result.rejected) == expected
    (duplicate, *_) = (record for record in rejects if record["reason"] == "near-duplicate")
    assert duplicate["detail"] == f"ROUGE-L 1.000 with: {seeds()[0].instruction}"
    assert len(lines(result.transcript)) == result.replies


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(tmp_path: Path, stop: int) -> None:
    uninterrupted = make_instructions(Scripted(writer), seeds(), 30, tmp_path / "whole" / "made.jsonl")
    assert uninterrupted.replies > stop + 1

    def dying(messages: Sequence[Any], seed: int) -> Reply:
        if seed >= stop:
            raise KeyboardInterrupt
        return writer(messages, seed)

    with pytest.raises(KeyboardInterrupt):
        make_instructions(Scripted(dying), seeds(), 30, tmp_path / "cut" / "made.jsonl")
    records = lines(tmp_path / "cut" / "made.jsonl")
    assert 0 < len(records) < 30
    transcript = tmp_path / "cut" / "made.jsonl.transcript.jsonl"
    transcript.write_bytes(transcript.read_bytes()[:-9])  # as if killed while writing the last line
    resumed_endpoint = Scripted(writer)
    resumed = make_instructions(resumed_endpoint, seeds(), 30, tmp_path / "cut" / "made.jsonl")
    assert (resumed_endpoint.asked, resumed.sent, resumed.replies) == (
        uninterrupted.replies - stop + 1,
        uninterrupted.replies - stop + 1,
        uninterrupted.replies,
    )
    for name in ("made.jsonl", "made.jsonl.rejects.jsonl", "made.jsonl.transcript.jsonl"):
        assert (tmp_path / "cut" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    longer = make_instructions(Scripted(writer), seeds(), 35, tmp_path / "cut" / "made.jsonl")
    assert longer.items[:30] == uninterrupted.items
    with pytest.raises(ConfigError, match=r"temperature was 1\.0 and is 0\.2"):
        make_instructions(Scripted(writer), seeds(), 35, tmp_path / "cut" / "made.jsonl", temperature=0.2)
    assert len(lines(longer.out)) == 35


def test_requests_sent_at_once_make_the_same(tmp_path: Path) -> None:
    sequential = make_instructions(Scripted(writer), seeds(), 25, tmp_path / "one.jsonl")
    concurrent = make_instructions(Scripted(writer), seeds(), 25, tmp_path / "many.jsonl", parallel=4)
    assert concurrent.out.read_bytes() == sequential.out.read_bytes()
    assert concurrent.rejects.read_bytes() == sequential.rejects.read_bytes()
    assert sequential.replies <= concurrent.sent < sequential.replies + 4
    again = make_instructions(Scripted(writer), seeds(), 25, tmp_path / "many.jsonl")
    assert (again.sent, again.items) == (0, sequential.items)


def test_the_prompt_is_alpacas() -> None:
    text = prompt([Item("Say  hello:\n", "", "Hello."), Item("Add.", "1 2", "3")])
    assert text.startswith("You are asked to come up with a set of 20 diverse task instructions.")
    assert text.endswith(
        "List of 20 tasks:\n###\n1. Instruction: Say hello\n1. Input:\n<noinput>\n1. Output:\nHello.\n"
        "###\n2. Instruction: Add.\n2. Input:\n1 2\n2. Output:\n3\n###\n3. Instruction:"
    )


ONE = "Sort these words, please.\n4. Input:\nb a\n4. Output:\na b"


@pytest.mark.parametrize(
    "text",
    [
        f" {ONE}",
        f"4. Instruction: {ONE}",
        f"###\n4. Instruction: {ONE}\n###",
        f"9. Instruction: {ONE}".replace("4.", "9."),
    ],
)
def test_a_reply_goes_on_or_begins_again(text: str) -> None:
    assert parse(Reply(text, "stop"), 4) == [Item("Sort these words, please.", "b a", "a b")]


@pytest.mark.parametrize(
    ("instruction", "reason"),
    [
        ("Sort these words", "too short"),
        ("word " * 151, "too long"),
        ("Describe the Flowchart of it", "unsuitable word"),
        ("Please go to the next town", "unsuitable word"),
        ("Write a program that adds numbers", "a program"),
        ("'Quoted' words come first here", "first character"),
        ("Écrire une phrase en français", "first character"),
    ],
)
def test_filters_say_why(instruction: str, reason: str) -> None:
    (rejected,) = parse(Reply(ONE.replace("Sort these words, please.", instruction), "stop"), 4)
    assert isinstance(rejected, Rejected)
    assert (rejected.reason, rejected.text) == (reason, instruction.strip())
    (item,) = parse(Reply(ONE.replace("Sort", "Photograph maplike"), "stop"), 4)
    assert isinstance(item, Item)


def test_a_model_that_writes_no_lists_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"20 replies in a row brought no new instruction \(rejected so far: malformed 20\)"
    ):
        make_instructions(Scripted(lambda messages, seed: "I cannot."), seeds(), 3, tmp_path / "made.jsonl")
    assert len(lines(tmp_path / "made.jsonl.rejects.jsonl")) == 20
    with pytest.raises(DataError, match="2 seed tasks are too few: a request shows 3"):
        make_instructions(Scripted(writer), seeds()[:2], 3, tmp_path / "other.jsonl")


def test_seeds_that_are_none_are_named_with_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "seeds.jsonl"
    path.write_text('{"instruction": "a", "output": "b"}\n{"instruction": "a", "instances": []}\n')
    with pytest.raises(
        DataError, match=r"seeds.jsonl:2: a seed task has .*got \['instances', 'instruction'\]"
    ):
        read_seeds(path)
    path.write_text('{"instruction": "a", "output": 3}\n')
    with pytest.raises(DataError, match=r"seeds.jsonl:1: instruction, input and output must be texts"):
        read_seeds(path)


def test_the_command_prints_the_yield(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(path: str, body: Any) -> Any:
        reply = writer(body["messages"], body["seed"])
        return completion(reply.text, reply.finish_reason)

    source = str(seed_file(tmp_path))
    with server(answer) as url:
        command = ["instruct", "--seeds", source, "--endpoint", f"{url}#m", "-n", "12"]
        command += ["--out", str(tmp_path / "made.jsonl")]
        assert run(command) == 0
        printed = capsys.readouterr()
        assert "yield, kept / listed" in printed.out
        assert "12 of 12" in printed.err
        assert run([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["kept"], report["sent"]) == (12, 0)
    assert report["yield"] == pytest.approx(12 / (12 + sum(report["rejected"].values())))
