"""Adapter folders: round trips in every family, and errors that say what is wrong with one (PEFT itself: test_peft)."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from headway.checkpoints import load_adapter, merged_state, save_adapter
from headway.checkpoints.bases import Base, base_of
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec
from headway.nn import Adapter, Lora, adapted, attach, set_active
from headway.positions import Rotary
from tests.checkpoints.adapters import IDS, KINDS, SIZE, small, trained
from tests.checkpoints.edits import set_keys, set_tensors
from tests.pairwise import chequered

FAMILIES = ("llama", "gpt2", "falcon", "gpt_bigcode", "roformer")


@chequered("family,kind", FAMILIES, list(KINDS))
def test_there_and_back_is_the_same_function(family: str, kind: str, tmp_path: Path) -> None:
    """The adapters of a fused layer's parts come back as one adapter of a larger rank."""
    model = small(family)
    adapter = trained(Adapter.fresh(model, KINDS[kind]))
    base_logits = model(IDS)
    save_adapter(tmp_path / "a", adapter, model.spec, base=Base(tmp_path, "0"))
    assert base_of(tmp_path / "a") == tmp_path
    attach(model, adapter, "mine")
    expected = model(IDS)
    loaded = load_adapter(tmp_path / "a", model.spec)
    attach(model, loaded, "back")
    set_active(model, ["back"])
    torch.testing.assert_close(model(IDS), expected, rtol=1e-5, atol=1e-6)
    assert (expected - base_logits).abs().max() > 1e-3
    if all(lora.rank == 4 for lora in loaded.layers.values()):
        assert loaded.layers == adapter.layers
        assert all(torch.equal(loaded.tensors[name], value) for name, value in adapter.tensors.items())


def test_the_pairing_of_rotary_positions_is_turned_with_the_weights(tmp_path: Path) -> None:
    """The folder stores rows of B and magnitudes of queries and keys in the order of the family's weights."""
    halves = small("llama", kv_heads=2)
    spec = replace(halves.spec, positions=Rotary(pairing="adjacent"))
    adapter = trained(Adapter.fresh(halves, KINDS["dora"]))
    save_adapter(tmp_path / "adjacent", adapter, spec)
    save_adapter(tmp_path / "halves", adapter, halves.spec)
    for stored in (load_adapter(tmp_path / "adjacent", spec), load_adapter(tmp_path / "halves", halves.spec)):
        assert all(torch.equal(stored.tensors[name], value) for name, value in adapter.tensors.items())
    turned = load_adapter(tmp_path / "adjacent", halves.spec).tensors
    for name, value in adapter.tensors.items():
        unchanged = "lora_A" in name or not name.partition("self_attn.")[2].startswith(("q_", "k_"))
        assert torch.equal(turned[name], value) == unchanged, name
    rows = adapter.tensors["model.layers.0.self_attn.k_proj.lora_B.weight"].view(2, 4, 2, 4)
    expected = rows.transpose(1, 2).reshape(16, 4)
    assert torch.equal(turned["model.layers.0.self_attn.k_proj.lora_B.weight"], expected)


def test_parts_of_a_fused_layer_with_one_a_are_one_adapter_and_come_back_to_the_bit(tmp_path: Path) -> None:
    model = small("gpt2")
    adapter = trained(Adapter.fresh(model, Lora(rank=3)))
    tensors = dict(adapter.tensors)
    for name in adapter.layers:
        shared = name.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
        tensors[f"{name}.lora_A.weight"] = tensors[f"{shared}.lora_A.weight"]
    save_adapter(tmp_path / "a", Adapter(adapter.layers, tensors), model.spec)
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors")
    assert stored["base_model.model.transformer.h.0.attn.c_attn.lora_A.weight"].shape == (3, 32)
    assert stored["base_model.model.transformer.h.0.attn.c_attn.lora_B.weight"].shape == (96, 3)
    loaded = load_adapter(tmp_path / "a", model.spec)
    assert loaded.layers == adapter.layers
    assert all(torch.equal(loaded.tensors[name], value) for name, value in tensors.items())


def test_some_parts_of_a_fused_layer_are_said_with_blocks_of_zeros_and_magnitudes_of_some_are_not(
    tmp_path: Path,
) -> None:
    model = small("gpt2")
    partial = trained(Adapter.fresh(model, Lora(rank=3), ("q_proj", "v_proj")))
    save_adapter(tmp_path / "a", partial, model.spec)
    attach(model, partial, "a")
    expected = model(IDS)
    loaded = load_adapter(tmp_path / "a", model.spec)
    layer = "model.layers.1.self_attn.k_proj"
    assert loaded.layers[layer].rank == 6
    assert not loaded.tensors[f"{layer}.lora_B.weight"].any()
    attach(model, loaded, "b")
    set_active(model, ["b"])
    torch.testing.assert_close(model(IDS), expected, rtol=1e-5, atol=1e-6)
    partial = Adapter.fresh(small("gpt2"), Lora(rank=3, magnitude=True), ("q_proj", "v_proj"))
    with pytest.raises(
        CheckpointError,
        match=r"c_attn is one layer in PEFT's files, which fuses .*k_proj.* the same LoRA settings",
    ):
        save_adapter(tmp_path / "b", partial, model.spec)
    assert not (tmp_path / "b").exists()


