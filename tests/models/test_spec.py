"""Impossible specs are refused with a reason; possible ones are built, equal for equal seeds."""

import math
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import spec_from_config
from headway.errors import ConfigError
from headway.models import FAMILIES, Decoder, Encoder, ModelSpec, build, catalog
from headway.models.decoder_families import DECODERS
from headway.models.encoder_families import ENCODERS, PAIRS
from headway.models.expert_families import EXPERTS
from headway.models.hybrid_families import HYBRIDS
from headway.models.mixers import Softmax
from headway.models.normed_families import NORMED
from headway.patterns import Causal, Full, PerHead, Window
from headway.positions import DynamicNTK, Learned, NoPositions, Rotary

FIELDS: dict[str, Any] = {"vocab": 50, "width": 48, "layers": 4, "heads": 4, "hidden": 64}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"kv_heads": 3},
            r"4 query heads cannot share 3 key/value heads evenly; kv_heads must be one of \[1, 2, 4\]",
        ),
        ({"kv_heads": 8}, "4 query heads cannot share 8"),
        ({"heads": 5}, "width 48 is not a multiple of 5 heads; give head_dim"),
        ({"head_dim": 7}, "head_dim 7 is odd, and coordinates are rotated in pairs"),
        (
            {"positions": Rotary(pairing="halves", dims=16), "head_dim": 12},
            "dims=16 does not fit heads of 12",
        ),
        (
            {"positions": Learned(100), "trained_context": 512},
            "is longer than the table of 100 positions",
        ),
        ({"positions": "rope"}, "positions must be a scheme such as Rotary.*got 'rope'"),
        ({"patterns": [Causal()] * 3}, "3 patterns do not fit 4 layers.*its length must divide 4"),
        ({"patterns": [Causal()] * 8}, "8 patterns do not fit 4 layers"),
        ({"patterns": []}, "0 patterns do not fit 4 layers"),
        (
            {"patterns": "Causal()"},
            r"patterns must be Pattern values such as Causal\(\).*headway.patterns.parse",
        ),
        ({"patterns": [Causal(), "sliding_attention"]}, "patterns must be Pattern values.*sliding_attention"),
        ({"patterns": [Causal(), Full()]}, r"layer 1, Full\(\), lets a token see later ones"),
        ({"patterns": Window.around(4)}, "layer 0.*lets a token see later ones"),
        (
            {"patterns": PerHead(Causal(), Window.last(2))},
            "the pattern of layer 0 names 2 heads, but there are 4",
        ),
        ({"vocab": 0}, "vocab must be a whole number of at least 1, got 0"),
        ({"width": 48.0}, r"width must be a whole number of at least 1, got 48\.0"),
        ({"layers": True}, "layers must be a whole number of at least 1, got True"),
        ({"max_context": 0}, "max_context must be a whole number of at least 1, got 0"),
        ({"norm_eps": 0.0}, r"norm_eps must be above 0 and below 1, got 0\.0"),
        ({"norm_eps": "1e-5"}, "norm_eps must be above 0 and below 1, got '1e-5'"),
        ({"attention_dropout": 1.0}, "attention_dropout must be a probability from 0 to below 1"),
        ({"qk_norm": True}, r"no qk_norm True.*there are none, head, all"),
        ({"norm_offset": -1.0}, r"norm_offset must be a number from 0 to 1, got -1\.0"),
        ({"norm_offset": 1.0, "norm_weight": False}, "norm_weight=False excludes norm_offset and norm_bias"),
        ({"norm_bias": True, "norm_weight": False}, "norm_weight=False excludes norm_offset and norm_bias"),
        ({"qk_norm": "all", "norm": "layer"}, 'qk_norm="all" needs norm="rms"'),
        ({"qk_norm": "rotated", "mixers": LinearAttentionSpec()}, "need softmax attention in all layers"),
        (
            {"qk_norm": "rotated", "positions": Rotary(pairing="halves", scaling=DynamicNTK(2.0, 64))},
            "rotations that do not depend on the length",
        ),
        (
            {"first_norm": False, "order": "output"},
            "first_norm=False needs order .pre. or .sandwich., got 'output'",
        ),
        ({"residual_scale": 0.0}, r"residual_scale must be a finite number above 0, got 0\.0"),
        ({"score_cap": -2.0}, r"score_cap must be a finite number above 0, got -2\.0"),
        ({"activation": "swiglu"}, r"no activation 'swiglu' \(did you mean \"silu\"\?\)"),
        ({"famliy": "llama"}, r"ModelSpec has no field 'famliy' \(did you mean \"family\"\?\)"),
        ({"window": 512}, "ModelSpec has no field 'window'"),
    ],
    ids=str,
)
def test_impossible_specs_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelSpec.of("llama", **{**FIELDS, **given})


