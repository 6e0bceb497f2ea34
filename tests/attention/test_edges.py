"""Cases that other libraries get wrong: lengths at block edges, long and one-sided windows, ragged rows."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.attention import attend
from headway.errors import BackendError
from headway.patterns import Causal, Global, GlobalKeys, Pattern, Sink, Window
from headway.tokens import Tokens
from tests.naive import naive, with_gradients

EDGES = [1, 2, 63, 64, 65, 127, 128, 129, 255, 256, 257]


def same(
    pattern: Pattern, q_tokens: Tokens, k_tokens: Tokens, backend: str = "banded", rows: int = 2
) -> None:
    """Checks that output and gradients equal the formula, in float64."""
    shapes = [(rows, h, t.count, 4) for h, t in ((4, q_tokens), (2, k_tokens), (2, k_tokens))]
    q, k, v = (torch.randn(s, dtype=torch.float64) for s in shapes)
    grad = torch.randn(q.shape, dtype=torch.float64)
    ours = with_gradients(
        lambda *t: attend(*t, pattern, q_tokens=q_tokens, k_tokens=k_tokens, backend=backend), grad, q, k, v
    )
    plain = with_gradients(lambda *t: naive(*t, pattern, q_tokens, k_tokens), grad, q, k, v)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("n", EDGES)
def test_lengths_around_every_block_size(n: int) -> None:
    at = Tokens.range(n)
    for pattern in (
        Causal(),
        Window.last(64),
        Window.around(65),
        Window.last(5, step=3) | Causal() & Sink(1),
    ):
        same(pattern, at, at)


@pytest.mark.parametrize("backend", ["auto", "dense", "sdpa", "banded", "diagonal", "chunks"])
@pytest.mark.parametrize("keys", [1, 8, 9, 10, 100])
def test_windows_shorter_as_long_as_and_longer_than_the_row(backend: str, keys: int) -> None:
    at = Tokens.range(9)
    same(Window.last(keys), at, at, backend)
    same(Window.around(keys - 1), at, at, backend)
    if keys >= 9:
        q, k, v = (torch.randn(1, 1, 9, 4, dtype=torch.float64) for _ in range(3))
        torch.testing.assert_close(
            attend(q, k, v, Window.last(keys)), attend(q, k, v, Causal()), rtol=0, atol=1e-14
        )


@pytest.mark.parametrize("backend", ["dense", "sdpa", "banded", "diagonal", "chunks"])
def test_one_sided_windows_see_one_side(backend: str) -> None:
    at = Tokens.range(70)
    same(Window(5, 0), at, at, backend)
    same(Window(0, 5), at, at, backend)
    same(Window(3, 7, step=2), at, at, backend)


@pytest.mark.parametrize("backend", ["dense", "sdpa", "banded", "auto"])
def test_chunks_of_queries_anywhere_in_the_row(backend: str) -> None:
    """With T != S, token indices say where the queries are; no corner of the mask is special."""
    for queries, keys, start in ((1, 5, 4), (3, 9, 6), (4, 9, 2), (9, 4, 0), (130, 200, 70), (5, 200, 0)):
        at_q, at_k = Tokens.range(queries, start=start), Tokens.range(keys)
        for pattern in (Causal(), Window.last(4), Window.around(6), Causal() & Sink(2)):
            same(pattern, at_q, at_k, backend)


@pytest.mark.parametrize("backend", ["dense", "sdpa", "banded", "diagonal"])
def test_global_tokens_none_some_all_and_different_per_row(backend: str) -> None:
    n = 67
    ragged = Tokens.from_lengths([n, 40], n, "left")
    for marks in ([[], [0]], [[0, 5, 66], [39]], [list(range(n)), list(range(40))]):
        at = ragged.with_global(marks)
        same(Window.around(3) | Global(), at, at, backend)
        same(Window.last(4) | Causal() & GlobalKeys(), at, at, backend)


def test_a_pair_in_window_and_global_columns_counts_once() -> None:
    """Overlapping disjuncts: a global token inside the window has one weight, not two."""
    at = Tokens.range(5).with_global([2])
    q = torch.zeros(1, 1, 5, 4)
    v = torch.eye(5).view(1, 1, 5, 5)
    for backend in ("dense", "banded", "diagonal"):
        out = attend(q, q, v, Window.around(1) | Global(), q_tokens=at, k_tokens=at, backend=backend)
        torch.testing.assert_close(out[0, 0, 1], torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0]) / 3)


def test_a_whole_row_of_padding_beside_a_full_one() -> None:
    at = Tokens.from_lengths([0, 66], 66)
    for backend in ("dense", "sdpa", "banded", "diagonal"):
        same(Causal(), at, at, backend)
        same(Window.around(9), at, at, backend)


@pytest.mark.parametrize(
    ("index", "document", "refused"),
    [
        ([[0, -1, 1]], None, True),
        ([[0, 1, -1, 2, 3]], None, True),
        ([[0, -1, -1, 3, 4]], None, False),
        ([[-1, 0, 1, 2, -1]], None, False),
        ([[1, 0]], None, True),
        ([[0, 1, 0, 1]], None, True),
        ([[0, 1, 0, 1]], [[4, 4, 2, 2]], False),
        ([[0, 0, 1, 2, 2, -1]], [[1, 2, 2, 2, 1, 2]], True),
        ([[0, 1, 2], [0, -1, 1]], None, True),
    ],
)
def test_diagonals_of_tokens_with_empty_slots_between_them_are_right_or_refused(
    index: list[list[int]], document: list[list[int]] | None, refused: bool
) -> None:
    """A diagonal of slots is one of indices only if a document's tokens lie as far apart as their indices."""
    at = Tokens(torch.tensor(index), None if document is None else torch.tensor(document))
    for pattern in (Causal(), Window.around(1), Window.last(2) | Sink(1)):
        if refused:
            with pytest.raises(BackendError, match="the tokens of a document must be contiguous, in order"):
                same(pattern, at, at, "diagonal")
        else:
            same(pattern, at, at, "diagonal")


@pytest.mark.parametrize("backend", ["diagonal", "chunks"])
@given(
    st.lists(st.lists(st.sampled_from([-1, 0, 0, 0, 1]), min_size=9, max_size=9), min_size=1, max_size=2),
    st.booleans(),
    st.sampled_from([Window.last(3), Window.around(2), Window(1, 4), Window.last(2, step=2), Window(0, 0)]),
)
def test_windows_over_slots_are_right_or_refused(
    backend: str, documents: list[list[int]], renumbered: bool, pattern: Pattern
) -> None:
    """Document -1 is an empty slot, anywhere; indices count it, or number the tokens without it."""
    document = torch.tensor(documents)
    same_document = document[:, :, None] == document[:, None, :]
    slot = torch.arange(9).expand(document.shape)
    index = (same_document & (slot[:, None, :] < slot[:, :, None])).sum(-1) if renumbered else slot
    at = Tokens(torch.where(document < 0, -1, index), document)
    aligned = all(
        len({int(index[b, i]) - i for i in range(9) if row[i] == d}) <= 1
        for b, row in enumerate(documents)
        for d in (0, 1)
    )
    with nullcontext() if aligned else pytest.raises(BackendError, match="must be contiguous, in order"):
        same(pattern, at, at, backend)
