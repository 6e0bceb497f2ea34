"""Hypothesis strategies for patterns and tokens."""

import torch
from hypothesis import strategies as st

from headway.patterns import (
    Causal,
    Chunk,
    Full,
    GlobalKeys,
    GlobalQueries,
    Pattern,
    Sink,
    Window,
)
from headway.tokens import Tokens

small = st.integers(0, 9)

leaves: st.SearchStrategy[Pattern] = st.one_of(
    st.just(Full()),
    st.just(Causal()),
    st.just(GlobalKeys()),
    st.just(GlobalQueries()),
    st.builds(Sink, st.integers(0, 4)),
    st.builds(Chunk, st.integers(1, 9)),
    st.builds(Window, small, small, st.integers(1, 3)),
)
patterns: st.SearchStrategy[Pattern] = st.recursive(
    leaves,
    lambda p: st.one_of(
        st.tuples(p, p).map(lambda t: t[0] & t[1]), st.tuples(p, p).map(lambda t: t[0] | t[1])
    ),
    max_leaves=4,
)


counts = st.integers(1, 40)


@st.composite
def tokens(draw: st.DrawFn, count: st.SearchStrategy[int] = counts) -> Tokens:
    """Draws tokens of one side of a call: regular, padded on either side, packed, with holes, with global tokens."""
    n = draw(count)
    kind = draw(st.sampled_from(["range", "left", "right", "packed", "holes"]))
    rows = draw(st.integers(1, 2))
    if kind == "range":
        result = Tokens.range(n, start=draw(st.sampled_from([0, 5])))
    elif kind == "packed":
        result = Tokens.packed([_lengths(draw, n) for _ in range(rows)], n)
    elif kind == "holes":
        mask = draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=rows, max_size=rows))
        result = Tokens.from_attention_mask(torch.tensor(mask, dtype=torch.bool).view(rows, n))
    else:
        lengths = draw(st.lists(st.integers(0, n), min_size=rows, max_size=rows))
        result = Tokens.from_lengths(lengths, n, kind)
    if draw(st.booleans()):
        marks = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        result = result.with_global(torch.tensor(marks, dtype=torch.bool).unsqueeze(0) & result.valid)
    return result


def _lengths(draw: st.DrawFn, n: int) -> list[int]:
    lengths, left = [], n
    while left > 0 and len(lengths) < 4:
        lengths.append(draw(st.integers(1, left)))
        left -= lengths[-1]
    return lengths
