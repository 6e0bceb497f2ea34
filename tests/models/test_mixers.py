"""Mixers by layer: the same results however a row is cut, costs and words of their specs, and what is refused."""

from typing import Any

import pytest
import torch

from headway.attention.delta import DeltaSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import config_from_spec, spec_from_config
from headway.errors import ConfigError
from headway.models import Head, ModelSpec, build, cost
from headway.models.description import ASPECTS
from headway.models.mixers import Softmax
from headway.nn import Cut, GatedDelta
from headway.nn.cuts import patterns_without
from headway.patterns import Causal, Window
from headway.positions import NoPositions
from headway.tokens import Tokens
from tests.models.mixers import DELTA, SIZE, SPECS

IDS = torch.randint(97, (2, 23), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module", params=SPECS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(SPECS[request.param], seed=0, dtype=torch.float64).eval()


@torch.no_grad()
def test_decoding_is_the_full_forward_at_every_cut(model: Any) -> None:
    full = model(IDS)
    for cut in range(1, 23):
        cache = model.make_cache(2)
        parts = [model(IDS[:, :cut], cache=cache), model(IDS[:, cut:], cache=cache)]
        assert (torch.cat(parts, 1) - full).abs().max() < 1e-12
    cache = model.make_cache(2)
    steps = [model(IDS[:, i : i + 1], cache=cache) for i in range(23)]
    assert (torch.cat(steps, 1) - full).abs().max() < 1e-12


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_and_packed_documents_are_rows_of_their_own(model: Any, side: str) -> None:
    full = model(IDS)
    tokens = Tokens.from_lengths([23, 9], side=side)
    valid = tokens.valid[1]
    ids = IDS.clone()
    ids[1] = 60
    ids[1, valid] = IDS[1, :9]
    assert (model(ids, tokens=tokens)[1, valid] - full[1, :9]).abs().max() < 1e-12
    packed = model(IDS.view(1, -1), tokens=Tokens.packed([[23, 23]]))
    assert (packed.view(2, 23, -1) - full).abs().max() < 1e-12
    cache, outputs = model.make_cache(2), []
    for count, lengths in ((7, [7, 3]), (9, [9, 0]), (7, [7, 6])):
        begin = cache.lengths
        ids = torch.zeros(2, count, dtype=torch.int64)
        next_tokens = cache.next_tokens(count, lengths, side)
        for row, n in enumerate(lengths):
            ids[row, next_tokens.valid[row]] = IDS[row, begin[row] : begin[row] + n]
        out = model(ids, tokens=next_tokens, cache=cache)
        outputs.append([out[row, next_tokens.valid[row]] for row in range(2)])
    for row, n in enumerate((23, 9)):
        assert (torch.cat([part[row] for part in outputs]) - full[row, :n]).abs().max() < 1e-12


@torch.no_grad()
def test_forks_and_reordered_rows_go_on_by_themselves(model: Any) -> None:
    full = model(torch.cat((IDS[:, :11], IDS[[1, 0], 11:]), 1))
    cache = model.make_cache(2)
    model(IDS[:, :11], cache=cache)
    fork = cache.fork()
    model(IDS[:, 11:], cache=cache)
    assert (model(IDS[[1, 0], 11:], cache=fork) - full[:, 11:]).abs().max() < 1e-12
    cache = model.make_cache(2)
    model(IDS[:, :11], cache=cache)
    cache.reorder([1, 1, 0])
    reordered = model(IDS[[0, 0, 1], 11:], cache=cache)
    assert (reordered - full[[1, 1, 0], 11:]).abs().max() < 1e-12


def test_a_cache_holds_what_was_counted(model: Any) -> None:
    cache, spec = model.make_cache(2), model.spec
    with torch.no_grad():
        model(IDS, cache=cache)
    assert cache.nbytes == cost.kv_bytes_stored(spec, 23, torch.float64, batch=2)
    assert cache.slots == tuple(64 for _ in range(4))


def test_gradients_reach_every_parameter(model: Any) -> None:
    model(IDS, targets=IDS).total.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


@pytest.mark.parametrize("name", SPECS)
def test_a_folder_of_ours_says_them(name: str) -> None:
    config = config_from_spec(SPECS[name])
    assert config["model_type"] == "headway"
    assert spec_from_config(config) == SPECS[name]


def test_words() -> None:
    words = ASPECTS["scores"].words(SPECS["delta + full"])
    assert words == (
        "layers 0-2: the gated delta rule: DeltaSpec(heads=4, key_heads=2, head_dim=8, value_dim=6); "
        "layers 3: q . k / sqrt(D)"
    )


def test_costs_count_layers_of_their_own() -> None:
    spec, delta = SPECS["delta + full"], SPECS["delta"]
    full = ModelSpec.of("llama", **SIZE)
    assert cost.kv_bytes_per_token(spec) * 4 == cost.kv_bytes_per_token(full)
    assert cost.kv_bytes_per_token(delta) == 0
    state = 4 * (4 * 8 * 6 + 3 * (16 + 16 + 24))
    assert cost.kv_bytes_stored(delta, 1000) == cost.kv_bytes_read(delta, 1) == 4 * state
    assert cost.kv_bytes_stored(spec, 64) == 3 * state + cost.kv_bytes_stored(full, 64) // 4
    of_layer = 48 * (16 + 16 + 24 + 4 + 4 + 24) + 24 * 48
    assert cost.matrix_weights(delta) == 4 * (of_layer + 3 * 48 * 80)
    assert cost.decode_flops(delta, 9) == cost.decode_flops(delta, 999)
    assert cost.attention_pairs(spec, 10) == 4 * 55


REFUSED: list[tuple[Any, str]] = [
    (lambda: ModelSpec.of("llama", **SIZE, mixers="delta"), r"mixers must be values of Softmax, .* got 'delta'"),
    (lambda: ModelSpec.of("llama", **SIZE, mixers=(DELTA, Softmax(), DELTA)), "3 mixers do not fit 4 layers"),
    (
        lambda: ModelSpec.of("llama", **SIZE, mixers=(DELTA, Softmax()), patterns=Window.last(4)),
        r"layer 0 is the gated delta rule, whose pattern must be Causal\(\)",
    ),
    (lambda: ModelSpec.of("llama", **SIZE, mixers=DELTA), "positions act on queries and keys, but no layer has any"),
    (
        lambda: ModelSpec.of("llama", **SIZE, mixers=DELTA, positions=NoPositions(), gate="head"),
        "gate='head' has no effect on the gated delta rule: it has no attention heads",
    ),
    (
        lambda: build(SPECS["delta + full"], seed=0).make_cache(1, slack=2),
        "slack=2: layers of the gated delta rule keep one state",
    ),
    (
        lambda: patterns_without([GatedDelta(48, DELTA)], [Cut(layer=0)]),
        "a GatedDelta has no attention weights to cut",
    ),
    (lambda: GatedDelta(48, DELTA)(torch.zeros(1, 2, 48), score=[1]), "there are no scores of pairs"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_fields_that_say_nothing_are_left_out_with_the_last_layer_that_hears_them() -> None:
    spec = ModelSpec.of("qwen3_5_text", **SIZE)
    assert (spec.gate, spec.qk_norm, spec.softmax_layers) == ("channel", "head", (3,))
    replaced = spec.with_mixer(DELTA)
    assert (replaced.gate, replaced.qk_norm, replaced.positions) == (None, "none", NoPositions())
    windows = ModelSpec.of("llama", **SIZE, patterns=Window.last(4))
    assert windows.with_mixer([Softmax(), DELTA]).patterns == (Window.last(4), Causal()) * 2


@torch.no_grad()
def test_a_decoder_without_its_output_layer_sees_what_it_did() -> None:
    spec = SPECS["delta + full"]
    model = build(spec, seed=0, dtype=torch.float64).eval()
    states_model = build(spec.with_head(Head("states")), seed=0, dtype=torch.float64).eval()
    states_model.load_state_dict({name: p for name, p in model.state_dict().items() if "lm_head" not in name})
    assert torch.equal(states_model(IDS), model.hidden(IDS))
    causal = ModelSpec.of("roformer", **{**SIZE, "kv_heads": 4}).with_mixer(DELTA)
    assert (causal.patterns, causal.positions) == ((Causal(),) * 4, NoPositions())


def test_a_cache_of_another_layer_is_refused() -> None:
    model = build(SPECS["delta"], seed=0)
    smaller = build(SPECS["delta"].with_mixer(DeltaSpec(heads=2, key_heads=2, head_dim=4)), seed=0)
    with pytest.raises(
        ConfigError, match=r"cache must keep the states of DeltaSpec.*got a PagedStates of DeltaSpec"
    ):
        model(IDS, cache=smaller.make_cache(2))
    linear = build(SPECS["delta"].with_mixer(LinearAttentionSpec()), seed=0)
    with pytest.raises(
        ConfigError, match=r"LinearAttention: cache must keep the sums of .* a PagedStates of DeltaSpec"
    ):
        linear(IDS, cache=model.make_cache(2))
