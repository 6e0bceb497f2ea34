"""Longformer's claims, rows 95, 104 and 110: the receptive field of a stack, and the number of computed pairs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.models import cost
from headway.patterns import Full, Global, Pattern, PerHead, Window, pairs
from headway.positions import NoPositions
from headway.tokens import Tokens
from tests.models.longformer_rows import HEADS, encoder, ids, made

windows = st.builds(Window, st.integers(0, 3), st.integers(0, 3), st.integers(1, 3))
by_layer: st.SearchStrategy[Pattern] = st.one_of(
    windows,
    st.tuples(windows, windows).map(lambda pair: pair[0] | pair[1]),
    st.lists(windows, min_size=HEADS, max_size=HEADS).map(lambda heads: PerHead(*heads)),
)


@given(st.lists(by_layer, min_size=1, max_size=3), st.booleans())
def test_row_104_the_field_by_gradient_is_the_predicted_one(patterns: list[Pattern], bare: bool) -> None:
    """The token in the middle depends on inputs from `before` to `after` tokens away, and on none beyond."""
    spec = encoder(patterns, len(patterns), positions=NoPositions(), global_projections=not bare)
    before, after = cost.reach(spec)
    assert before is not None
    assert after is not None
    assert cost.receptive_field(spec) == 1 + before + after
    model = made(spec)
    embedded: list[Tensor] = []

    def keep(_module: object, _inputs: object, out: Tensor) -> None:
        out.retain_grad()
        embedded.append(out)

    assert model.model.embed_tokens is not None
    model.model.embed_tokens.register_forward_hook(keep)
    states = model(ids(1, before + after + 7))
    states[0, before + 3].pow(2).sum().backward()
    grad = embedded[0].grad
    assert grad is not None
    seen = grad[0].abs().amax(-1).nonzero().flatten()
    assert (int(seen[0]), int(seen[-1])) == (3, before + 3 + after)


def test_row_104_the_paper_s_number() -> None:
    """l layers of window w reach l w other tokens: 12 of 512 reach 6144, beyond the 4096 of the model, and itself."""
    spec = encoder([Window.around(256)], 12)
    assert cost.receptive_field(spec) == 1 + 12 * 512
    assert cost.reach(spec) == (12 * 256, 12 * 256)
    assert cost.receptive_field(spec.with_patterns(Window.around(256, step=3))) == 1 + 3 * 12 * 512
    assert cost.receptive_field(encoder(Window.around(256) | Global())) is None


@pytest.mark.parametrize(("k", "step"), [(1, 1), (8, 1), (8, 2), (8, 4), (256, 1), (256, 2)])
def test_rows_95_and_110_pairs_are_counted(k: int, step: int) -> None:
    """n (w + 1) pairs but for the edges, where the first and last k step tokens lack up to k on a side: w + 1 = 2 k + 1
    pairs for each token, dilated or not. From n to 2 n they double; those of full attention grow fourfold."""
    for n in (2048, 4096):
        counted = pairs(Window.around(k, step=step), n)
        assert counted == n * (2 * k + 1) - step * k * (k + 1)
        full = pairs(Full(), n)
        assert full == n * n
    spec = encoder(Window.around(k, step=step) | Global(), 3)
    assert cost.attention_pairs(spec, 2048) == 3 * HEADS * pairs(Window.around(k, step=step), 2048)


def test_row_110_global_tokens_add_2_n_pairs_each() -> None:
    n, k, marks = 1000, 8, [100, 300, 301]
    tokens = Tokens.range(n).with_global(marks)
    window_pairs = pairs(Window.around(k), n)
    added = pairs(Window.around(k) | Global(), n, tokens=tokens) - window_pairs
    columns_and_rows = 2 * n * len(marks) - len(marks) ** 2
    in_window = sum(
        abs(i - j) <= k and (i in marks or j in marks)
        for i in range(n)
        for j in range(max(0, i - k), min(n, i + k + 1))
    )
    assert added == columns_and_rows - in_window
