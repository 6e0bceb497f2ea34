"""Layers of several kinds: sizes of heads and feed-forwards by layer, keys of other layers, embeddings by layer."""

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch

from headway.checkpoints.heads import change_pairing, repeat_kv_heads
from headway.checkpoints.restore import fill
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec, build, cost
from headway.models.mixers import Softmax, differ
from headway.models.tensor_parallel import share_of
from headway.nn import Attention, AttentionBeside, Experts, Linear
from headway.nn.altup import AltUp
from headway.patterns import Causal, Window
from headway.positions import PerLayer, Rotary
from headway.positions.scaling import Proportional
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models.mixers import SIZE, SSD
from tests.models.test_activations import kept, loss_of
from tests.pairwise import chequered

FULL = Rotary(500.0, pairing="halves", scaling=Proportional(0.4))
WINDOW = Rotary(100.0, pairing="halves")
SPEC = ModelSpec.of(
    "gemma4_text",
    vocab=53, width=20, layers=6, heads=6, kv_heads=2, head_dim=8, hidden=28, layer_hidden=(0, 0, 0, 36, 0, 56),
    patterns=(Window.last(5), Causal()),
    positions=PerLayer((WINDOW, FULL)),
    mixers=(
        Softmax(v_norm=True), Softmax(kv_heads=3, head_dim=10, v_norm=True),
        Softmax(head_dim=6), Softmax(kv_heads=1, tied_values=True),
        Softmax(kv_from=0), Softmax(kv_from=1),
    ),
    per_layer_embedding=7,
    init_std=0.3,
)  # fmt: skip
STREAMS = ModelSpec.of(
    "gemma3n_text",
    vocab=53, width=20, layers=4, heads=4, kv_heads=2, head_dim=8, hidden=28, layer_hidden=(0, 36, 0, 36),
    patterns=(Window.last(5), Causal()),
    positions=PerLayer((WINDOW, Rotary(500.0, pairing="halves"))),
    mixers=(Softmax(v_norm=True), Softmax(v_norm=True), Softmax(kv_from=0), Softmax(kv_from=1)),
    mlp_sparsity=(0.6, 0.0, 0.9, 0.0),
    per_layer_embedding=16,  # with 7, a token may have no gate above 0, and so gradients of rounding errors
    per_layer_vocab=37,
    altup=AltUp(3), laurel=5,
    init_std=0.3,
)  # fmt: skip
SPECS = {"gemma 4": SPEC, "gemma 3n": STREAMS}
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
IDS = torch.randint(53, (2, 19), generator=torch.Generator().manual_seed(1))


@chequered("chunks,name", [(1,) * 19, (4, 1, 1, 13), (5, 5, 9), (6, 1, 12), (18, 1)], list(SPECS))
@torch.no_grad()
def test_decoding_is_the_full_forward_at_every_border(chunks: tuple[int, ...], name: str) -> None:
    model = build(SPECS[name], dtype=torch.float64, seed=0).eval()
    cache, borders = model.make_cache(2), [0, *accumulate(chunks)]
    steps = [model(IDS[:, a:b], cache=cache) for a, b in pairwise(borders)]
    assert off(torch.cat(steps, 1), model(IDS)) < 1e-12


@each_spec
@torch.no_grad()
def test_packed_padded_and_selected_slots_are_rows_alone(spec: ModelSpec) -> None:
    model = build(spec, dtype=torch.float64, seed=0).eval()
    full = model(IDS)
    packed = model(torch.cat((IDS[:1], IDS[1:, :12]), 1), tokens=Tokens.packed([[19, 12]]))
    assert off(packed[0], torch.cat((full[0], full[1, :12]))) < 1e-12
    tokens = Tokens.from_lengths([19, 12], side="left")
    ids = IDS.clone()
    ids[1, 7:] = IDS[1, :12]
    assert off(model(ids, tokens=tokens)[1, 7:], full[1, :12]) < 1e-12
    assert off(model(IDS, logits_for=slice(16, 19)), full[:, 16:]) < 1e-12


def test_a_layer_without_keys_of_its_own_has_none_and_keeps_none() -> None:
    model = build(SPEC, seed=0)
    last = model.model.layers[5].self_attn
    assert [name for name, _ in last.named_parameters()] == [
        "q_proj.weight",
        "o_proj.weight",
        "q_norm.weight",
    ]
    cache = model.make_cache(2)
    with torch.no_grad():
        model(IDS, cache=cache)
    assert [len(layer.tensors) for layer in cache.pages.layers] == [2, 2, 2, 2, 0, 0]
    assert cache.nbytes == cost.kv_bytes_stored(SPEC, 19, torch.float32, 2)
    assert cost.kv_bytes_per_token(SPEC, torch.float32) == 4 * 2 * (2 * 8 + 3 * 10 + 2 * 6 + 1 * 8)
    assert cost.kv_bytes_read(SPEC, 19, torch.float32, layers=[5]) == 4 * 2 * 3 * 10 * 19


