"""A model whose heads and hidden units are divided among ranks has the loss and every gradient of one process."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError
from headway.models import Model, ModelSpec, build, cost
from headway.models.quantize import quantize_model
from headway.models.tensor_parallel import shard, share_of
from headway.nn import Experts, Lora
from headway.nn.adapters import Adapter, attach, merge
from headway.nn.weights import Nf4
from headway.parallel import Exchange, Mesh, TensorParallel
from headway.patterns import Causal, PerHead, Window
from headway.positions import LinearBias, NoPositions, Relative, Rotary, T5Bias
from tests.parallel import steps
from tests.parallel.simulation import Counted, Messages, simulate
from tests.parallel.steps import SUM
from tests.saved import saved_tensors, storage_sizes


def four_heads(name: str, **fields: Any) -> Model:
    """Returns `steps.model_of` with four kv heads, which four ranks can share."""
    return steps.model_of(name, heads=8, kv_heads=4, head_dim=4, **fields)


def shared_step(
    model: Model, exchange: Exchange, name: str, context: Exchange | None = None
) -> list[torch.Tensor]:
    """Returns `steps.step` of this rank's shard of a model, with gradients joined to those of the whole model."""
    local = copy.deepcopy(model)
    shards = shard(local, TensorParallel(exchange))
    loss, *gradients = steps.step(local, name, context)
    named = dict(zip(dict(local.named_parameters()), gradients, strict=True))
    shards.add_up(named)
    return [loss, *(steps.whole(shards, parameter, gradient) for parameter, gradient in named.items())]


def assert_shared(model: Model, name: str, ranks: int) -> None:
    expected = steps.step(model, name)
    for actual in simulate(ranks, lambda exchange: shared_step(model, exchange, name)):
        torch.testing.assert_close(actual, expected, **SUM)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", steps.PATTERNS)
def test_row_45_shared_heads_have_the_loss_and_every_gradient_of_one_process(name: str, ranks: int) -> None:
    """With packed documents, grouped heads and rotary positions; every rank has all tokens."""
    assert_shared(four_heads(name), name, ranks)


VARIANTS: dict[str, dict[str, Any]] = {
    "biases, post-norm, no gate": {
        "order": "post", "norm": "layer", "norm_bias": True, "gated": False, "activation": "relu",
        "qkv_bias": True, "out_bias": True, "mlp_bias": True,
    },
    "parallel, output of its own": {"order": "parallel", "tied": False, "output_bias": True},
    "joint": {"order": "joint"},
    "sinks, gated heads": {"sink_logit": True, "gate": "head"},
    "gated channels": {"gate": "channel", "gate_act": "softplus"},
    "sandwich, 1 + w, caps": {
        "order": "sandwich", "norm_offset": 1.0, "qk_norm": "head", "score_cap": 3.0, "logit_cap": 2.0,
    },
    "norms of outputs and over all heads": {"order": "output", "qk_norm": "all", "residual_scale": 0.4},
    "norms of heads, trained rotation": {
        "qk_norm": "head", "positions": Rotary(1e4, pairing="halves", trainable=True)
    },
    "one table of biases for all layers": {"positions": T5Bias(buckets=8, max_distance=32)},
    "a table of vectors in each layer": {"positions": Relative(clip=3)},
    "slopes": {"positions": LinearBias()},
    "a pattern of each head": {
        "patterns": [PerHead(*(Window.last(5 + 9 * h) if h % 3 else Causal() for h in range(8))), Causal()]
    },
    "experts": {"experts": (None, Experts(count=4, top=2, hidden=24, shared=8, shared_gate=True))},
    "linear attention": {"patterns": Causal(), "mixers": LinearAttentionSpec(), "positions": NoPositions()},
}  # fmt: skip


@pytest.mark.parametrize("which", VARIANTS)
def test_blocks_as_declared(which: str) -> None:
    """Parameters of single heads are sharded with them; parameters that heads share get the gradient of all ranks."""
    model = four_heads("full", **VARIANTS[which])
    with torch.no_grad():
        for p in model.parameters():  # biases start as 0 and gains as 1
            p += 0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
    assert_shared(model, "full", 2)