def test_an_unknown_family_and_missing_fields_are_named() -> None:
    with pytest.raises(
        ValueError, match=r"no family 'lama' \(did you mean \"llama\"\?\); there are llama, mistral"
    ):
        ModelSpec.of("lama", **FIELDS)
    with pytest.raises(ValueError, match=r"ModelSpec.of\('llama', ...\): vocab, hidden must be given"):
        ModelSpec.of("llama", width=48, layers=2, heads=4)
    with pytest.raises(ValueError, match="there is no family 'gpt'"):
        replace(ModelSpec.of("llama", **FIELDS), family="gpt")


def test_patterns_are_given_once_or_by_layer_or_repeated() -> None:
    window = Window.last(3)
    assert ModelSpec.of("llama", **FIELDS).patterns == (Causal(),) * 4
    assert ModelSpec.of("llama", **FIELDS, patterns=window).patterns == (window,) * 4
    repeated = ModelSpec.of("llama", **FIELDS, patterns=[window, Causal()])
    assert repeated.patterns == (window, Causal(), window, Causal())
    by_layer = (window, window, window, Causal())
    assert repeated.with_patterns(by_layer).patterns == by_layer
    assert repeated.with_patterns(by_layer) == ModelSpec.of("llama", **FIELDS, patterns=by_layer)


def test_families_are_data() -> None:
    special = {*DECODERS, *HYBRIDS, *PAIRS, *ENCODERS}
    assert {n for n in FAMILIES if set(ModelSpec.of(n, **FIELDS).mixers) != {Softmax()}} <= {
        *HYBRIDS,
        "gemma3n_text",
        "gemma4_text",
    }
    mixed = {name: ModelSpec.of(name, **FIELDS) for name in EXPERTS}
    assert all(all(spec.experts) for spec in mixed.values())
    assert not any(
        any(ModelSpec.of(name, **FIELDS).experts) for name in FAMILIES if name not in {*EXPERTS, *HYBRIDS}
    )
    tested_apart = {*DECODERS, *EXPERTS}
    specs = {name: ModelSpec.of(name, **FIELDS) for name in FAMILIES if name not in tested_apart}
    llamas = [n for n, s in specs.items() if s.causal and s.gated and s.norm == "rms" and n not in special]
    normed = [name for name in NORMED if name != "olmo"]
    assert llamas == ["llama", "mistral", "ministral", "qwen2", "qwen3", *normed]
    assert [n for n in llamas if specs[n].qkv_bias] == ["qwen2", "glm4"]
    assert [n for n, s in specs.items() if s.qk_norm == "head" and n not in HYBRIDS] == [
        "qwen3",
        "exaone4",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
    ]
    assert [n for n, s in specs.items() if s.norm_offset and n not in HYBRIDS] == [
        *("gemma", "gemma2", "vaultgemma", "gemma3_text")
    ]
    assert [n for n, s in specs.items() if s.global_projections] == ["longformer"]
    assert specs["qwen2"].positions == Rotary(1e6, pairing="halves")
    assert ModelSpec.of("qwen2", **FIELDS, qkv_bias=False).qkv_bias is False
    specs |= mixed | {name: ModelSpec.of(name, **FIELDS) for name in DECODERS}
    assert {type(build(s, device="meta")) for s in specs.values()} == {Decoder, Encoder}


