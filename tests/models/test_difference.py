"""Differences between two models: every field is reported, numbers are those of the modules, ladders are complete."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest

from headway.attention.linear_attention import LinearAttentionSpec
from headway.checkpoints import save_folder
from headway.cli import run
from headway.errors import ConfigError
from headway.models import ModelSpec, build, catalog
from headway.models.description import ASPECTS
from headway.models.difference import differences, ladder, numbers
from headway.models.head import Head
from headway.nn import Experts
from headway.nn.altup import AltUp
from headway.patterns import Causal, Full, Window
from headway.positions import Rotary, Sinusoidal
from tests.requirements import rows

SIZES: dict[str, Any] = {"vocab": 61, "width": 32, "layers": 2, "heads": 4, "hidden": 48}
BASE = ModelSpec.of("llama", **SIZES)
ENCODER = ModelSpec.of("bert", **SIZES)
PAIR = ModelSpec.of_pair("transformer", tied=True, **SIZES)
OTHER: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "family": (BASE, {"family": "mistral"}),
    "patterns": (BASE, {"patterns": (Causal(), Window.last(3))}),
    "positions": (BASE, {"positions": Rotary(pairing="adjacent")}),
    "causal": (BASE, {"causal": False, "patterns": Full(), "head": Head("states"), "output_bias": False}),
    "global_projections": (ENCODER, {"global_projections": True}),
    "encoder": (PAIR, {"encoder": replace(PAIR.encoder, layers=1, patterns=Full())}),  # type: ignore[type-var]
    "shared_embedding": (PAIR, {"shared_embedding": False}),
    "head": (ENCODER, {"head": Head("embed"), "tied": False, "output_bias": False}),
    "order": (BASE, {"order": "joint"}),
    "norm": (BASE, {"norm": "layer"}),
    "activation": (BASE, {"activation": "relu"}),
    "experts": (BASE, {"experts": Experts(count=4, top=2)}),
    "layer_hidden": (BASE, {"layer_hidden": (0, 64)}),
    "mlp_sparsity": (BASE, {"mlp_sparsity": 0.5}),
    "altup": (BASE, {"altup": AltUp()}),
    "per_layer_vocab": (replace(BASE, per_layer_embedding=4), {"per_layer_vocab": 5}),
    "mixers": (BASE, {"mixers": LinearAttentionSpec("relu")}),
    "kv_heads": (BASE, {"kv_heads": 2}),
    "pooled_dropout": (ENCODER, {"pooled_dropout": True}),
    "attention_scale": (BASE, {"attention_scale": 0.5}),
    "qk_norm": (BASE, {"qk_norm": "all"}),
    "gate": (BASE, {"gate": "head"}),
    "gate_act": (replace(BASE, gate="head"), {"gate_act": "softplus"}),
    "embedding_width": (ENCODER, {"embedding_width": 16}),
    "max_context": (BASE, {"max_context": 99}),
    "heads": (BASE, {"heads": 8, "kv_heads": 8}),
}


def test_the_aspects_are_all_fields_and_each_once() -> None:
    listed = [field for aspect in ASPECTS.values() for field in aspect.fields]
    assert sorted(listed) == sorted(f.name for f in fields(ModelSpec))


@pytest.mark.parametrize("field", [f.name for f in fields(ModelSpec)])
def test_a_field_that_differs_is_told_under_its_own_aspect(field: str) -> None:
    spec, change = OTHER.get(field, (BASE, {}))
    if not change:
        old = getattr(spec, field)
        new = not old if isinstance(old, bool) else 2 * old if old else 0.25 if isinstance(old, float) else 2
        change = {field: new, **({"patterns": Causal()} if field == "layers" else {})}
    changed = replace(spec, **change)
    expected = {name for name, aspect in ASPECTS.items() if field in aspect.fields}
    aspects = {difference.aspect.removeprefix("encoder's ") for difference in differences(spec, changed)}
    assert expected <= aspects or (field == "encoder" and aspects == {"layers"})
    assert differences(spec, spec) == ()


def test_numbers_are_those_of_the_modules() -> None:
    grouped = replace(BASE, kv_heads=2)
    by_name = {number.name: number for number in numbers(BASE, grouped, 32)}
    counts = [sum(p.numel() for p in build(spec, seed=0).parameters()) for spec in (BASE, grouped)]
    assert [by_name["parameters"].first, by_name["parameters"].second] == counts
    assert by_name["keys and values, bytes per token"].ratio == 0.5
    assert numbers(BASE, ENCODER, 32)[-1].second is not None
    assert by_name["... feed-forward"].ratio == 1


def test_numbers_that_a_model_lacks_are_none() -> None:
    kv_bytes = {number.name: number for number in numbers(ENCODER, BASE, 32)}[
        "keys and values, bytes per token"
    ]
    assert kv_bytes.first is None
    assert kv_bytes.ratio is None


def test_row_33_a_ladder_changes_one_aspect_at_a_time() -> None:
    first = ModelSpec.of("transformer", **SIZES)
    steps = ladder(first, replace(BASE, kv_heads=2))
    assert list(steps)[:6] == ["first", "order", "norm", "positions", "feed-forward", "heads"]
    specs = list(steps.values())
    assert specs[0] == first
    assert specs[-1] == replace(BASE, kv_heads=2)
    for (name, spec), previous in zip(list(steps.items())[1:], specs, strict=False):
        assert [difference.aspect for difference in differences(previous, spec)] == [name]


def test_a_ladder_between_sizes_that_no_step_can_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ladder: .* cannot change by itself.*same sizes"):
        ladder(BASE, replace(BASE, layers=3, patterns=Causal()))


def test_row_33_the_command_lists_the_differences_of_the_document(capsys: pytest.CaptureFixture[str]) -> None:
    (requirement,) = (row for row in rows() if row.number == 33)
    assert run([*requirement.shown_by.split()[1:], "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    by_aspect = {
        difference["aspect"]: (difference["first"], difference["second"])
        for difference in report["differences"]
    }
    for aspect, old, new in (
        ("order", "post: norm(x + f(x))", "pre: x + f(norm(x))"),
        ("norm", "LayerNorm", "RMSNorm"),
        ("positions", "on embeddings: Sinusoidal", "on queries and keys: Rotary"),
        ("feed-forward", "relu(up x)", "silu(gate x) * up x"),
        ("heads", "(MHA)", "(GQA)"),
    ):
        assert old in by_aspect[aspect][0]
        assert new in by_aspect[aspect][1]
    kv_bytes = next(number for number in report["numbers"] if number["name"].startswith("keys and values"))
    assert kv_bytes["second"] == 2 * 80 * 8 * 128 * 2, "80 layers, 8 of 64 heads of 128, bfloat16"


def test_sizes_and_folders_are_compared(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    save_folder(tmp_path / "a", build(BASE, seed=0).eval())
    save_folder(tmp_path / "b", build(replace(BASE, positions=Rotary(5e5, pairing="halves")), seed=0).eval())
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    text = capsys.readouterr().out
    assert "Rotary(theta=500000.0, pairing='halves')" in text
    assert "heads\n" not in text
    assert run(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert "the same model but for their weights" in capsys.readouterr().out
    assert run(["diff", "llama-2-7b", "llama", "--context", "4096"]) == 0
    text = capsys.readouterr().out
    assert "4,096 tokens" in text
    assert "order" not in text


def test_what_is_neither_is_an_error_that_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "lama", "gpt2"]) == 1
    assert "'lama' is not a folder, a size or a family (did you mean" in capsys.readouterr().err
    assert run(["diff", "llama", "./nowhere"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_families_share_the_sizes_of_the_other() -> None:
    from headway.cli.diff import of_family

    like = catalog.spec("gpt2-medium")
    spec = of_family("llama", like)
    assert (spec.width, spec.layers, spec.heads, spec.vocab) == (1024, 24, 16, 50257)
    assert not isinstance(spec.positions, Sinusoidal)