def test_targets_are_named_by_their_last_part_where_nothing_else_has_it(tmp_path: Path) -> None:
    model = small("gpt2")
    for layers, expected in (
        ((), ["c_attn", "c_fc", "c_proj"]),
        (("down_proj",), ["transformer.h.0.mlp.c_proj", "transformer.h.1.mlp.c_proj"]),
    ):
        save_adapter(tmp_path / "a", Adapter.fresh(model, Lora(rank=2), layers), model.spec, overwrite=True)
        config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        assert config["target_modules"] == expected
        assert config["fan_in_fan_out"]


def test_ranks_and_alphas_of_their_own(tmp_path: Path) -> None:
    model = small("llama")
    fresh = Adapter.fresh(model, Lora(rank=2, alpha=4))
    wide = Adapter.fresh(model, Lora(rank=5, alpha=3), ("down_proj",))
    adapter = trained(Adapter({**fresh.layers, **wide.layers}, {**fresh.tensors, **wide.tensors}))
    save_adapter(tmp_path / "a", adapter, model.spec)
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4)
    assert set(config["rank_pattern"].values()) == {5}
    assert load_adapter(tmp_path / "a", model.spec).layers == adapter.layers
    rewrite(tmp_path / "a", rank_pattern={r"layers\.\d\.mlp\.down_proj": 5}, alpha_pattern={"down_proj": 3})
    assert load_adapter(tmp_path / "a", model.spec).layers == adapter.layers
    rewrite(
        tmp_path / "a",
        target_modules=r"model\.layers\.\d\..*_proj",
        auto_mapping=None,
        layer_replication=None,
    )
    assert load_adapter(tmp_path / "a", model.spec).layers == adapter.layers


@pytest.mark.parametrize(
    ("usual", "other"),
    [(Lora(rank=2, alpha=4), Lora(rank=2, alpha=3)), (Lora(rank=2, alpha=4), Lora(rank=5, alpha=4))],
)
def test_a_rank_or_an_alpha_of_its_own(usual: Lora, other: Lora, tmp_path: Path) -> None:
    """A layer's own rank is kept if its alpha is the usual one, and the other way round."""
    model = small("llama")
    parts = [Adapter.fresh(model, usual), Adapter.fresh(model, other, ("down_proj",))]
    adapter = Adapter({**parts[0].layers, **parts[1].layers}, {**parts[0].tensors, **parts[1].tensors})
    save_adapter(tmp_path / "a", adapter, model.spec)
    assert load_adapter(tmp_path / "a", model.spec).layers == adapter.layers


def test_patterns_hold_for_ends_of_names_and_the_first_that_fits_decides(tmp_path: Path) -> None:
    """PEFT does the same, and its patterns may have alternatives (`peft.utils.other.get_pattern_key`)."""
    model = small("llama")
    inputs = Adapter.fresh(model, Lora(rank=2, alpha=3), ("q_proj", "v_proj"))
    outputs = Adapter.fresh(model, Lora(rank=2, alpha=8), ("o_proj", "down_proj"))
    adapter = Adapter({**inputs.layers, **outputs.layers}, {**inputs.tensors, **outputs.tensors})
    save_adapter(tmp_path / "a", adapter, model.spec)
    patterns = {"q_proj|v_proj": 3, "proj": 4, r"self_attn\.q_proj": 5}
    rewrite(tmp_path / "a", lora_alpha=8, alpha_pattern=patterns)
    assert load_adapter(tmp_path / "a", model.spec).layers == adapter.layers


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_compute_what_the_adapters_add(kind: str) -> None:
    model = small("llama")
    adapters = [trained(Adapter.fresh(model, KINDS[kind]), seed) for seed in (1, 2)]
    state = dict(model.state_dict())
    for i, adapter in enumerate(adapters):
        attach(model, adapter, f"number {i}")
    expected = model(IDS)
    merged = small("llama")
    merged.load_state_dict(dict(merged_state(state, adapters)))
    torch.testing.assert_close(merged(IDS), expected, rtol=1e-5, atol=1e-6)
    low = {name: value.bfloat16() for name, value in state.items()}
    merged_low = merged_state(low, adapters)
    assert {value.dtype for value in merged_low.values()} == {torch.bfloat16}
    name = "model.layers.1.mlp.up_proj.weight"
    exact = merged_state({name: low[name].float()}, adapters)[name]
    assert torch.equal(merged_low[name], exact.bfloat16())