def test_specs_are_frozen_hashable_values() -> None:
    a, b = ModelSpec.of("llama", **FIELDS), ModelSpec.of("llama", **FIELDS)
    assert a == b
    assert len({a, b, replace(a, tied=True)}) == 2
    with pytest.raises(FrozenInstanceError):
        a.width = 3  # type: ignore[misc]
    assert "Causal()" in repr(a)


def test_one_dial() -> None:
    for depth in (1, 2, 5, 6):
        spec = ModelSpec.of_depth(depth, 300, context=128)
        assert (spec.layers, spec.width, spec.heads, spec.head_dim) == (depth, 64 * depth, depth, 64)
        assert spec.hidden % 64 == 0
        assert 0 <= spec.hidden - 8 * spec.width / 3 < 64
        assert spec.heads // spec.kv_heads == (1 if depth % 2 else 2)
        assert spec.tied
    changed = ModelSpec.of_depth(
        6, 300, group=3, tied=False, hidden=500, family="qwen3", patterns=[Window.last(9), Causal()]
    )
    assert (changed.kv_heads, changed.tied, changed.hidden, changed.qk_norm) == (2, False, 500, "head")
    assert changed.patterns[:2] == (Window.last(9), Causal())
    with pytest.raises(
        ValueError, match="6 heads cannot be divided into groups of 4 per kv head; group must divide 6"
    ):
        ModelSpec.of_depth(6, 300, group=4)
    with pytest.raises(ValueError, match="depth must be at least 1, got 0"):
        ModelSpec.of_depth(0, 300)


def test_the_same_seed_gives_the_same_weights() -> None:
    spec = ModelSpec.of_depth(2, 97)
    a, b, c = (build(spec, seed=s).state_dict() for s in (1, 1, 2))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not torch.equal(a["model.embed_tokens.weight"], c["model.embed_tokens.weight"])
    in_bf16 = build(spec, seed=1, dtype=torch.bfloat16).state_dict()
    assert all(torch.equal(a[n].bfloat16(), in_bf16[n]) for n in a)
    torch.manual_seed(3)
    first = build(spec).state_dict()
    torch.manual_seed(3)
    second = build(spec).state_dict()
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_fresh_weights_are_those_of_the_table() -> None:
    spec = ModelSpec.of(
        "qwen2", vocab=500, width=256, layers=8, heads=4, hidden=512, init_std=0.05, out_bias=True
    )
    for name, parameter in build(spec, seed=0).named_parameters():
        values = parameter.detach()
        if name.endswith("bias"):
            assert not values.any()
        elif "norm" in name:
            assert bool((values == 1).all())
        else:
            scale = 0.05 / math.sqrt(16) if "o_proj" in name or "down_proj" in name else 0.05
            count = values.numel()
            assert abs(float(values.std()) / scale - 1) < 5 / math.sqrt(2 * count), name
            assert abs(float(values.mean())) < 5 * scale / math.sqrt(count), name


def test_every_parameter_is_filled() -> None:
    """Tests fill fresh memory with NaN: parameters that are not written show."""
    for positions in (Learned(64), NoPositions()):
        spec = ModelSpec.of("llama", **FIELDS, positions=positions, trained_context=64, mlp_bias=True)
        for name, parameter in build(spec, seed=0).named_parameters():
            assert bool(parameter.isfinite().all()), name


def test_the_meta_device_holds_nothing() -> None:
    model = build(catalog.spec("llama-1-65b"), device="meta")
    assert all(p.is_meta for p in model.parameters())


@pytest.mark.parametrize("name", ["deepseek_v3", "dbrx", "grok-1"])
def test_what_is_another_kind_of_model_is_no_typo(name: str) -> None:
    for find in (ModelSpec.of, catalog.spec, lambda n: spec_from_config({"model_type": n})):
        with pytest.raises(ConfigError, match="are not supported") as refused:
            find(name)
        assert "did you mean" not in str(refused.value)
    with pytest.raises(ConfigError, match="knows no model_type 'phi4'; there are"):
        spec_from_config({"model_type": "phi4"})
