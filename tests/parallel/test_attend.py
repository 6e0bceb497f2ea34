"""Attention over sharded rows equals attention in one process: the loss and every gradient."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.errors import ConfigError
from headway.parallel import ContextParallel, Exchange, ShardLayout
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, PerHead, Sink, Window
from headway.scores import ALiBi, Bias, RelativeBias, RelativeKey, Score, SoftCap, alibi_slopes
from headway.tokens import Tokens
from tests import strategies
from tests.parallel.simulation import simulate

LAYOUTS = {"contiguous": ShardLayout.contiguous, "zigzag": ShardLayout.zigzag}
SUM = {"rtol": 1e-11, "atol": 1e-12}
"""Sums of float64 in another order: a few hundred roundings of 1e-16 relative to numbers of about 1."""


def drawn(count: int, dtype: torch.dtype = torch.float64, rows: int = 2, heads: int = 4) -> list[Tensor]:
    """Returns q, k, v (two query heads for each kv head), and weights of out and lse in a loss."""
    random = torch.Generator().manual_seed(count)
    shapes = ((rows, heads, count, 6), (rows, 2, count, 6), (rows, 2, count, 5), (rows, heads, count, 5))
    tensors = [torch.randn(shape, generator=random, dtype=torch.float64).to(dtype) for shape in shapes]
    return [*tensors, torch.randn(rows, heads, count, generator=random, dtype=torch.float64)]


def loss_of(out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor) -> Tensor:
    """Returns a loss that is linear in out and in the finite lse."""
    return (out * d_out).sum() + (lse * d_lse).masked_fill(lse == float("-inf"), 0.0).sum()


def alone(
    pattern: Pattern, tokens: Tokens, inputs: Sequence[Tensor], steps: Sequence[Score] = ()
) -> list[Tensor]:
    """Returns the loss and the gradients for q, k, v and the scores' tables, in one process."""
    q, k, v, d_out, d_lse = inputs
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    scores = [
        step.with_parameters(tuple(p.detach().requires_grad_() for p in step.parameters)) for step in steps
    ]
    part = attend_keys(leaves[0], tokens, [KeyValues(leaves[1], leaves[2], tokens)], pattern, score=scores)
    loss = loss_of(part.out, part.lse, d_out, d_lse)
    tables = [p for step in scores for p in step.parameters]
    return [loss.detach(), *torch.autograd.grad(loss, [*leaves, *tables], materialize_grads=True)]


def sharded(
    pattern: Pattern,
    tokens: Tokens,
    inputs: Sequence[Tensor],
    layout: ShardLayout,
    steps: Sequence[Score] = (),
    backend: str = "auto",
) -> list[Tensor]:
    """Returns the same from ranks: losses and gradients of tables are summed, those of q, k and v joined in order."""

    def rank(exchange: Exchange) -> tuple[list[Tensor], list[Tensor]]:
        context = ContextParallel(tokens, layout, exchange)
        q, k, v, d_out, d_lse = (context.take(t, 2) for t in inputs)
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        scores = [
            step.with_parameters(tuple(p.detach().requires_grad_() for p in step.parameters))
            for step in steps
        ]
        part = context.attend(*leaves, pattern, score=scores, backend=backend)
        loss = loss_of(part.out, part.lse, d_out, d_lse)
        tables = [p for step in scores for p in step.parameters]
        gradients = torch.autograd.grad(loss, [*leaves, *tables], materialize_grads=True)
        return [loss.detach(), *gradients[3:]], list(gradients[:3])

    results = simulate(layout.ranks, rank)
    sums = [torch.stack(same).sum(0) for same in zip(*(s for s, _ in results), strict=True)]
    shards = [layout.join(list(same), 2) for same in zip(*(g for _, g in results), strict=True)]
    return [sums[0], *shards, *sums[1:]]