def test_projections_of_global_tokens() -> None:
    assert_shared(four_heads("global", global_projections=True), "global", 2)


@pytest.mark.parametrize("checkpointing", ["block", "attention", "feed_forward"])
def test_blocks_that_are_computed_again(checkpointing: Any) -> None:
    model = four_heads("sink")
    model.train().gradient_checkpointing = checkpointing
    assert_shared(model, "sink", 2)


PAIRS: dict[str, dict[str, Any]] = {
    "whole vocab": {"vocab": 31},
    "one table for all": {"vocab": 32},
    "tables of their own": {"vocab": 32, "shared_embedding": False, "tied": False},
}


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("which", PAIRS)
def test_an_encoder_decoder(which: str, smoothing: float) -> None:
    """Cross-attention with divided heads, and encoder states that all layers read."""
    fields = {**PAIRS[which], "width": 16, "layers": 2, "heads": 4, "hidden": 24, "init_std": 0.3}
    plain = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    model = build(ModelSpec.of_pair("transformer", **fields, **plain), seed=0).double()
    ids = torch.randint(31, (2, 9), generator=torch.Generator().manual_seed(1))

    def step(net: Model) -> list[torch.Tensor]:
        loss = net(ids, ids[:, :7], targets=ids[:, 1:8], label_smoothing=smoothing).total
        return [loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))]

    def rank(exchange: Exchange) -> list[torch.Tensor]:
        local = copy.deepcopy(model)
        shards = shard(local, TensorParallel(exchange))
        loss, *gradients = step(local)
        named = zip(dict(local.named_parameters()), gradients, strict=True)
        return [loss, *(steps.whole(shards, name, gradient) for name, gradient in named)]

    for actual in simulate(2, rank):
        torch.testing.assert_close(actual, step(model), **SUM)


@pytest.mark.parametrize("name", ["full", "window", "sink", "dilated"])
def test_row_45_shared_heads_of_sharded_rows(name: str) -> None:
    """Two processes for the heads times two for the tokens of each row; each axis sums in its own group."""
    model = four_heads(name)
    mesh = Mesh(cp=2, tp=2)

    def rank(every: Exchange) -> list[torch.Tensor]:
        tp, cp = (
            Among(every, group) for axis in ("tp", "cp") for group in mesh.groups(axis) if every.rank in group
        )
        return shared_step(model, tp, name, cp)

    results = simulate(4, rank)
    for t in range(2):  # ranks (c, t) with c = 0, 1 have the same heads
        sums = [torch.stack(same).sum(0) for same in zip(results[t], results[2 + t], strict=True)]
        torch.testing.assert_close(sums, steps.step(model, name), **SUM)


class Among(Messages):
    """An exchange among a group of another exchange's ranks."""

    def __init__(self, every: Exchange, group: list[int]) -> None:
        self.every, self.group = every, group
        self.rank, self.ranks = group.index(every.rank), len(group)

    def start(self, sent: Any, to: int, received: Any, source: int) -> Any:
        return self.every.start(sent, self.group[to], received, self.group[source])


