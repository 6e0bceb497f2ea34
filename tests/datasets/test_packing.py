"""Packing: each token is there once, documents are told apart, and the rows of a file are those of `pack`."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.data import Rows, Span, TokenFile, TokenFileWriter, pack
from headway.errors import DataError

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=12)


@given(st.lists(st.integers(0, 12), max_size=12), st.integers(1, 9))
def test_rows_are_full_and_nothing_is_lost(lengths: list[int], length: int) -> None:
    rows = list(pack(lengths, length))
    assert all(sum(s.stop - s.start for s in row) == length for row in rows[:-1])
    assert all(0 < sum(s.stop - s.start for s in row) <= length for row in rows)
    for document, n in enumerate(lengths):
        spans = [s for row in rows for s in row if s.document == document]
        assert [t for s in spans for t in range(s.start, s.stop)] == list(range(n))


def test_edges() -> None:
    assert list(pack([4], 4)) == [[Span(0, 0, 4)]]
    assert list(pack([4, 4], 4)) == [[Span(0, 0, 4)], [Span(1, 0, 4)]]
    assert list(pack([9], 4)) == [[Span(0, 0, 4)], [Span(0, 4, 8)], [Span(0, 8, 9)]]
    assert list(pack([1, 2, 3], 4)) == [[Span(0, 0, 1), Span(1, 0, 2), Span(2, 0, 1)], [Span(2, 1, 3)]]
    assert list(pack([], 4)) == []
    for bad in (0, -1):
        with pytest.raises(DataError, match=f"at least 1 token, got length {bad}"):
            list(pack([1], bad))


def rows_of(path: Path, lengths: list[int], length: int) -> Rows:
    """Returns rows of documents whose ids are 100 * document + place."""
    with TokenFileWriter(path, 100_000) as writer:
        for d, n in enumerate(lengths):
            writer.add([100 * d + i for i in range(n)])
    return Rows(TokenFile(path), length)


@given(LENGTHS.filter(lambda x: sum(x) > 1), st.integers(1, 9))
def test_each_token_but_the_first_of_a_document_is_a_target_once(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int
) -> None:
    rows = rows_of(tmp_path_factory.mktemp("t") / "x", lengths, length)
    targets: list[int] = []
    for i in range(len(rows)):
        row = rows[i]
        trained = row.targets != -100
        # the next token of the same document
        assert np.array_equal(row.targets[trained], row.ids[trained] + 1)
        targets += row.targets[trained].tolist()
    assert targets == [100 * d + i for d, n in enumerate(lengths) for i in range(1, n)]


@given(LENGTHS.filter(lambda x: sum(x) > 1), st.integers(1, 9))
def test_the_rows_of_a_file_are_those_of_pack(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int
) -> None:
    rows = rows_of(tmp_path_factory.mktemp("t") / "x", lengths, length)
    inputs = [*lengths[:-1], lengths[-1] - 1]  # the very last token is only a target
    expected = list(pack(inputs, length))
    assert len(rows) == len(expected)
    for i, spans in enumerate(expected):
        ids = [100 * s.document + t for s in spans for t in range(s.start, s.stop)]
        assert rows[i].ids.tolist() == ids
        assert rows.batch([i]).inputs["ids"].tolist() == [ids + [0] * (length - len(ids))]
        assert rows[i].lengths == [s.stop - s.start for s in spans]


def test_a_batch_tells_its_documents_apart(tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "x", [3, 5, 2], 4)
    inputs, targets = rows.batch([0, 2])
    tokens = inputs["tokens"]
    assert inputs["ids"].tolist() == [[0, 1, 2, 100], [200, 0, 0, 0]]
    assert targets.tolist() == [[1, 2, -100, 101], [201, -100, -100, -100]]
    assert tokens.index.tolist() == [[0, 1, 2, 0], [0, -1, -1, -1]]
    assert tokens.documents[0].tolist() == [0, 0, 0, 1]


def test_too_small_a_corpus(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1 tokens; at least 2 are needed to predict one"):
        rows_of(tmp_path / "x", [1], 4)
    rows = rows_of(tmp_path / "x", [2], 4)
    assert len(rows) == 1
    with pytest.raises(IndexError, match="row 1 of 1"):
        rows[1]
