"""Plans of context parallelism: hops, bytes and work counted from the pattern are those that happen."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.parallel import ContextParallel, ContextPlan, Exchange, ShardLayout, choose_layout
from headway.patterns import Causal, Full, GlobalKeys, Pattern, PerHead, Sink, Window, visible
from headway.tokens import Tokens
from tests import strategies
from tests.parallel.simulation import Counted, simulate

LONG, RANKS = 32768, 8


def plan_of(pattern: Pattern, layout: ShardLayout, tokens: Tokens | None = None) -> ContextPlan:
    return ContextPlan.of(pattern, layout.shards(tokens or Tokens.range(layout.count)))


def imbalance(plan: ContextPlan) -> float:
    """Returns the busiest rank's number of pairs over the mean; 1 is balanced."""
    work = [plan.pairs(rank) for rank in range(plan.ranks)]
    return max(work) * plan.ranks / sum(work)


def test_row_45_a_window_of_512_at_32k_over_8_shards_needs_1_hop_of_7() -> None:
    """Of the neighbour's 4096 keys only the 512 that are seen travel (511, rounded up to whole tiles)."""
    plan = plan_of(Window.last(512), ShardLayout.contiguous(LONG, RANKS))
    assert plan.hops == (1,)
    assert [plan.keys_read(rank) for rank in range(RANKS)] == [0, *[512] * 7]
    assert [plan.keys_sent(rank) for rank in range(RANKS)] == [*[512] * 7, 0]
    sent = plan.bytes_sent(0, rows=2, kv_heads=4, head_dim=64, dtype=torch.bfloat16)
    assert (
        sent == 2 * 512 * 2 * 4 * 128 * 2
    )  # its keys, forward and backward; rank 0 reads no keys, so it returns no gradients
    assert plan.bytes_sent(7, rows=2, kv_heads=4, head_dim=64, dtype=torch.bfloat16) == 512 * 2 * 4 * 128 * 4
    assert imbalance(plan) < 1.1


