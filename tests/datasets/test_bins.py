"""Whole examples in rows: all are there, none is cut unless that is asked for, and everything is counted."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.data.chats import ChatRows, Examples, best_fit, encode_examples
from headway.data.record_kinds import Chat, Completion
from headway.errors import DataError
from headway.models import ModelSpec, build
from headway.nn import IGNORE_INDEX
from tests.text.conftest import byte_level
from tests.text.test_segments import HI, MARKED_TURNS, YO

TOKENIZER = byte_level().with_chat_template(MARKED_TURNS)


def naive_best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Returns the rows of `best_fit`, computed by looking at every row."""
    rows: list[list[int]] = []
    order: list[int] = []  # rows, the last changed at the end
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        room_left = {row: room - sum(lengths[j] for j in rows[row]) for row in order}
        fitting = [row for row in order if room_left[row] >= lengths[i]]
        if fitting:
            row = min(fitting, key=lambda row: room_left[row])
            order.remove(row)
            rows[row].append(i)
        else:
            row = len(rows)
            rows.append([i])
        order.append(row)
    return rows


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(40, 60))
def test_best_fit_is_what_looking_at_every_row_finds(lengths: list[int], room: int) -> None:
    rows = best_fit(lengths, room)
    assert rows == naive_best_fit(lengths, room)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= room for row in rows)


def test_an_example_that_fits_no_row_is_an_error() -> None:
    with pytest.raises(DataError, match="example 1 needs 9 slots, but a row has 8"):
        best_fit([8, 9], 8)


def examples_of(*sizes: tuple[int, int]) -> Examples:
    """Returns examples of given sizes: (tokens before the answer, tokens of the answer)."""
    examples = Examples()
    for k, (before, answer) in enumerate(sizes):
        examples.add(range(10 * k, 10 * k + before + answer), [0] * before + [1] * answer)
    return examples


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=12), st.booleans())
def test_rows_say_the_answers_and_nothing_else(sizes: list[tuple[int, int]], pack: bool) -> None:
    """Each trained token of an example is a target once, and is predicted from the tokens before it in the example."""
    examples = examples_of(*sizes)
    rows = ChatRows(examples, 12, pack=pack)
    actual: Counter[tuple[int, ...]] = Counter()
    for i in range(len(rows)):
        batch, turns = rows.batch([i]), rows.turns([i])
        ids, tokens = batch.inputs["ids"][0].tolist(), batch.inputs["tokens"]
        assert torch.equal(turns > 0, batch.targets != IGNORE_INDEX)
        for slot, target in enumerate(batch.targets[0].tolist()):
            if target != IGNORE_INDEX:
                index = int(tokens.index[0, slot])
                actual[(*ids[slot - index : slot + 1], target)] += 1
    expected = Counter(
        tuple(range(10 * k, 10 * k + n + 1))
        for k, (before, answer) in enumerate(sizes)
        for n in range(before, before + answer)
    )
    assert actual == expected
    assert rows.used == sum(before + answer - 1 for before, answer in sizes)
    assert len(rows) <= len(sizes) if pack else len(rows) == len(sizes)


def test_packed_gradients_are_those_of_examples_by_themselves() -> None:
    spec = ModelSpec.of(
        "llama", vocab=200, width=16, layers=2, heads=2, kv_heads=1, hidden=24, trained_context=64
    )
    examples = examples_of((3, 4), (1, 2), (5, 1), (2, 6), (4, 3), (1, 1))
    gradients = []
    for pack in (True, False):
        model = build(spec, dtype=torch.float64, seed=0)
        rows = ChatRows(examples, 16, pack=pack)
        for i in range(len(rows)):
            batch = rows.batch([i])
            model(**batch.inputs, targets=batch.targets).total.backward()
        gradients.append([p.grad for p in model.parameters()])
    for packed, alone in zip(*gradients, strict=True):
        assert packed is not None
        assert float((packed - alone).abs().max()) <= 1e-12 * max(1.0, float(alone.abs().max()))


def encoded(records: Sequence[Any], length: int = 1000, **options: Any) -> Examples:
    named = [type(r)(**{**vars(r), "where": f"x:{i + 1}"}) for i, r in enumerate(records)]
    return encode_examples(named, TOKENIZER, stop={1}, length=length, **options)


def shown(examples: Examples) -> list[str]:
    return [TOKENIZER.decode(examples[i].ids.tolist(), special=True) for i in range(len(examples))]


def test_examples_end_with_their_last_trained_token() -> None:
    examples = encoded([Chat((HI, YO, HI)), Completion("the", " cat"), Chat((HI, YO, HI, YO))])
    first_round = "<|begin|><|user|>the cat<|reply|>sat on<|end|>"
    second_round = "\n<|user|>the cat<|reply|>sat on<|end|>"
    assert shown(examples) == [first_round, "<|begin|>the cat<|end|>", first_round + second_round]
    assert [[*Counter(examples[i].turns.tolist())] for i in range(3)] == [[0, 1], [0, 1], [0, 1, 2]]
    report = examples.report
    assert (report.read, report.answers, report.cut, report.dropped) == (3, 4, 0, Counter())
    assert report.tokens == sum(len(examples[i].ids) for i in range(3)) == sum(examples.slots) + 3
    assert report.trained == sum(int((examples[i].turns > 0).sum()) for i in range(3))
    assert examples.report.lines() == [
        f"3 examples read, 3 trained on; {report.trained / report.tokens:.1%} of {report.tokens} tokens are trained"
    ]