rewrite = partial(set_keys, name="adapter_config.json")
retensor = partial(set_tensors, name="adapter_model.safetensors")
NAME = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: rewrite(f, peft_type="IA3"), r'"peft_type" is \'IA3\'.* accepted is \'LORA\''),
        (lambda f: rewrite(f, modules_to_save=["lm_head"]), r'"modules_to_save" is .*only LoRA adapters of'),
        (lambda f: rewrite(f, bias="all"), r'"bias" is \'all\''),
        (lambda f: rewrite(f, lora_bias=True), r'"lora_bias" is True'),
        (lambda f: rewrite(f, init_lora_weights="pissa"), r'"init_lora_weights" is \'pissa\''),
        (lambda f: rewrite(f, layers_to_transform=[0]), r'"layers_to_transform" is \[0\]'),
        (lambda f: rewrite(f, use_dorra=True), r'"use_dorra" is True \(did you mean "use_dora"\?\)'),
        (lambda f: rewrite(f, r=8), r"lora_A\.weight is \[4, 32\], this model and .* say \[8, 32\]"),
        (lambda f: rewrite(f, r="4"), r"the rank of .*q_proj must be a whole number, got '4'"),
        (lambda f: rewrite(f, r=4.5), r"the rank of .*q_proj must be a whole number, got 4\.5"),
        (lambda f: rewrite(f, rank_pattern={"(": 3}), r"is no regular expression"),
        (lambda f: rewrite(f, target_modules=[]), r'"target_modules" must be a list of module names'),
        (lambda f: rewrite(f, target_modules=["c_attn"]), r"match no linear layer .* another model .*q_proj"),
        (lambda f: rewrite(f, target_modules=["q_proj"]), r"unexpected: .*\.down_proj\.lora_A\.weight"),
        (lambda f: rewrite(f, use_dora=True), r"missing: .*lora_magnitude_vector"),
        (lambda f: retensor(f, lambda t: t.pop(f"{NAME}.lora_A.weight")), rf"\(1 difference\).*\n  missing: {NAME}"),
        (
            lambda f: retensor(f, lambda t: t.update({"base_model.model.lm_head.weight": torch.zeros(2)})),
            r"unexpected: base_model\.model\.lm_head\.weight",
        ),
        (
            lambda f: retensor(
                f, lambda t: [t.update({n.removeprefix("base_model."): t.pop(n)}) for n in sorted(t)]
            ),
            r"missing: .*nearest there",  # PEFT warns, and computes what the base model does
        ),
        (
            lambda f: retensor(f, lambda t: t.update({f"{NAME}.lora_A.weight": t[f"{NAME}.lora_A.weight"].int()})),
            r"dtype: .*q_proj\.lora_A\.weight is int32, and the numbers of an adapter are floating point",
        ),
        (lambda f: (f / "adapter_model.safetensors").unlink(), r"no file or folder .*adapter_model"),
        (lambda f: (f / "adapter_config.json").unlink(), r"is not an adapter: it has no adapter_config\.json"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_folder_is_said(
    change: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    model = small("llama")
    save_adapter(tmp_path / "a", Adapter.fresh(model, KINDS["lora"]), model.spec)
    change(tmp_path / "a")
    with pytest.raises((CheckpointError, ConfigError), match=f"(?s){words}") as error:
        load_adapter(tmp_path / "a", model.spec)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (ModelSpec.of("llama", **{**SIZE, "layers": 3}), r"missing: .*layers\.2\."),
        (ModelSpec.of("llama", **{**SIZE, "layers": 1}), r"unexpected: .*layers\.1\."),
        (ModelSpec.of("llama", **{**SIZE, "hidden": 64}), r"shape: .*say \[64, 4\]"),
        (ModelSpec.of("gpt2", **SIZE), r"match no linear layer in the blocks of this model"),
    ],
)
def test_an_adapter_of_another_model_is_refused(other: ModelSpec, words: str, tmp_path: Path) -> None:
    model = small("llama")
    save_adapter(tmp_path / "a", Adapter.fresh(model, KINDS["lora"]), model.spec)
    with pytest.raises(CheckpointError, match=f"(?s)another model .*{words}|{words}"):
        load_adapter(tmp_path / "a", other)


def test_a_folder_is_written_whole_and_not_over_another(tmp_path: Path) -> None:
    model = small("llama")
    adapter = Adapter.fresh(model, KINDS["lora"])
    save_adapter(tmp_path / "a", adapter, model.spec)
    with pytest.raises(CheckpointError, match="exists; choose another name, or use --overwrite"):
        save_adapter(tmp_path / "a", adapter, model.spec)
    (tmp_path / "a" / "notes.txt").write_text("mine")
    save_adapter(tmp_path / "a", adapter, model.spec, generation={"eos_token_id": 3}, overwrite=True)
    assert json.loads((tmp_path / "a" / "generation_config.json").read_text()) == {"eos_token_id": 3}
    save_adapter(tmp_path / "a", trained(adapter), model.spec, overwrite=True)
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        *("adapter_config.json", "adapter_model.safetensors", "notes.txt")
    ]
    with pytest.raises(CheckpointError, match="does not name its base model"):
        base_of(tmp_path / "a")


def test_layers_that_are_adapted_are_those_of_the_blocks() -> None:
    model = small("llama")
    attach(model, Adapter.fresh(model, KINDS["lora"]))
    assert len(dict(adapted(model))) == 14
    assert not any("lm_head" in name or "embed" in name for name, _ in adapted(model))
