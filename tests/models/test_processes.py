"""What a process sends in a training step is known before the step runs."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.errors import ConfigError
from headway.models import Head, ModelSpec, build
from headway.models.cost.processes import process_shares
from headway.models.tensor_parallel import shard
from headway.nn.block import Checkpointing
from headway.parallel import (
    ContextParallel,
    Exchange,
    Mesh,
    ShardLayout,
    TensorParallel,
    choose_layout,
)
from headway.patterns import Causal, Pattern, Window
from headway.tokens import Tokens
from tests.parallel.simulation import Counted, simulate
from tests.parallel.test_tensor import Rank

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
        return counted.sent.total()

    planned = process_shares(SPEC, Mesh(dp=2, cp=4), 240, 6)
    assert [share.keys_sent for share in planned] == 2 * simulate(4, rank)
    assert [(share.rows, share.tokens) for share in planned] == [(3, 60)] * 8
    assert isinstance(layout, ShardLayout)


def test_a_ring_sends_twice_what_a_process_lacks_of_the_sum() -> None:
    net = build(SPEC, seed=0)
    (single,), four = process_shares(SPEC, Mesh(), 240, 4), process_shares(SPEC, Mesh(dp=4), 240, 4)
    assert single.gradients_sent == single.keys_sent == single.hops == 0
    gradient_bytes = 4 * sum(p.numel() for p in net.parameters())
    assert [share.gradients_sent for share in four] == [2 * gradient_bytes * 3 // 4] * 4
    assert all(share.memory < single.memory for share in four)


PLAIN = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
ENCODER: dict[str, Any] = {
    "family": "bert",
    "causal": False,
    "head": Head("masked-lm", dense="gelu"),
    **PLAIN,
}
LAYERS: dict[str, tuple[dict[str, Any], Checkpointing]] = {
    "pre": ({}, "none"),
    "post": ({"order": "post"}, "none"),
    "pre, again": ({}, "block"),
    "post, again": ({"order": "post"}, "block"),
    "parallel, again": ({"order": "parallel"}, "block"),
    "joint, attention again": ({"order": "joint"}, "attention"),
    "feed-forward again": ({}, "feed_forward"),
    "vocab": ({"vocab": 32}, "none"),
    "vocab, output layer of its own": ({"vocab": 32, "tied": False}, "none"),
    "vocab, masked": ({"vocab": 32, **ENCODER}, "none"),
    "vocab, masked, table of other columns": ({"vocab": 32, "embedding_width": 8, **ENCODER}, "none"),
}


@pytest.mark.parametrize("which", LAYERS)
def test_row_45_sums_of_shared_layers_are_those_that_a_step_makes(which: str) -> None:
    """Bytes of the tensors that are summed, of which a ring sends 2 (R - 1) / R, and those of a shared softmax."""
    fields, checkpointing = LAYERS[which]
    size = {"vocab": 31, "width": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "hidden": 24}
    spec = ModelSpec.of_depth(3, **size | fields)
    ids = torch.zeros(4, 16, dtype=torch.int64)  # 64 rows, which no CPU's products pad

    def rank(exchange: Exchange) -> int:
        net: Any = build(spec, seed=0)
        shard(net, TensorParallel(counted := Counted(exchange)))
        net.train().gradient_checkpointing = checkpointing
        net(ids, targets=ids).total.backward()
        return bytes_of_two(counted)

    planned = process_shares(spec, Mesh(dp=2, tp=2), 16, 8, gradient_checkpointing=checkpointing)
    assert [share.sums_sent for share in planned] == 2 * simulate(2, rank)


@pytest.mark.parametrize(
    ("order", "checkpointing", "vocab"),
    [("pre", "none", 31), ("pre", "block", 31), ("post", "none", 31), ("post", "block", 32)],
)
def test_sums_of_an_encoder_decoder(order: Any, checkpointing: Checkpointing, vocab: int) -> None:
    fields: dict[str, Any] = {"vocab": vocab, "width": 16, "layers": 2, "heads": 4, "hidden": 24}
    spec = ModelSpec.of_pair("transformer", **fields, **PLAIN, order=order)
    ids = torch.zeros(3, 20, dtype=torch.int64)

    def rank(exchange: Exchange) -> int:
        net: Any = build(spec, seed=0)
        shard(net, TensorParallel(counted := Counted(exchange)))
        net.train().gradient_checkpointing = checkpointing
        net(ids, ids[:, :12], targets=ids[:, :12]).total.backward()
        return bytes_of_two(counted)

    planned = process_shares(spec, Mesh(tp=2), 12, 3, source=20, gradient_checkpointing=checkpointing)
    assert [share.sums_sent for share in planned] == simulate(2, rank)


def bytes_of_two(counted: Counted) -> int:
    """Returns what is sent directly, and what a ring of two ranks sends for sums: each tensor's bytes, in float32."""
    return counted.sent.total() + 4 * sum(counted.summed)