@given(
    pattern=strategies.patterns,
    tokens=strategies.tokens(st.integers(8, 40)),
    ranks=st.sampled_from([1, 2, 4]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    backend=st.sampled_from(["auto", "banded", "dense"]),
)
def test_any_pattern_on_any_tokens(
    pattern: Pattern, tokens: Tokens, ranks: int, layout: str, backend: str
) -> None:
    numbers = drawn(tokens.count)
    expected = alone(pattern, tokens, numbers)
    actual = sharded(pattern, tokens, numbers, LAYOUTS[layout](tokens.count, ranks), backend=backend)
    torch.testing.assert_close(actual, expected, **SUM)


NAMED = {
    "full": Full(),
    "causal": Causal(),
    "window": Window.last(70),
    "two-sided": Window.around(30),
    "sink": Window.last(40) | (Causal() & Sink(4)),
    "dilated": Window.last(30, step=3),
    "global": Window.around(20) | Global(),
    "global keys": Causal() & (Window.last(20) | GlobalKeys()),
    "per head": PerHead(Window.last(9), Causal(), Window.last(9), Window.last(33, step=2)),
}


@pytest.mark.parametrize(("ranks", "layout"), [(2, "contiguous"), (4, "zigzag")])
@pytest.mark.parametrize("name", NAMED)
def test_rows_of_several_tiles(name: str, ranks: int, layout: str) -> None:
    """Packed documents and global tokens; some tiles of a shard travel and others do not."""
    count = 100 * ranks
    tokens = Tokens.packed([[count // 3, count // 2], [count]], count).with_global([0, 90])
    numbers = drawn(count)
    actual = sharded(NAMED[name], tokens, numbers, LAYOUTS[layout](count, ranks), backend="banded")
    torch.testing.assert_close(actual, alone(NAMED[name], tokens, numbers), **SUM)


def tables(heads: int) -> dict[str, Score]:
    random = torch.Generator().manual_seed(3)
    return {
        "alibi": ALiBi(alibi_slopes(heads)),
        "soft cap": SoftCap(2.0),
        "buckets": RelativeBias(torch.randn(8, heads, generator=random, dtype=torch.float64), False, 20),
        "relative keys": RelativeKey(torch.randn(7, 6, generator=random, dtype=torch.float64)),
    }


@pytest.mark.parametrize("backend", ["dense", "banded"])
@pytest.mark.parametrize("name", tables(4))
def test_scores_that_depend_on_positions_are_kept(name: str, backend: str) -> None:
    """The gradient of a score's table is the sum of the ranks' gradients."""
    tokens, numbers, steps = Tokens.packed([19, 21]), drawn(40), [tables(4)[name]]
    actual = sharded(Causal(), tokens, numbers, ShardLayout.zigzag(40, 4), steps, backend)
    torch.testing.assert_close(actual, alone(Causal(), tokens, numbers, steps), **SUM)


def test_what_is_tied_to_slots_of_one_process_is_refused_by_name() -> None:
    def rank(exchange: Exchange) -> None:
        context = ContextParallel(Tokens.range(8), ShardLayout.contiguous(8, 2), exchange)
        q, k, v, *_ = (context.take(t, 2) for t in drawn(8))
        with pytest.raises(ConfigError, match="attention_dropout=0"):
            context.attend(q, k, v, Causal(), dropout=0.1)
        with pytest.raises(ConfigError, match="does not support the score Bias, which depends on the slots"):
            context.attend(q, k, v, Causal(), score=Bias(torch.zeros(4, 4)))

    simulate(2, rank)


@pytest.mark.parametrize("backend", ["auto", "native", "banded", "dense"])
def test_partials_of_bfloat16_are_float32_and_rounded_once(backend: str) -> None:
    """Partials are merged in float32: the result is that of the same numbers in float32, within its rounding, while
    merging rounded outputs would be 2^-9 off."""
    count, layout = 600, ShardLayout.zigzag(600, 4)
    numbers = drawn(count, torch.bfloat16)

    def rank(exchange: Exchange) -> tuple[Tensor, Tensor]:
        context = ContextParallel(Tokens.range(count), layout, exchange)
        q, k, v, *_ = (context.take(t, 2).requires_grad_() for t in numbers)
        part = context.attend(q, k, v, Causal(), backend=backend)
        assert part.out.dtype == part.lse.dtype == torch.float32
        grads = torch.autograd.grad(part.out.sum(), (q, k, v))
        assert all(g.dtype == torch.bfloat16 for g in grads)
        return part.out.detach(), part.lse.detach()

    results = simulate(4, rank)
    tokens = Tokens.range(count)
    q, k, v = (t.float() for t in numbers[:3])
    exact = attend_keys(q.double(), tokens, [KeyValues(k.double(), v.double(), tokens)], Causal())
    for at, expected in ((0, exact.out), (1, exact.lse)):
        actual = layout.join([part[at] for part in results], 2)
        torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)


def test_an_error_of_one_rank_ends_all() -> None:
    def rank(exchange: Exchange) -> None:
        context = ContextParallel(Tokens.range(8), ShardLayout.contiguous(8, 2), exchange)
        if exchange.rank == 1:
            raise ConfigError("rank 1 has had enough")
        context.attend(*(context.take(t, 2) for t in drawn(8)[:3]), Full())

    with pytest.raises(ConfigError, match="rank 1 has had enough"):
        simulate(2, rank)
