"""Conversations and completions as training examples: token ids, which of them are trained, and a report on the data;
and the packing of whole examples into rows by best-fit decreasing (Johnson 1973), which depends on lengths alone.

Tokens after the last trained token of an example are dropped: nothing is learned from them.

Legend: B rows, L slots of a row.
"""

from collections import Counter, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from headway.data.record_kinds import Chat, Completion
from headway.data.rows import Batch, PackedRow, RowSource, batch_of, padded
from headway.errors import DataError, as_error
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer
from headway.text.segments import Segments, chat_segments, completion_segments

TooLong = Literal["drop", "drop_turns", "cut_left", "error"]
SILENT = 0.01  # share of the examples that may have nothing to be trained
NO_ANSWER, TOO_LONG = "no answer", "too long"


class Example(NamedTuple):
    """Token ids [n]; for each, the number (1, 2, ..) of the answer that it is trained in, 0 if it is not trained [n];
    and the record's `file:line`."""

    ids: NDArray[np.int32]
    turns: NDArray[np.uint8]
    where: str


@dataclass
class Report:
    """Counts of the records that were read, dropped and trained on.

    read         number of records read
    dropped      number of records dropped, by reason
    cut          number of examples that were shortened because they were too long
    tokens       number of tokens of all examples; trained: how many of them are targets
    answers      number of answers in all records; otherwise, unmarked: as in `headway.text.segments.Segments`
    """

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    tokens: int = 0
    trained: int = 0
    answers: int = 0
    otherwise: int = 0
    unmarked: int = 0

    def lines(self) -> list[str]:
        """Returns the counts as sentences."""
        left = self.read - self.dropped.total()
        dropped = "".join(f", {count} dropped ({reason})" for reason, count in sorted(self.dropped.items()))
        sentences = [
            f"{self.read} examples read, {left} trained on{f', {self.cut} of them cut' if self.cut else ''}{dropped}; "
            f"{self.trained / max(1, self.tokens):.1%} of {self.tokens} tokens are trained"
        ]
        if self.otherwise:
            sentences.append(
                f"{self.otherwise} of {self.answers} answers begin otherwise than the chat template's generation "
                "prompt ends: generation will not read before an answer what training does"
            )
        if self.unmarked:
            sentences.append(
                f"{self.unmarked} messages of the assistant have no marks in the chat template: not trained"
            )
        return sentences


class Examples(list[Example]):
    """A list of examples, with the report on the records that they were made from."""

    def __init__(self) -> None:
        super().__init__()
        self.report = Report()

    @property
    def slots(self) -> list[int]:
        """Number of slots of each example: one fewer than its tokens, since the last one is predicted but not read."""
        return [len(example.ids) - 1 for example in self]

    def add(self, ids: Sequence[int], turns: Sequence[int], where: str = "") -> None:
        """Adds an example."""
        numbers = np.array([min(turn, 255) for turn in turns], np.uint8)
        self.append(Example(np.array(ids, np.int32), numbers, where))
        self.report.tokens += len(ids)
        self.report.trained += int((numbers > 0).sum())

    def digest(self) -> bytes:
        """Returns the lengths, ids and turns of all examples as bytes, to be hashed."""
        return b"".join(
            part.tobytes()
            for example in self
            for part in (np.array(len(example.ids)), example.ids, example.turns)
        )


def encode_examples(
    records: Iterable[Chat | Completion],
    tokenizer: Tokenizer,
    *,
    stop: Collection[int],
    length: int,
    train_on: Literal["all", "last"] = "all",
    too_long: TooLong = "drop",
) -> Examples:
    """Encodes records as examples for rows of `length` slots.

    too_long: drop leaves out an example that does not fit; drop_turns keeps as many whole rounds from its beginning as
    fit; cut_left keeps its end; error raises DataError.

    Raises DataError, with file and line, for a record that cannot be encoded as segments; if more than `SILENT` of the
    records have nothing to train; and if no example is left.
    """
    examples, silent = Examples(), ""
    report = examples.report
    for record in records:
        report.read += 1
        segments = _segments(record, tokenizer, stop, train_on)
        report.answers += segments.answers
        report.otherwise += segments.otherwise
        report.unmarked += segments.unmarked
        last = max((i + 1 for i, turn in enumerate(segments.turns) if turn), default=0)
        ids, turns = segments.ids[:last], segments.turns[:last]
        if not any(turn and token not in stop for token, turn in zip(ids, turns, strict=True)):
            report.dropped[NO_ANSWER] += 1
            silent = silent or record.where
            continue
        if len(ids) > length + 1:
            if too_long == "error":
                raise DataError(
                    f"{record.where}: the example has {len(ids)} tokens, but a row of context {length} holds at most "
                    f"{length + 1}; raise context, or set too_long to drop, drop_turns or cut_left"
                )
            ids, turns = _shortened(ids, turns, length, too_long)
            if not ids:
                report.dropped[TOO_LONG] += 1
                continue
            report.cut += 1
        examples.add(ids, turns, record.where)
    if report.dropped[NO_ANSWER] > SILENT * report.read:
        raise DataError(
            f"{report.dropped[NO_ANSWER]} of {report.read} examples have no answer to train on (at most {SILENT:.0%} "
            f"may), the first in {silent}; check the data, the chat template and train_on"
        )
    if not len(examples):
        raise DataError(f"no example is left to train on: {'; '.join(report.lines())}")
    return examples