@settings(max_examples=30)
@given(
    heads=st.integers(1, 6),
    group=st.integers(1, 3),
    units=st.integers(1, 9),
    ranks=st.integers(1, 4),
    seed=st.integers(0, 9),
)
def test_what_ranks_have_is_gathered_to_the_bit(
    heads: int, group: int, units: int, ranks: int, seed: int
) -> None:
    """Every parameter, for any sizes that ranks divide; other sizes are refused before anything is changed."""
    spec = ModelSpec.of(
        "llama", vocab=7, width=8, layers=1, heads=heads * group, kv_heads=heads, head_dim=2, hidden=units
    )
    model = build(spec, seed=seed)
    expected = {name: t.clone() for name, t in model.state_dict().items()}

    def rank(exchange: Exchange) -> dict[str, torch.Tensor] | None:
        local = copy.deepcopy(model)
        try:
            shards = shard(local, TensorParallel(exchange))
        except ConfigError:
            assert heads % ranks or units % ranks
            torch.testing.assert_close(local.state_dict(), expected, rtol=0, atol=0)
            return None
        for name, t in local.state_dict().items():
            whole, axis = expected[name], shards.axes.get(name)
            assert torch.equal(whole if axis is None else whole.chunk(ranks, axis)[exchange.rank], t)
            assert t.numel() == whole.numel() // (1 if axis is None else ranks)
        return steps.gather(local)

    for actual in simulate(ranks, rank):
        assert (actual is None) == bool(heads % ranks or units % ranks)
        if actual is not None:
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "kv heads": ({"heads": 8, "kv_heads": 2}, "2 kv heads cannot be shared evenly by 4"),
    "hidden units": ({"hidden": 26}, "26 hidden units cannot be shared evenly by 4"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_shared_is_refused_by_name(what: str) -> None:
    fields, words = REFUSED[what]
    model = steps.model_of("full", **{"heads": 8, "kv_heads": 4, "head_dim": 4, **fields})
    with pytest.raises(ConfigError, match=words):
        shard(model, TensorParallel(Rank(0, 4)))
    assert model.shards is None


def test_a_model_is_shared_once_and_as_it_is_trained() -> None:
    model, tensor = four_heads("full"), TensorParallel(Rank(1, 2))
    shard(model, tensor)
    with pytest.raises(ConfigError, match="this model is already sharded"):
        shard(model, tensor)
    adapted = four_heads("full")
    attach(adapted, Adapter.fresh(adapted, Lora(rank=2, alpha=2)))
    merge(adapted)
    with pytest.raises(ConfigError, match="q_proj has merged adapters"):
        shard(adapted, tensor)
    narrow = four_heads("full")
    layer = narrow.model.layers[0].mlp.up_proj
    layer.keep(Nf4.pack(layer.matrix))
    with pytest.raises(
        ConfigError, match=r"up_proj has weights in nf4 .* 16 inputs per process are not a multiple of 64"
    ):
        shard(narrow, tensor)
    quantized = four_heads("full").float().eval()
    quantize_model(quantized, "int8")
    with pytest.raises(
        ConfigError, match="o_proj has weights in int8 in groups of 32 inputs, which 16 inputs per process"
    ):
        shard(quantized, tensor)


class Rank(Messages):
    """A rank that must not send or receive."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks

    def start(self, sent: Any, to: int, received: Any, source: int) -> Any:
        raise AssertionError


def test_two_sums_a_layer_each_way() -> None:
    """Each sum is over B T width numbers: one for attention and one for feed-forward, forward and backward."""
    model = four_heads("full")

    def rank(exchange: Exchange) -> list[int]:
        local, counted = copy.deepcopy(model), Counted(exchange)
        shard(local, TensorParallel(counted))
        steps.step(local, "full")
        return counted.summed

    first, second = simulate(2, rank)
    ids, _, _ = steps.rows("full")
    assert first == second == [ids.numel() * model.spec.width] * (2 * 2 * model.spec.layers)


def test_a_rank_keeps_what_is_said_of_its_share() -> None:
    """Bytes kept for the backward of a model in training without dropout equal the estimate: no mask is stored."""
    spec = ModelSpec.of("llama", vocab=256, width=64, layers=3, heads=4, kv_heads=2, hidden=160)
    ids = torch.randint(0, spec.vocab, (2, 64), generator=torch.Generator().manual_seed(0))

    def rank(exchange: Exchange) -> int:
        model: Any = build(spec, seed=0)
        shard(model, TensorParallel(exchange))
        with saved_tensors() as saved:
            model(ids, targets=ids)
        return sum(storage_sizes(saved, model.parameters()))

    predicted = sum(cost.activation_bytes(share_of(spec, 2, 0), 64, 2).values())
    for measured in simulate(2, rank):
        assert measured == pytest.approx(predicted, rel=0.02)
