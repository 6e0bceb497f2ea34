"""Patterns by head: which heads run together, what is copied for that, and that results do not change."""

import pytest
import torch
from torch import Tensor

from headway.attention import attend, select
from headway.attention.call import Call
from headway.partial import Partial
from headway.patterns import Causal, Pattern, PerHead, Window
from headway.scores import ALiBi, RelativeBias, alibi_slopes
from headway.tokens import Tokens
from tests.naive import naive, with_gradients

A, B = Window.last(4), Causal()
GROUPS = {
    "halves": ([A, A, A, A, B, B, B, B], 8, True),
    "every second one": ([A, B, A, B, A, B, A, B], 8, True),
    "the first and the others": ([A, B, B, B, B, B, B, B], 8, True),
    "one each": ([Window.last(n) for n in range(1, 9)], 8, True),
    "no regular step": ([A, B, B, A, B, A, A, A], 8, False),
    "halves of four kv heads": ([A, A, A, A, B, B, B, B], 4, True),
    "halves of one kv head": ([A, A, A, A, B, B, B, B], 1, True),
    "a kv head each": ([A, B, A, B, A, B, A, B], 4, True),
}


@pytest.mark.parametrize("backend", ["dense", "sdpa", "banded", "diagonal"])
@pytest.mark.parametrize("name", GROUPS)
def test_heads_that_lie_a_regular_step_apart_are_not_copied(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results and gradients equal the formula; backends receive views, not copies, if the step is regular."""
    parts, kv_heads, views = GROUPS[name]
    pattern, at = PerHead(*parts), Tokens.range(21)
    q, k, v = (torch.randn(2, h, 21, 6, dtype=torch.float64) for h in (8, kv_heads, kv_heads))
    grad = torch.randn(q.shape, dtype=torch.float64)
    ours = with_gradients(lambda *t: attend(*t, pattern, backend=backend), grad, q, k, v)
    truth = with_gradients(lambda *t: naive(*t, pattern, at, at), grad, q, k, v)
    for a, b in zip(ours, truth, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
    calls: list[Call] = []
    run = select.run

    def note(call: Call, backend: str, lse: bool) -> Partial:
        calls.append(call)
        return run(call, backend, lse)

    monkeypatch.setattr(select, "run", note)
    attend(q, k, v, pattern, backend=backend)
    assert all(_within(call, q, k, v) for call in calls) == views


def _within(call: Call, q: Tensor, k: Tensor, v: Tensor) -> bool:
    tensors = (call.q, call.keys[0].k, call.keys[0].v)
    pairs = zip(tensors, (q, k, v), strict=True)
    return all(a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() for a, b in pairs)


@pytest.mark.parametrize("name", GROUPS)
def test_views_and_copies_of_heads_give_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs `auto` with scores that have a number for each head, and with dropout, which is keyed by head."""
    parts, kv_heads, _ = GROUPS[name]
    inputs = [torch.randn(2, h, 70, 16) for h in (8, kv_heads, kv_heads)]
    grad = torch.randn(2, 8, 70, 16)
    score = (ALiBi(alibi_slopes(8)), RelativeBias(torch.randn(32, 8)))

    def results() -> tuple[Tensor, ...]:
        return with_gradients(
            lambda *t: attend(*t, PerHead(*parts), score=score, dropout=0.2, seed=3), grad, *inputs
        )

    views = results()
    run = select.run

    def copied(call: Call, backend: str, lse: bool) -> Partial:
        copy = Call(
            **{
                **vars(call),
                "q": call.q.contiguous(),
                "keys": tuple(p.map(Tensor.contiguous) for p in call.keys),
            }
        )
        return run(copy, backend, lse)

    monkeypatch.setattr(select, "run", copied)
    for a, b in zip(views, results(), strict=True):
        assert torch.equal(a, b)


def test_a_mask_of_every_head_goes_with_its_head() -> None:
    parts: list[Pattern] = [A, B, A, B]
    q, k, v = (torch.randn(1, 4, 9, 6, dtype=torch.float64) for _ in range(3))
    keep = (torch.rand(1, 4, 9, 9) < 0.6) | torch.eye(9, dtype=torch.bool)
    for backend in ("dense", "sdpa"):
        together = attend(q, k, v, PerHead(*parts), keep=keep, backend=backend)
        for h, pattern in enumerate(parts):
            head = slice(h, h + 1)
            alone = attend(q[:, head], k[:, head], v[:, head], pattern, keep=keep[:, head], backend="dense")
            torch.testing.assert_close(together[:, head], alone, rtol=1e-12, atol=1e-12)