def _segments(
    record: Chat | Completion, tokenizer: Tokenizer, stop: Collection[int], train_on: Literal["all", "last"]
) -> Segments:
    with as_error(DataError, record.where):
        if isinstance(record, Completion):
            return completion_segments(tokenizer, record.prompt, record.completion, stop)
        tools = {} if record.tools is None else {"tools": record.tools}
        return chat_segments(tokenizer, record.messages, stop=stop, train_on=train_on, **tools)


def _shortened(
    ids: Sequence[int], turns: Sequence[int], length: int, too_long: TooLong
) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the part of an example that `too_long` keeps for `length` slots; nothing if the example is dropped."""
    if too_long == "cut_left":
        return ids[-length - 1 :], turns[-length - 1 :]
    if too_long == "drop_turns":
        ends = [i + 1 for i, turn in enumerate(turns) if turn and turns[i + 1 : i + 2] != [turn]]
        end = max((end for end in ends if end <= length + 1), default=0)
        return ids[:end], turns[:end]
    return [], []


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Packs examples into rows of `room` slots by best-fit decreasing; returns the indices of the examples in each row.

    Examples are placed from the longest to the shortest (of equals, the first), each into the row that it leaves with
    the fewest free slots (of equals, the row that has had this number of free slots for longest), or into a new row. A
    bit mask with one bit for each number of free slots that some row has finds that row without a search: a million
    examples take seconds.

    Raises DataError for an example that is longer than a row.
    """
    rows: list[list[int]] = []
    with_room: list[deque[int]] = [deque() for _ in range(room + 1)]
    bits = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = lengths[i]
        if not 0 <= n <= room:
            raise DataError(f"example {i} needs {n} slots, but a row has {room}")
        fitting = bits >> n  # rows with 2 and 4 slots left are 0b10100; for n = 3 that is 0b10: free = 3 + 1
        if fitting:
            free = n + (fitting & -fitting).bit_length() - 1
            row = with_room[free].popleft()
            if not with_room[free]:
                bits ^= 1 << free
            rows[row].append(i)
        else:
            free, row = room, len(rows)
            rows.append([i])
        with_room[free - n].append(row)
        bits |= 1 << (free - n)
    return rows


class ChatRows(RowSource):
    """Rows of whole examples, packed without attention between them: `len(rows)`, `rows.batch([..])`.

    Only trained tokens are targets. A row has up to `length` slots, and a batch is padded to its longest row. Without
    `pack`, each row holds one example.
    """

    def __init__(self, examples: Examples, length: int, *, pack: bool = True) -> None:
        self.examples, self.length = examples, length
        self.rows = best_fit(examples.slots, length) if pack else [[i] for i in range(len(examples))]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> PackedRow:
        parts = [self.examples[k] for k in self.rows[i]]
        # ids u v a b, turns 0 0 1 1: reads u v a, targets - a b
        ids = np.concatenate([example.ids[:-1] for example in parts], dtype=np.int64)
        targets = [np.where(turns[1:] > 0, ids[1:], IGNORE_INDEX) for ids, turns, _ in parts]
        return PackedRow(
            ids, np.concatenate(targets, dtype=np.int64), [len(example.ids) - 1 for example in parts]
        )

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns the batch of these rows, padded to the longest of them."""
        rows = [self[i] for i in indices]
        return batch_of(rows, max(len(row.ids) for row in rows))

    def turns(self, indices: Sequence[int]) -> Tensor:
        """Returns, for each target of `batch(indices)` [B, L], the number of its answer in the conversation: 1, 2, ..;
        0 if the slot has no target."""
        parts = [[self.examples[i].turns[1:] for i in self.rows[row]] for row in indices]
        return padded([np.concatenate(row) for row in parts])

    @property
    def used(self) -> int:
        """Number of slots that are not empty, over all rows."""
        return sum(self.examples.slots)
