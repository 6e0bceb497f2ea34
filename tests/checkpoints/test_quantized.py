"""Folders with weights of 8 and 4 bits: written and read again to the bit, others' folders by their own formulas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints import inspect, load_folder, load_model, save_adapter, save_folder
from headway.checkpoints.adapters import attach_folders
from headway.checkpoints.quantized.packed import from_words, to_words
from headway.checkpoints.restore import build_model
from headway.errors import CheckpointError
from headway.models import Model, ModelSpec, build
from headway.models.quantize import quantize_model, quantized_layers
from headway.nn import Adapter, Lora, block_linears
from headway.nn.weights import from_codes
from headway.quantization import quantize_weights
from tests.pairwise import chequered

SIZE: dict[str, Any] = {"vocab": 61, "width": 64, "layers": 2, "heads": 4, "hidden": 96, "init_std": 0.2}
LLAMA = ModelSpec.of("llama", **SIZE, kv_heads=2, tied=False)
IDS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


def adjacent(spec: ModelSpec) -> ModelSpec:
    return replace(spec, positions=spec.positions.with_pairing("adjacent"))


SPECS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied=True),
    "adjacent": adjacent(LLAMA),
    "fused": ModelSpec.of("mpt", **SIZE | {"hidden": 256}),
    "interleaved": ModelSpec.of("gpt_neox", **SIZE),
    "biases": ModelSpec.of("qwen2", **SIZE, kv_heads=2),
    "encoder": ModelSpec.of("bert", **SIZE),
}


def quantized(spec: ModelSpec, weights: str, dtype: torch.dtype | None = None) -> Model:
    """int8 with a scale for each output, int4 in groups of 32."""
    model = build(spec, seed=0, dtype=dtype).eval()
    quantize_model(model, weights, group=-1 if weights == "int8" else None)
    return model


@chequered("name,weights", list(SPECS), ["int8", "int4"])
def test_a_folder_gives_back_the_same_bits_whatever_its_family_calls_them(
    name: str, weights: str, tmp_path: Path
) -> None:
    """Rows of codes move as rows of weights: what is dequantized and then renamed is what is renamed and then
    dequantized. In another rotary pairing they are other rows of the same layer, and the model is the same."""
    model = quantized(SPECS[name], weights)
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    assert folder.weights.startswith(weights)
    assert folder.config["model_type"] == SPECS[name].family
    for layer, kept in folder.quantized.items():
        assert kept.form == folder.tensors.forms[f"{layer}.weight"]
        assert torch.equal(kept.read().dequantize(), folder.tensors[f"{layer}.weight"])
    again = build_model(folder)
    assert set(quantized_layers(again)) == set(quantized_layers(model))
    if name != "adjacent":
        wanted, found = model.state_dict(), again.state_dict()
        assert wanted.keys() == found.keys()
        assert all(torch.equal(wanted[key], found[key]) for key in wanted)
    else:
        with torch.no_grad():
            a, b = model(IDS), again(IDS)
        assert float((a - b).abs().max() / a.abs().max()) < 1e-5
    assert not [name for name, p in again.named_parameters() if p.requires_grad]
    save_folder(tmp_path / "again", again)
    files = [(tmp_path / one / "model.safetensors").read_bytes() for one in ("m", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["fused", "interleaved"])
def test_layers_with_and_without_zeros_may_be_one_in_the_files(name: str, tmp_path: Path) -> None:
    model = build(SPECS[name], seed=0).eval().requires_grad_(False)
    for place, layer in block_linears(model).items():
        symmetric = not place.endswith(("k_proj", "up_proj"))
        layer.keep(from_codes(quantize_weights(layer.matrix, 4, 32, symmetric=symmetric)))
    save_folder(tmp_path / "m", model)
    found = load_folder(tmp_path / "m").quantized
    for place, layer in quantized_layers(model).items():
        wanted, matrix = layer.panels.unpack(), found[place].read()
        assert torch.equal(matrix.codes, wanted.codes)
        assert torch.equal(matrix.zero_or_middle, wanted.zero_or_middle)


def test_the_folder_is_as_small_as_it_says(tmp_path: Path) -> None:
    model = build(LLAMA, seed=0, dtype=torch.bfloat16)
    quantize_model(model, "int4", output=True)
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    numbers = sum(layer.shape[0] * layer.shape[1] for layer in quantized_layers(model).values())
    others = sum(p.nbytes for p in model.parameters())
    assert folder.stored.nbytes == numbers // 2 + numbers // 32 * 2 + 16 * len(folder.quantized) + others
    assert folder.weights == "int4, groups of 32 (pack-quantized)"
    assert json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["ignore"] == []


def test_layers_that_a_folder_cannot_hold_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gpt2.*\[in, out\].*cannot be kept"):
        save_folder(tmp_path / "m", quantized(ModelSpec.of("gpt2", **SIZE), "int8"))
    mixed = quantized(LLAMA, "int4")
    whole = quantized(LLAMA, "int8")
    mixed.model.layers[0] = whole.model.layers[0]
    with pytest.raises(CheckpointError, match=r"quantized in different ways"):
        save_folder(tmp_path / "m", mixed)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_codes_side_by_side(bits: int) -> None:
    codes = torch.randint(1 << bits, (3, 13), generator=torch.Generator().manual_seed(0)).byte()
    words = to_words(codes, bits)
    each = 32 // bits
    for row in range(3):
        for i in range(13):
            word = int(words[row, i // each]) & 0xFFFFFFFF
            assert word >> bits * (i % each) & (1 << bits) - 1 == int(codes[row, i])
    assert torch.equal(from_words(words, bits, 13), codes)


@torch.no_grad()
def test_an_adapter_adds_to_quantized_layers_what_it_adds_to_others(tmp_path: Path) -> None:
    model = quantized(LLAMA, "int4", dtype=torch.bfloat16)
    save_folder(tmp_path / "m", model)
    adapter = Adapter.fresh(model, Lora(rank=2, alpha=8))
    factors = {name: torch.randn_like(value).bfloat16() for name, value in adapter.tensors.items()}
    save_adapter(tmp_path / "a", replace(adapter, tensors=factors), LLAMA)
    adapted = load_model(tmp_path / "m")
    attach_folders(adapted, [tmp_path / "a"])
    place = "model.layers.0.mlp.up_proj"
    layer, x = adapted.get_submodule(place), torch.randn(3, 64).bfloat16()
    a, b = (factors[f"{place}.{leaf}.weight"].double() for leaf in ("lora_A", "lora_B"))
    assert layer.kept.name == "int4"
    assert layer(x).dtype == torch.bfloat16
    base, added = layer.kept.product(x).double(), 4 * x.double() @ a.T @ b.T
    # the product with A is rounded to bfloat16, what is added, and the sum
    rounded = 1.01 * 2.0**-8 * (4 * (x.double() @ a.T).abs() @ b.abs().T + added.abs() + (base + added).abs())
    assert ((layer(x).double() - base - added).abs() <= rounded).all()


def test_what_a_folder_is_says_how_weights_are_kept(tmp_path: Path) -> None:
    save_folder(tmp_path / "m", quantized(LLAMA, "int4"))
    assert inspect(tmp_path / "m")["weights"] == "14 layers as int4, groups of 32 (pack-quantized)"


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "tied", "fused", "interleaved", "biases", "encoder"])
def test_transformers_computes_the_same(
    name: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layers are dequantized to float32, as ours are where the kernels do not run: equal up to the order of
    summation."""
    monkeypatch.setattr("headway.nn.weights.rounded.unsupported_reason", lambda *_: "by the formula")
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    model = quantized(SPECS[name], weights)
    save_folder(tmp_path / "m", model)
    theirs = AutoModelForMaskedLM if name == "encoder" else AutoModelForCausalLM
    other = theirs.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        ours, found = model(IDS), other(IDS).logits
    assert float((ours - found).abs().max() / ours.abs().max()) < 1e-5