def test_what_other_patterns_need() -> None:
    contiguous = ShardLayout.contiguous(LONG, RANKS)
    assert plan_of(Full(), contiguous).hops == (1, 2, 3, 4, 5, 6, 7)
    assert plan_of(Window.around(256), contiguous).hops == (1, 7)
    sink = plan_of(Window.last(512) | (Causal() & Sink(4)), contiguous)
    assert all(sink.keys_read(rank) == 512 + 64 for rank in range(2, RANKS)), (
        "the sinks' tile beside the window"
    )
    assert (
        max(len([hop for hop in sink.hops if sink.reads[rank][rank - hop].count]) for rank in range(RANKS))
        == 2
    )
    marked = Tokens.range(LONG).with_global([9000])
    keys = plan_of(Window.last(512) | GlobalKeys(), contiguous, marked)
    assert keys.keys_read(7) == 512 + 64, "one tile of rank 2 has a global token"
    packed = plan_of(Causal(), contiguous, Tokens.packed([LONG // RANKS] * RANKS))
    assert packed.hops == (), "documents that end where shards do"


def test_causal_work_is_balanced_by_the_zigzag() -> None:
    zigzag = plan_of(Causal(), ShardLayout.zigzag(LONG, RANKS))
    assert imbalance(zigzag) < 1.1
    assert imbalance(plan_of(Causal(), ShardLayout.contiguous(LONG, RANKS))) > 1.8
    visible_pairs = LONG * (LONG + 1) // 2
    total = sum(zigzag.pairs(rank) for rank in range(RANKS))
    assert visible_pairs <= total <= visible_pairs + LONG * 64


def test_the_layout_is_chosen_by_the_patterns() -> None:
    tokens = Tokens.range(4096)
    zigzag, contiguous = ShardLayout.zigzag(4096, 4), ShardLayout.contiguous(4096, 4)
    layout, choice = choose_layout([Causal()], tokens, 4)
    assert (layout, choice.what) == (zigzag, "zigzag")
    assert "1.74 times the mean" in dict(choice.rejected)["contiguous"]
    layout, choice = choose_layout([Window.last(128)], tokens, 4)
    assert (layout, choice.what) == (contiguous, "contiguous")
    assert "384 keys are read" in choice.why
    assert choose_layout([Window.last(128), Causal()], tokens, 4)[0] == zigzag


def test_a_layout_is_judged_by_all_layers_and_a_mean_head() -> None:
    """Keys read are summed over layers; within a layer they are the mean over heads."""
    tokens, near, wide = Tokens.range(4096), Window.last(128), Window.last(256)
    for patterns, keys in (
        ([near], 384),
        ([near, wide, near], 384 + 768 + 384),
        ([PerHead(near, near)], 384),
        ([PerHead(near, near, near, wide)], (3 * 384 + 768) // 4),
        ([PerHead(near, wide), wide], (384 + 768) // 2 + 768),
    ):
        _, choice = choose_layout(patterns, tokens, 4)
        assert choice.why.endswith(f"and {keys} keys are read from other ranks"), patterns


@given(
    pattern=strategies.patterns,
    tokens=strategies.tokens(st.integers(8, 40)),
    zigzag=st.booleans(),
    tile=st.sampled_from([1, 3, 64]),
)
def test_every_key_that_is_seen_is_read(pattern: Pattern, tokens: Tokens, zigzag: bool, tile: int) -> None:
    layout = (ShardLayout.zigzag if zigzag else ShardLayout.contiguous)(tokens.count, 3 if zigzag else 4)
    shards = layout.shards(tokens)
    plan = ContextPlan.of(pattern, shards, tile)
    for reader, reads in enumerate(plan.reads):
        for owner, read in enumerate(reads):
            seen = visible(pattern, shards[reader], shards[owner])[:, 0]
            needed = seen.any(0).any(0).nonzero().squeeze(1)
            assert set(needed.tolist()) <= set(read.slots.tolist())
            assert int(seen.sum(0 if seen.shape[0] == 1 else (0, 1, 2)).sum()) <= read.pairs * seen.shape[0]
            assert torch.equal(read.tokens.index, shards[owner].index[:, read.slots])
            if reader != owner and read.count:
                assert (reader - owner) % plan.ranks in plan.hops


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [Causal(), Window.last(70) | (Causal() & Sink(2))])
def test_bytes_sent_are_those_of_the_plan(pattern: Pattern, dtype: torch.dtype) -> None:
    count, ranks = 400, 4

    def rank(exchange: Exchange) -> tuple[int, int]:
        counted = Counted(exchange)
        layout = ShardLayout.contiguous(count, ranks)
        context = ContextParallel(Tokens.range(count), layout, counted)
        shape = (2, 2, count // ranks, 8)
        q, k, v = (torch.randn(shape).to(dtype).requires_grad_() for _ in range(3))
        context.attend(q, k, v, pattern).out.sum().backward()
        plan = context.plan(pattern)
        return counted.sent.total(), plan.bytes_sent(
            exchange.rank, rows=2, kv_heads=2, head_dim=8, dtype=dtype
        )

    for sent, planned in simulate(ranks, rank):
        assert sent == planned


def test_layouts_take_rows_apart_and_join_them() -> None:
    row = torch.arange(22).view(2, 11)
    for layout in (ShardLayout.contiguous(11, 3), ShardLayout.zigzag(11, 3)):
        parts = [layout.take(row, rank) for rank in range(3)]
        assert torch.equal(layout.join(parts), row)
        assert sum(part.shape[1] for part in parts) == 11
    with pytest.raises(ConfigError, match="cannot be cut into 6 chunks for 3 ranks"):
        ShardLayout.zigzag(5, 3)
    with pytest.raises(ConfigError, match="rows of 11 slots, but tokens describe 12"):
        ShardLayout.zigzag(11, 3).shards(Tokens.range(12))


@pytest.mark.parametrize(("count", "tile"), [(64 * 1024, 64), (64 * 1024 + 2, 65), (160 * 1024, 160)])
def test_tiles_grow_where_a_row_would_have_more_than_1024(count: int, tile: int) -> None:
    """A window of 2 reads the neighbour's last key at the border of two shards, as one tile."""
    plan = plan_of(Window.last(2), ShardLayout.contiguous(count, 2))
    last = (count // 2) % tile or tile
    assert plan.keys_read(1) == last
    explicit = ContextPlan.of(
        Window.last(2), ShardLayout.contiguous(count, 2).shards(Tokens.range(count)), tile
    )
    assert [plan.pairs(rank) for rank in range(2)] == [explicit.pairs(rank) for rank in range(2)]


def test_a_plan_takes_one_pattern() -> None:
    with pytest.raises(AssertionError, match="take PerHead apart first"):
        plan_of(PerHead(Causal(), Full()), ShardLayout.contiguous(8, 2))