@pytest.mark.parametrize("vocab", [31, 32])
def test_what_a_process_holds_is_its_share_of_heads_and_units(vocab: int) -> None:
    """The weights, gradients and moments of its share of the model, and the activations of this share."""
    spec = ModelSpec.of_depth(3, vocab, width=16, heads=4, kv_heads=2, head_dim=4, hidden=24)
    net: Any = build(spec, seed=0)
    shard(net, TensorParallel(Rank(1, 2)))
    single, shares = process_shares(spec, Mesh(), 64, 2)[0], process_shares(spec, Mesh(dp=2, tp=2), 64, 4)
    weight_bytes = 4 * sum(p.numel() for p in net.parameters())
    assert [share.gradients_sent for share in shares] == [2 * weight_bytes // 2] * 4
    assert all(16 * weight_bytes // 4 < share.memory < single.memory for share in shares)


@pytest.mark.parametrize("patterns", [[Window.last(20), Causal()], [Causal(), Window.last(20)]])
def test_hops_are_those_of_the_layer_that_makes_most(patterns: list[Pattern]) -> None:
    """Wherever that layer is: windows only need neighbours, Causal() needs all ranks."""
    spec = replace(SPEC, layers=2, patterns=tuple(patterns))
    assert [share.hops for share in process_shares(spec, Mesh(cp=4), 240, 1)] == [3] * 4
    windows = process_shares(spec.with_patterns(Window.last(20)), Mesh(cp=4), 240, 1)
    assert [share.hops for share in windows] == [1] * 4


def test_rows_that_are_too_long_to_be_cut_tile_by_tile_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at most 16777216 tokens, got 100000000; .*--processes"):
        process_shares(SPEC, Mesh(cp=4), 10**8, 1)


def test_what_has_no_share_is_refused() -> None:
    with pytest.raises(ConfigError, match="2 kv heads cannot be shared evenly by 4"):
        process_shares(ModelSpec.of_depth(4, 31), Mesh(tp=4), 64, 1)
    with pytest.raises(ConfigError, match="2 processes cannot share a batch of 1 rows"):
        process_shares(SPEC, Mesh(dp=2), 240, 1)


def test_parts_of_weights_are_sent_for_each_pass_and_gradients_once() -> None:
    """The weights of each block are sent for the forward and for the backward pass, all others once."""
    net = build(SPEC, seed=0)
    n = sum(p.numel() for p in net.parameters())
    blocks = sum(p.numel() for name, p in net.named_parameters() if ".layers." in name)
    (single,), four = process_shares(SPEC, Mesh(), 240, 4), process_shares(SPEC, Mesh(fsdp=4), 240, 4)
    replicated = process_shares(SPEC, Mesh(dp=2, fsdp=2), 240, 4)
    assert single.weights_sent == 0
    assert [share.weights_sent for share in four] == [3 * 4 * (n + blocks) // 4] * 4
    assert [share.gradients_sent for share in four] == [3 * 4 * n // 4] * 4
    assert [share.gradients_sent for share in replicated] == [4 * n // 2 + 2 * 4 * n // 4] * 4
    assert [share.weights_sent for share in replicated] == [4 * (n + blocks) // 2] * 4
    assert all(share.memory < other.memory for share, other in zip(four, replicated, strict=True))
