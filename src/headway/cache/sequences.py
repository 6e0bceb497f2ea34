"""How many tokens each sequence has, kept once for all layers of a decoder, and the chunks that make it longer.

Legend: B rows, T slots of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from headway.errors import CacheError
from headway.tokens import Tokens

Documents = dict[int, int]
"""Tokens of each document of a row; documents without tokens are left out. Not changed once it is made."""
Span = tuple[int, int]
"""(begin, end): the indices begin..end-1."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """What a cache must know of the tokens of a forward pass; read once, and used by every layer.

    Attributes:
        given: the tokens as they were given.
        tokens: the same with `start` wherever they are regular, and without `document` where all are document 0.
        spans: for each of B rows, the indices of each document that it continues.
        before: `SequenceLengths.rows` before the chunk.
        any_global: whether some token is global.
    """

    given: Tokens
    tokens: Tokens
    spans: Sequence[dict[int, Span]]
    before: Sequence[Documents]
    any_global: bool

    def is_of(self, tokens: Tokens) -> bool:
        """Whether these are the tokens that the chunk was read from, or equal ones."""
        given = self.given
        if tokens is given:
            return True
        names = ("index", "documents", "globals", "positions")
        return all(torch.equal(getattr(tokens, name), getattr(given, name)) for name in names)


class SequenceLengths:
    """How many tokens each sequence has: a sequence is a document of a row, and document 0 in rows that are not packed.

    Attributes:
        rows: of each row, the tokens of its documents; another list after every change. A layer that has another one
            than this has not stored the last chunk yet.
        chunk: what was appended last, None after any other change.
        layers: how many layers share this object.
    """

    def __init__(self, batch: int, device: torch.device | str | None = None) -> None:
        self.rows: Sequence[Documents] = [{}] * batch
        self.device = torch.zeros(0, device=device).device
        self.chunk: Chunk | None = None
        self.layers = 0

    def append(self, tokens: Tokens) -> Chunk:
        """Takes a chunk of tokens [B|1, T]. Raises CacheError, and changes nothing, unless every document's indices
        go on where it ended, one by one."""
        batch = len(self.rows)
        if tokens.device != self.device:
            raise CacheError(
                f"Cache.update: the tokens are on {tokens.device}, the cache is on {self.device}; "
                "move them: tokens.to(device)"
            )
        if tokens.rows not in (1, batch):
            raise CacheError(
                f"Cache.update: tokens of {tokens.rows} rows for a cache of {batch}; give one "
                "description per row, or one row that stands for all"
            )
        spans, rows = _spans(tokens, batch), []
        for b, (row, span) in enumerate(zip(self.rows, spans, strict=True)):
            for document, (begin, _) in span.items():
                length = row.get(document, 0)
                if begin != length:
                    raise CacheError(
                        f"Cache.update: {name(b, document)} has seen {length} tokens, so the next index is {length}, "
                        f"but the chunk's first is {begin}; number it from there (Tokens.range({tokens.count}, "
                        f"start={length}), next_tokens, next_packed), or trim the cache first"
                    )
            rows.append(row | {document: end for document, (_, end) in span.items()})
        begin, end = spans[0].get(0, (0, 0)) if spans else (0, 0)
        regular = 0 < end - begin == tokens.count and all(span == spans[0] for span in spans)
        start, packed = begin if regular else None, any(document for span in spans for document in span)
        known = tokens
        if start != tokens.start or (tokens.document is not None and not packed):
            known = replace(tokens, document=tokens.document if packed else None, start=start)
        any_global = tokens.is_global is not None and bool((tokens.is_global & tokens.valid).any())
        self.chunk = Chunk(tokens, known, spans, self.rows, any_global)
        self.rows = rows
        return self.chunk


def _spans(tokens: Tokens, batch: int) -> Sequence[dict[int, Span]]:
    """For each row the indices of each document.

    For index [[0, 5, 1], [-1, 8, 9]] and document [[3, 0, 3], [0, 0, 0]]: [{3: (0, 2), 0: (5, 6)}, {0: (8, 10)}].
    """
    if tokens.start is not None and tokens.document is None and tokens.count:
        return [{0: (tokens.start, tokens.start + tokens.count)}] * batch
    rows: list[dict[int, Span]] = []
    every = tokens.expand(batch)
    documents = repeat(None) if every.document is None else every.document.tolist()
    for b, (index_T, document_T) in enumerate(zip(every.index.tolist(), documents, strict=False)):
        spans: dict[int, Span] = {}
        for index, document in zip(index_T, document_T or repeat(0), strict=False):
            if index < 0:
                continue
            begin, end = spans.get(document, (index, index))
            if index != end:
                of = "" if document_T is None else f" of documents {document_T}"
                raise CacheError(
                    "Cache.update: the tokens of a document must come in order with no index left out (empty slots, "
                    f"-1, may stand anywhere between them); row {b} has indices {index_T}{of}"
                )
            spans[document] = begin, index + 1
        rows.append(spans)
    return rows


def name(row: int, document: int) -> str:
    """A sequence in an error."""
    return f"document {document} of row {row}" if document else f"row {row}"


def trimmed(
    rows: Sequence[Documents], n: int | Sequence[int | Mapping[int, int]] | Tensor
) -> list[Documents]:
    """Lengths after the last tokens are forgotten: n of every row, n[b] of row b, or n[b][d] of its document d.

    Raises CacheError where a sequence has fewer tokens, and for a number for a row of several documents."""
    given = n.tolist() if isinstance(n, Tensor) else n
    counts = given if isinstance(given, Sequence) else [given] * len(rows)
    if len(counts) != len(rows) or not all(isinstance(count, int | Mapping) for count in counts):
        raise CacheError(
            f"Cache.trim: give one whole number, or one for each of the {len(rows)} rows, got {given}; for a packed "
            "row give how many of each document, {document: n}"
        )
    ends = []
    for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if isinstance(count, int) and count and not row.keys() <= {0}:
            raise CacheError(
                f"Cache.trim: row {b} has the documents {sorted(row)}; say how many tokens of each to forget, "
                f"{{document: n}}, got {count}"
            )
        of = count if isinstance(count, Mapping) else {0: count}
        for document, some in of.items():
            if some not in range(row.get(document, 0) + 1):
                raise CacheError(
                    f"Cache.trim: {name(b, document)} has seen {row.get(document, 0)} tokens and cannot forget {some}"
                )
        left = {document: length - of.get(document, 0) for document, length in row.items()}
        ends.append({document: length for document, length in left.items() if length})
    return ends
