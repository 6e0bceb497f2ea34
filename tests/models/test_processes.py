"""What a process of a training step sends is known before it runs."""

from typing import Any

import pytest
import torch

from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.models.cost.processes import process_shares
from headway.parallel import ContextParallel, Exchange, Mesh, ShardLayout, choose_layout, simulate
from headway.patterns import Causal, Window
from headway.tokens import Tokens
from tests.parallel.test_plan import Counted

SPEC = ModelSpec.of_depth(
    3, 31, context=240, patterns=[Window.last(20), Causal(), Window.last(20)], width=16, heads=2, kv_heads=1,
    head_dim=8, hidden=24,
)  # fmt: skip


def test_row_45_keys_that_a_step_sends_are_those_of_the_plan() -> None:
    net: Any = build(SPEC, seed=0)
    tokens = Tokens.range(240)
    layout, _ = choose_layout(SPEC.patterns, tokens, 4)

    def rank(exchange: Exchange) -> int:
        counted = Counted(exchange)
        context = ContextParallel(tokens, layout, counted)
        ids = torch.zeros(3, 240, dtype=torch.int64)
        net(context.take(ids), context=context, targets=context.take(ids)).total.backward()
        return counted.bytes

    planned = process_shares(SPEC, Mesh(dp=2, cp=4), 240, 6)
    assert [share.keys_sent for share in planned] == 2 * simulate(4, rank)
    assert [(share.rows, share.tokens) for share in planned] == [(3, 60)] * 8
    assert isinstance(layout, ShardLayout)


def test_a_ring_sends_twice_what_a_process_lacks_of_the_sum() -> None:
    net = build(SPEC, seed=0)
    (one,), four = process_shares(SPEC, Mesh(), 240, 4), process_shares(SPEC, Mesh(dp=4), 240, 4)
    assert one.gradients_sent == one.keys_sent == one.hops == 0
    own = 4 * sum(p.numel() for p in net.parameters())
    assert [share.gradients_sent for share in four] == [2 * own * 3 // 4] * 4
    assert all(share.memory < one.memory for share in four)


def test_what_has_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 processes share the rows of a step, and it has 1"):
        process_shares(SPEC, Mesh(dp=2), 240, 1)


def test_parts_of_weights_are_sent_for_each_pass_and_gradients_once() -> None:
    """Each block's weights for the forward and for the backward, all others once."""
    net = build(SPEC, seed=0)
    n = sum(p.numel() for p in net.parameters())
    blocks = sum(p.numel() for name, p in net.named_parameters() if ".layers." in name)
    (one,), four = process_shares(SPEC, Mesh(), 240, 4), process_shares(SPEC, Mesh(fsdp=4), 240, 4)
    both = process_shares(SPEC, Mesh(dp=2, fsdp=2), 240, 4)
    assert one.weights_sent == 0
    assert [share.weights_sent for share in four] == [3 * 4 * (n + blocks) // 4] * 4
    assert [share.gradients_sent for share in four] == [3 * 4 * n // 4] * 4
    assert [share.gradients_sent for share in both] == [4 * n // 2 + 2 * 4 * n // 4] * 4
    assert [share.weights_sent for share in both] == [4 * (n + blocks) // 2] * 4
    assert all(share.memory < beside.memory for share, beside in zip(four, both, strict=True))
