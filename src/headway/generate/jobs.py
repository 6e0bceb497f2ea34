"""Requests in the engine: their texts, what is read of them, and their next tokens.

Legend: N rows of logits, V vocab.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headway.cache import PAGE, PagePool, PageTable
from headway.errors import ConfigError
from headway.generate.beams import BeamSearch, expand_beams
from headway.generate.requests import by_config
from headway.generate.sampling import broken_rows, no_numbers
from headway.generate.sequences import SampledText, choose_tokens, log_probs_of

Text = SampledText | BeamSearch


@dataclass(eq=False)
class Row:
    """One of the texts of a request, of which a beam search has several.

    ids: all tokens, those that are to be read next included.   table: where they are stored; None while it waits.
    """

    ids: list[int]
    table: PageTable | None = None

    @property
    def rest(self) -> list[int]:
        """The tokens that are to be read."""
        return self.ids if self.table is None else self.ids[len(self.table.ids) :]

    def cut(self, ids: list[int]) -> list[int]:
        """Of the next tokens of a prompt those that are read now: sums can be kept for prefixes to come at multiples of
        64 alone, so that pieces end there where layers have sums."""
        if self.table is None:
            return ids
        begin, end = len(self.table), len(self.table) + len(ids)
        at = (end - (end == len(self.ids))) // PAGE * PAGE
        return ids[: at - begin] if at > begin else ids


@dataclass(eq=False)
class Job:
    """A request in the engine, and its texts. `source`: the pages of its source, of an encoder-decoder."""

    text: Text
    rows: list[Row]
    source: PageTable | None = None

    @property
    def may_share(self) -> bool:
        """Whether it begins with what others stored: where it asks for that, and where it was sent back and has stored
        it itself."""
        return self.text.request.config.prefix_cache or self.text.count > 0

    @property
    def adapters(self) -> Sequence[str] | None:
        """Names of those that are added for it; None is all."""
        return self.text.request.config.adapters

    @property
    def is_ready(self) -> bool:
        """Whether each of its texts has been read up to its last token."""
        left = [0 if row.table is None else len(row.ids) - len(row.table.ids) for row in self.rows]
        return left.count(1) == len(left)


class Piece(NamedTuple):
    """Of a step: ids that one of a job's texts goes on with, and which of them have logits that are wanted."""

    job: Job
    row: Row
    ids: list[int]
    wanted: range


def advance(logits: Tensor, live: Sequence[tuple[Text, range]]) -> None:
    """A token more for each text, from its rows of the logits [N, V]; searches of one config are advanced together.
    A text whose logits are no numbers, or whose constraints leave no token to choose, ends with the error."""
    if broken := broken_rows(_rows(logits, live)):
        of_row = [text for text, rows in live for _ in rows]
        for text in {of_row[row] for row in broken}:
            text.fail(no_numbers(text.request.number, text.count))
        live = [(text, rows) for text, rows in live if text.error is None]
    searches = [(text, rows) for text, rows in live if isinstance(text, BeamSearch)]
    for group in by_config([text.request for text, _ in searches]):
        some = [searches[i] for i in group]
        expand_beams(_rows(logits, some), [text for text, _ in some])
    sampled = [(text, rows) for text, rows in live if isinstance(text, SampledText)]
    chosen = choose_tokens(_rows(logits, sampled), [text for text, _ in sampled])
    for (text, rows), token in zip(sampled, chosen, strict=True):
        if token is None:
            text.fail(ConfigError("forbidden: no token is left to choose"))
            continue
        config = text.request.config
        told = log_probs_of(logits[rows[0]], token, config) if config.log_probs else ()
        text.advance(token, time.perf_counter() - text.begun, *told)


def next_rows(job: Job, pool: PagePool) -> list[Row]:
    """The texts of a job after a step. The first that goes on from a text has its pages, others share them."""
    if len(job.rows) == len(job.text.rows) == 1:  # nothing is copied, however long it is
        job.rows[0].ids.append(job.text.rows[0][1])
        return job.rows
    rows: list[Row] = []
    used: set[int] = set()
    for parent, token in job.text.rows:
        row = job.rows[parent]
        assert row.table is not None
        table = pool.fork(row.table) if parent in used else row.table
        used.add(parent)
        rows.append(Row([*row.ids, token], table))
    for i, row in enumerate(job.rows):
        if i not in used and row.table is not None:
            pool.close(row.table)
    return rows


def _rows(logits: Tensor, live: Sequence[tuple[Text, range]]) -> Tensor:
    """Of the logits [N, V], those of these texts."""
    rows = [row for _, rows in live for row in rows]
    return logits if rows == [*range(len(logits))] else logits[rows]