def test_of_a_very_long_conversation_every_answer_is_trained() -> None:
    """Turns are numbered up to 255, and later ones are trained as the 255th."""
    rounds = 258
    turns = encoded([Chat((HI, YO) * rounds)], 100_000)[0].turns
    sizes = Counter(turns[turns > 0].tolist())
    per_turn = sizes[1]
    assert sizes == {**dict.fromkeys(range(1, 255), per_turn), 255: per_turn * (rounds - 254)}


@pytest.mark.parametrize(
    ("too_long", "kept", "said"),
    [
        ("drop", [1], "3 examples read, 1 trained on, 2 dropped (too long)"),
        ("drop_turns", [1, 2], "3 examples read, 2 trained on, 1 of them cut, 1 dropped (too long)"),
        ("cut_left", [1, 3, 1], "3 examples read, 3 trained on, 2 of them cut"),
    ],
)
def test_examples_that_are_too_long(too_long: Any, kept: list[int], said: str) -> None:
    """A row holds two rounds and one more slot: one round fits, three rounds are cut to two or to their end."""
    long = Chat(({**HI, "content": "the cat " * 40}, YO))
    length = len(encoded([Chat((HI, YO, HI, YO))])[0].ids)  # one slot more than two rounds need
    examples = encoded([Chat((HI, YO)), Chat((HI, YO, HI, YO, HI, YO)), long], length, too_long=too_long)
    assert [len({*examples[i].turns.tolist()} - {0}) for i in range(len(examples))] == kept
    assert examples.report.lines()[0].startswith(said + ";")
    assert all(slots <= length for slots in examples.slots)
    assert all(examples[i].turns[-1] > 0 for i in range(len(examples)))
    whole = encoded([Chat((HI, YO, HI, YO, HI, YO)), long])
    if too_long == "drop_turns":
        assert examples[1].ids.tolist() == whole[0].ids[: len(examples[1].ids)].tolist()
    if too_long == "cut_left":
        for i in (1, 2):
            assert examples[i].ids.tolist() == whole[i - 1].ids[-length - 1 :].tolist()
    with pytest.raises(
        DataError,
        match=rf"x:3: the example has \d+ tokens, but a row of context {length} holds at most {length + 1}",
    ):
        encoded([Chat((HI, YO)), Chat((HI, YO)), long], length, too_long="error")


def test_examples_without_an_answer() -> None:
    """Up to a hundredth of them is left out and counted; more is an error, and so is no example left at all."""
    silent = Chat((HI, {**YO, "content": ""}))
    examples = encoded([*[Chat((HI, YO))] * 198, silent, Chat((HI,))])
    assert examples.report.dropped == {"no answer": 2}
    with pytest.raises(
        DataError,
        match=r"3 of 200 examples have no answer to train on \(at most 1% may\), the first in x:198",
    ):
        encoded([*[Chat((HI, YO))] * 197, silent, silent, Chat((HI, {**YO, "weight": 0}))])
    with pytest.raises(
        DataError,
        match=r"no example is left to train on: 1 examples read, 0 trained on, 1 dropped \(too long\)",
    ):
        encoded([Chat((HI, YO))], length=4)
    with pytest.raises(DataError, match=r"x:2: message 0 must be a mapping"):
        encoded([Chat((HI, YO)), Chat((3,))])  # type: ignore[arg-type]


def test_the_report_says_what_the_template_does_otherwise() -> None:
    thinks = TOKENIZER.with_chat_template(MARKED_TURNS.replace("{% generation %}", "<think>{% generation %}"))
    report = encode_examples([Chat((HI, YO))], thinks, stop={1}, length=99).report
    assert report.lines()[1].startswith(
        "1 of 1 answers begin otherwise than the chat template's generation prompt ends"
    )
    last = TOKENIZER.with_chat_template(
        MARKED_TURNS.replace("role == 'assistant'", "role == 'assistant' and loop.last")
    )
    report = encode_examples([Chat((HI, YO, HI, YO))], last, stop={1}, length=99).report
    assert report.lines()[1:] == [
        "1 messages of the assistant have no marks in the chat template: not trained"
    ]


@pytest.mark.slow
def test_a_million_examples_are_packed_at_once() -> None:
    draws = torch.empty(1_000_000).log_normal_(4.5, 0.8, generator=torch.Generator().manual_seed(0))
    lengths = draws.long().clamp(1, 512).tolist()
    rows = best_fit(lengths, 512)
    assert sum(map(len, rows)) == 1_000_000
    assert sum(lengths) / (512 * len(rows)) > 0.999
