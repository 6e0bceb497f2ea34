"""Padding and masks that other libraries misread: patterns, sides, dtypes and shapes."""

import pytest
import torch

from headway.attention import attend
from headway.patterns import (
    Causal,
    Full,
    Global,
    GlobalKeys,
    GlobalQueries,
    Pattern,
    PerHead,
    Sink,
    Window,
)
from headway.tokens import Tokens
from tests.attention.small import BACKENDS, EXACT, qkv
from tests.naive import by_mask, naive, with_gradients

KINDS: list[Pattern] = [
    Full(),
    Causal(),
    Window.last(5),
    Window.around(4),
    Window(0, 5),
    Window.last(3, step=4),
    Window.around(2, step=3),
    Window.last(4) | Causal() & Sink(2),
    Window.around(2) | Global(),
    Causal() | GlobalKeys() & GlobalQueries(),
    PerHead(Window.last(3), Causal(), Full(), Window.around(2, step=2)),
]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pattern", KINDS, ids=str)
def test_a_padded_row_is_the_row_alone_for_every_kind(pattern: Pattern, side: str) -> None:
    """Outputs and gradients equal those of each row alone; padding holds NaN, and global tokens differ by row."""
    lengths, total = [33, 20, 1], 33
    marks = [[0, 7], [19], []]
    at = Tokens.from_lengths(lengths, total, side).with_global(marks)
    q, k, v = (t.masked_fill(~at.valid[:, None, :, None], float("nan")) for t in qkv(total, rows=3))
    grad = torch.randn(3, 4, total, 6, dtype=torch.float64)
    for backend in BACKENDS:
        together = with_gradients(
            lambda *t, b=backend: attend(*t, pattern, q_tokens=at, k_tokens=at, backend=b), grad, q, k, v
        )
        for b, n in enumerate(lengths):
            row = slice(total - n, total) if side == "left" else slice(0, n)
            tokens = Tokens.range(n).with_global(marks[b])
            alone = with_gradients(
                lambda *t, tokens=tokens: naive(*t, pattern, tokens, tokens),
                grad[b : b + 1, :, row],
                *(t[b : b + 1, :, row] for t in (q, k, v)),
            )
            for name, expected, batched in zip(("out", "dq", "dk", "dv"), alone, together, strict=True):
                torch.testing.assert_close(
                    batched[b : b + 1, :, row],
                    expected,
                    **EXACT,
                    msg=lambda m, w=(backend, name): f"{w}: {m}",
                )
                assert not batched[b, :, ~at.valid[b]].any(), (backend, name)


@pytest.mark.parametrize("backend", ["auto", "dense", "sdpa"])
@pytest.mark.parametrize(
    "shape", [(2, 4, 9, 9), (2, 1, 9, 9), (1, 4, 9, 9), (1, 1, 9, 9), (2, 1, 1, 9)], ids=str
)
def test_keep_is_true_where_a_pair_may_be_seen(backend: str, shape: tuple[int, ...]) -> None:
    """Compares with the formula, with gradients, a row that sees nothing, and NaN at a key that no query sees."""
    q, k, v = qkv(9)
    keep = torch.rand(shape) < 0.6
    keep[..., 4] = False
    if shape[2] > 1:
        keep[0, 0, 3] = False
    grad = torch.randn(q.shape, dtype=torch.float64)
    k_bad, v_bad = (t.index_fill(2, torch.tensor([4]), float("nan")) for t in (k, v))
    ours = with_gradients(lambda *t: attend(*t, keep=keep, backend=backend), grad, q, k_bad, v_bad)
    for a, b in zip(ours, with_gradients(lambda *t: by_mask(*t, keep), grad, q, k, v), strict=True):
        torch.testing.assert_close(a, b, **EXACT)
    inverted = attend(q, k, v, keep=~keep, backend=backend)
    torch.testing.assert_close(inverted, by_mask(q, k, v, ~keep), **EXACT)
    assert (inverted - ours[0]).abs().max() > 0.1


def test_an_attention_mask_is_the_row_alone_in_every_dtype_and_not_its_inverse() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]])
    q, k, v = qkv(6, rows=3)
    for dtype in (torch.bool, torch.int64, torch.int32, torch.uint8, torch.float32, torch.bfloat16):
        at = Tokens.from_attention_mask(mask.to(dtype))
        out = attend(q, k, v, Causal(), q_tokens=at, k_tokens=at)
        for b in range(3):
            real = mask[b].bool()
            alone = attend(*(t[b : b + 1, :, real] for t in (q, k, v)), Causal())
            torch.testing.assert_close(out[b : b + 1, :, real], alone, **EXACT)
            assert not out[b, :, ~real].any()
    assert Tokens.from_attention_mask(1 - mask).index.tolist()[0] == [0, 1, -1, -1, -1, -1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_that_is_marked_global_is_padding_all_the_same(backend: str) -> None:
    """`with_global` refuses such marks (tests/test_tokens.py); in Tokens made by hand they change nothing."""
    plain = Tokens.from_lengths([40, 25], 40).with_global([[3], [0, 24]])
    marks = plain.globals.clone()
    marks[1, 25:] = True
    by_hand = Tokens(plain.index, is_global=marks)
    q, k, v = qkv(40)
    for pattern in (Window.around(2) | Global(), Window.last(2) | Causal() & GlobalKeys()):
        runs = [attend(q, k, v, pattern, q_tokens=t, k_tokens=t, backend=backend) for t in (plain, by_hand)]
        torch.testing.assert_close(*runs, **EXACT)
        assert not runs[1][1, :, 25:].any()