def test_a_plan_counts_what_is_built() -> None:
    model = build(SPEC, seed=0)
    assert cost.parameter_count(SPEC) == sum(p.numel() for p in model.parameters())
    inner = [m for name, m in model.named_modules() if isinstance(m, Linear) and name != "lm_head"]
    assert cost.matrix_weights(SPEC) == sum(m.in_features * m.out_features for m in inner)


@chequered("how,name", ["block", "attention", "feed_forward"], list(SPECS))
def test_gradients_are_the_same_where_layers_are_computed_again(how: Any, name: str) -> None:
    gradients = []
    for mode in ("none", how):
        model = build(SPECS[name], seed=0).train()
        states = model.model(IDS, Tokens.range(19), gradient_checkpointing=mode)
        model.logits(states).square().sum().backward()
        gradients.append({key: p.grad for key, p in model.named_parameters()})
    assert all(torch.equal(gradients[0][key], grad) for key, grad in gradients[1].items())
    assert all(grad.abs().max() > 0 for grad in gradients[0].values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_kept_bytes_are_what_autograd_keeps(dtype: torch.dtype, name: str) -> None:
    spec = SPECS[name]
    wider = tuple(size and 2 * size - 16 for size in spec.layer_hidden)
    spec = replace(spec, patterns=Causal(), width=40, hidden=56, layer_hidden=wider, logit_cap=None)
    model = build(spec, seed=0, dtype=dtype, backend="dense")
    actual = kept(lambda: loss_of(model, torch.randint(53, (2, 48)), fused=False), model)
    expected = cost.activation_bytes(spec, 48, 2, dtype, scores="stored") | {"logits": 4 * 53 * 2 * 48}
    assert abs(actual - sum(expected.values())) < 0.01 * sum(expected.values())


def test_sizes_that_are_those_of_all_layers_need_not_be_said() -> None:
    explicit = replace(SPEC, mixers=(Softmax(kv_heads=2, head_dim=8),), layer_hidden=(28,))
    assert explicit == replace(SPEC, mixers=(Softmax(),), layer_hidden=(0,))
    assert not differ(explicit.mixers)


MIXERS = SPEC.mixers
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "of a later layer": ({"mixers": (Softmax(kv_from=3), *MIXERS[1:])}, "layer 0 has kv_from=3, which must be the num"),
    "of itself": ({"mixers": (*MIXERS[:4], Softmax(kv_from=4), MIXERS[5])}, "layer 4 has kv_from=4, which must"),
    "no number": ({"mixers": (*MIXERS[:4], Softmax(kv_from="x"), MIXERS[5])}, "layer 4 has kv_from='x'"),
    "of one without": ({"mixers": (*MIXERS[:5], Softmax(kv_from=4))}, "layer 5 has kv_from=4, which must"),
    "of another pattern": ({"mixers": (*MIXERS[:5], Softmax(kv_from=0))}, "both need the same pattern"),
    "of other positions": (
        {"mixers": (*MIXERS[:5], Softmax(kv_from=0)), "patterns": (Causal(),)}, "both need the same positions"),
    "and sizes": ({"mixers": (*MIXERS[:5], Softmax(kv_from=1, kv_heads=1))}, r"give Softmax\(kv_from=1\) without"),
    "kv heads": ({"mixers": (Softmax(kv_heads=4),)}, "layer 0: "),
    "no kv heads": ({"mixers": (Softmax(kv_heads=0),)}, "kv_heads of layer 0"),
    "an odd head": ({"mixers": (Softmax(head_dim=7),)}, "head_dim 7 is odd"),
    "hidden of no layer": ({"layer_hidden": (4,)}, "hidden=28 is the width of no layer"),
    "hidden of half a list": ({"layer_hidden": (0, 4, 0, 8)}, "4 layer_hidden do not fit 6 layers"),
    "beside, of pairs": ({"mixers": Softmax(beside=Softmax())}, "has softmax attention beside attention; beside must"),
    "factors": ({"mixers": Softmax(beside=SSD, factors=(1.0, 0.0))}, "must be two finite numbers above 0"),
    "factors of nothing": ({"mixers": Softmax(factors=(2.0, 1.0))}, r"layer 0 has factors \(2\.0, 1\.0\), but no"),
    "no feed-forward beside attention": ({"layer_hidden": (0, None), "order": "joint"}, "use order=\"pre\""),
    "none in any layer": ({"layer_hidden": (None,)}, "hidden=28 is the width of no layer"),
    "experts where there is none": (
        {"layer_hidden": (0, None), "experts": (Experts(count=4, top=2),)}, "layer_hidden is for layers without"),
    "hidden beside experts": (
        {"layer_hidden": (0, None), "experts": (Experts(count=4, top=2, hidden=9), None)}, "hidden=28 is the width"),
    "scales of experts": ({"mlp_scale": 2.0, "layer_hidden": (0,), "experts": (Experts(count=4, top=2),)}, "mlp_scale"),
    "a scale of no gate": ({"mlp_gate_scale": 2.0, "gated": False}, "mlp_gate_scale needs gated=True"),
    "columns": ({"per_layer_embedding": -1}, "per_layer_embedding must be a whole number"),
    "rows": ({"per_layer_vocab": 53}, "per_layer_vocab=53 needs a per_layer_embedding"),
    "rows of nothing": ({"per_layer_vocab": 5, "per_layer_embedding": 0}, "per_layer_vocab=5"),
    "one stream": ({"altup": None, "layer_scalar": False, "mlp_sparsity": 1.0}, "at least 0 and below 1, got 1"),
    "shares of three layers": ({"mlp_sparsity": (0.1, 0.2, 0.3, 0.4)}, "4 mlp_sparsity do not fit 6 layers"),
    "cut gates without gates": ({"mlp_sparsity": 0.5, "gated": False}, "mlp_sparsity above 0 needs layers with"),
    "a rank behind a norm": ({"laurel": 3, "order": "output"}, "laurel needs a decoder with order"),
    "streams and a factor": ({"altup": AltUp()}, "altup needs a decoder without layer_scalar"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_contradict_each_other_are_refused(name: str) -> None:
    changed, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        replace(SPEC, **changed)


def test_what_is_done_to_all_layers_alike_refuses_them() -> None:
    with pytest.raises(CheckpointError, match="layers of this model differ"):
        repeat_kv_heads({}, SPEC, 6)
    with pytest.raises(CheckpointError, match="keep the pairing"):
        change_pairing({}, SPEC, "adjacent")
    with pytest.raises(ConfigError, match="does not support heads that differ between layers"):
        share_of(SPEC, 2, 0)


def test_attention_alone_attends_to_keys_of_another_layer() -> None:
    first = Attention(12, 4, 2)
    second = Attention(12, 4, 2, kv_from=first)
    x = torch.randn(1, 5, 12)
    shared: dict[Any, Any] = {first: None}
    first(x, shared=shared)
    reference = Attention(12, 4, 2)
    reference.load_state_dict({**first.state_dict(), **second.state_dict()})
    assert torch.equal(second(x, shared=shared), reference(x))
    with pytest.raises(ConfigError, match="keys and values of kv_from are missing"):
        second(x)
    with pytest.raises(ConfigError, match="of the same kv_heads"):
        Attention(12, 4, 4, kv_from=first)
    with pytest.raises(ConfigError, match="drop v_norm and tied_values"):
        Attention(12, 4, 2, kv_from=first, tied_values=True)
    with pytest.raises(ConfigError, match="tied_values needs value_dim equal to head_dim"):
        Attention(12, 4, 2, value_dim=5, tied_values=True)


def test_what_stands_beside_attention_needs_its_state_and_x_alone() -> None:
    spec = ModelSpec.of("llama", **SIZE, mixers=Softmax(beside=SSD))
    layer = build(spec, seed=0).stack.blocks[0].self_attn
    assert isinstance(layer, AttentionBeside)
    x, cache = torch.zeros(1, 3, 48), build(ModelSpec.of("llama", **SIZE), seed=0).make_cache(1)
    with pytest.raises(ConfigError, match="cross-attention is not supported; drop memory="):
        layer(x, memory=x)
    with (
        cache.step(cache.next_tokens(3)) as packed,
        pytest.raises(ConfigError, match="no state for the mixer beside attention"),
    ):
        layer(x, tokens=packed.tokens, cache=cache.pages[0])
    with pytest.raises(ConfigError, match="for 4 layers and 1 rows, the call has 8 layers and 1 rows"):
        build(spec, seed=0)(torch.zeros(1, 3, dtype=torch.int64), cache=cache)
    with pytest.raises(ConfigError, match="layers of state-space duality keep one state of all tokens"):
        build(spec, seed=0).make_cache(1, slack=2)
    with pytest.raises(ConfigError, match="tensor parallel does not support state-space duality yet"):
        share_of(spec, 2, 0)


@torch.no_grad()
def test_heads_of_attention_change_beside_a_state() -> None:
    spec = ModelSpec.of("llama", **SIZE, mixers=Softmax(beside=SSD))
    model = build(spec, seed=0, dtype=torch.float64).eval()
    full, state = model(IDS), model.state_dict()
    for changed, changed_spec in (repeat_kv_heads(state, spec, 4), change_pairing(state, spec, "adjacent")):
        assert changed_spec.mixers == spec.mixers
        assert (fill(changed_spec, changed, dtype=torch.float64)(IDS) - full).abs().max() < 1e-12
