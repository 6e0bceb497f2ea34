"""A chunk of tokens, read into Python numbers: which sequences it continues, and by how much.

Legend: B rows, T slots of the chunk, N tokens in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import repeat

from headway.errors import CacheError
from headway.tokens import Tokens

Span = tuple[int, int]
"""(begin, end): the indices begin..end-1."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """What a cache must know of the tokens of a forward pass; read once, and used by every layer.

    Attributes:
        given: the tokens as they were given.
        tokens: the same with `start` wherever they are regular, and without `document` where all are document 0.
        spans: for each of B rows, the indices of each document that it continues.
        any_global: whether some token is global.
    """

    given: Tokens
    tokens: Tokens
    spans: tuple[dict[int, Span], ...]
    any_global: bool = False

    @staticmethod
    def read(given: Tokens, batch: int) -> Chunk:
        """The chunk of these tokens for a cache of `batch` rows.

        Raises CacheError where the indices of a document do not count up by one over the slots that are not
        empty."""
        any_global = given.is_global is not None and bool((given.is_global & given.valid).any())
        if given.count == 0:
            return Chunk(given, given, ({},) * batch)
        if given.start is not None and given.document is None:
            return Chunk(given, given, ({0: (given.start, given.start + given.count)},) * batch, any_global)
        every = given.expand(batch) if given.document is not None else given
        read = _spans(every)
        spans = tuple(read if len(read) == batch else read * batch)
        packed = any(document for row in read for document in row)
        first = read[0].get(0) if read else None
        regular = first is not None and first[1] - first[0] == given.count and all(s == read[0] for s in read)
        start = first[0] if regular and first is not None else None
        tokens = replace(given, document=given.document if packed else None, start=start)
        return Chunk(given, tokens, spans, any_global)

    @property
    def packed(self) -> bool:
        """Whether there are tokens of other documents than 0."""
        return self.tokens.document is not None

    def is_of(self, tokens: Tokens) -> bool:
        """Whether these are the tokens that the chunk was read from, or equal ones."""
        given = self.given
        if tokens is given:
            return True
        if (tokens.count, tokens.rows) != (given.count, given.rows):
            return False
        names = ("index", "documents", "globals", "positions")
        return all(bool((getattr(tokens, name) == getattr(given, name)).all()) for name in names)


def _spans(tokens: Tokens) -> list[dict[int, Span]]:
    """For each row the indices of each document.

    For index [[0, 5, 1], [-1, 8, 9]] and document [[3, 0, 3], [0, 0, 0]]: [{3: (0, 2), 0: (5, 6)}, {0: (8, 10)}].
    """
    rows: list[dict[int, Span]] = []
    document_BT = None if tokens.document is None else tokens.documents.expand_as(tokens.index).tolist()
    for b, index_T in enumerate(tokens.index.tolist()):
        spans: dict[int, Span] = {}
        document_T = repeat(0) if document_BT is None else document_BT[b]
        for index, document in zip(index_T, document_T, strict=False):
            if index < 0:
                continue
            begin, end = spans.get(document, (index, index))
            if index != end:
                of = "" if document_BT is None else f" of documents {document_T}"
                raise CacheError(
                    "Cache.update: the tokens of a document must come in order with no index left out (empty slots, "
                    f"-1, may stand anywhere between them); row {b} has indices {index_T}{of}"
                )
            spans[document] = begin, index + 1
        rows.append(spans)
    return rows
