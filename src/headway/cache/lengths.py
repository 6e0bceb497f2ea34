"""How many tokens each sequence has, kept once for all layers of a decoder.

Legend: B rows, T slots of a chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.cache.chunk import Chunk
from headway.errors import CacheError
from headway.tokens import Tokens

Documents = dict[int, int]
"""Tokens of each document of a row; documents without tokens are left out."""


class SequenceLengths:
    """How many tokens each sequence has: a sequence is a document of a row, and document 0 in rows that are not packed.

    Attributes:
        rows: of each row, the tokens of its documents.
        chunk: what was appended last, None after any other change.
        steps: how many chunks were appended. A layer that counts fewer has not stored the last one yet.
        layers: how many layers share this object.
    """

    def __init__(self, batch: int, device: torch.device | str | None = None) -> None:
        self.rows: list[Documents] = [{} for _ in range(batch)]
        self.device = torch.zeros(0, device=device).device
        self.chunk: Chunk | None = None
        self.steps = self.layers = 0

    def append(self, tokens: Tokens) -> Chunk:
        """Takes a chunk of tokens [B|1, T]. Raises CacheError, and changes nothing, unless every document's indices
        go on where it ended."""
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
        chunk = Chunk.read(tokens, batch)
        for b, (row, spans) in enumerate(zip(self.rows, chunk.spans, strict=True)):
            for document, (begin, _) in spans.items():
                length = row.get(document, 0)
                if begin != length:
                    raise CacheError(
                        f"Cache.update: {name(b, document)} has seen {length} tokens, so the next index is {length}, "
                        f"but the chunk's first is {begin}; number it from there (Tokens.range({tokens.count}, "
                        f"start={length}), next_tokens, next_packed), or trim the cache first"
                    )
        for row, spans in zip(self.rows, chunk.spans, strict=True):
            for document, (_, end) in spans.items():
                row[document] = end
        self.chunk = chunk
        self.steps += 1
        return chunk

    @property
    def before(self) -> list[Documents]:
        """`rows` before the last chunk."""
        if self.chunk is None:
            return self.rows
        begins = ({d: begin for d, (begin, _) in spans.items()} for spans in self.chunk.spans)
        return [_some({**row, **begin}) for row, begin in zip(self.rows, begins, strict=True)]

    def trim_to(self, rows: Sequence[Documents]) -> None:
        """Goes back to the lengths that `trimmed` gave."""
        self.rows, self.chunk = list(rows), None

    def select_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was."""
        self.rows, self.chunk = [dict(self.rows[r]) for r in rows], None


def name(row: int, document: int) -> str:
    """A sequence in an error."""
    return f"document {document} of row {row}" if document else f"row {row}"


def _some(row: Mapping[int, int]) -> Documents:
    return {document: n for document, n in row.items() if n}


def trimmed(
    rows: Sequence[Documents], n: int | Sequence[int | Mapping[int, int]] | Tensor
) -> list[Documents]:
    """Lengths after the last tokens are forgotten: n of every row, n[b] of row b, or n[b][d] of its document d.

    Raises CacheError where a sequence has fewer tokens, and for a number for a row of several documents."""
    batch = len(rows)
    given = n.tolist() if isinstance(n, Tensor) else n
    counts = [given] * batch if isinstance(given, int) else list(given) if isinstance(given, Sequence) else []
    whole = all(
        isinstance(c, int) for row in counts for c in (row.values() if isinstance(row, Mapping) else [row])
    )
    if len(counts) != batch or not whole:
        raise CacheError(
            f"Cache.trim: give one whole number, or one for each of the {batch} rows, got {given}; for a packed row "
            "give how many of each document, {document: n}"
        )
    ends = []
    for b, (row, count) in enumerate(zip(rows, counts, strict=True)):
        if not isinstance(count, Mapping):
            if count and not row.keys() <= {0}:
                raise CacheError(
                    f"Cache.trim: row {b} has the documents {sorted(row)}; say how many tokens of each to forget, "
                    f"{{document: n}}, got {count}"
                )
            count = {0: count}
        for document, some in count.items():
            length = row.get(document, 0)
            if not 0 <= some <= length:
                raise CacheError(
                    f"Cache.trim: {name(b, document)} has seen {length} tokens and cannot forget {some}"
                )
        ends.append(_some({document: length - count.get(document, 0) for document, length in row.items()}))
    return ends
