"""Folders with weights of 8 and 4 bits: written and read back bit for bit, and run alike by transformers."""

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
    """Builds a quantized model: int8 with a scale for each output, or int4 in groups of 32."""
    model = build(spec, seed=0, dtype=dtype).eval()
    quantize_model(model, weights, group=-1 if weights == "int8" else None)
    return model


@chequered("name,weights", list(SPECS), ["int8", "int4"])
def test_a_folder_gives_back_the_same_bits_whatever_its_family_calls_them(
    name: str, weights: str, tmp_path: Path
) -> None:
    """Rows of codes move as rows of weights do: dequantizing and renaming commute. In another rotary pairing the rows
    of a layer are permuted, and the model is the same."""
    model = quantized(SPECS[name], weights)
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    assert folder.weights.startswith(weights)
    assert folder.config["model_type"] == SPECS[name].family
    for layer, stored in folder.quantized.items():
        assert stored.form == folder.tensors.forms[f"{layer}.weight"]
        assert torch.equal(stored.read().dequantize(), folder.tensors[f"{layer}.weight"])
    reloaded = build_model(folder)
    assert set(quantized_layers(reloaded)) == set(quantized_layers(model))
    if name != "adjacent":
        expected, actual = model.state_dict(), reloaded.state_dict()
        assert expected.keys() == actual.keys()
        assert all(torch.equal(expected[key], actual[key]) for key in expected)
    else:
        with torch.no_grad():
            a, b = model(IDS), reloaded(IDS)
        assert float((a - b).abs().max() / a.abs().max()) < 1e-5
    assert not [name for name, p in reloaded.named_parameters() if p.requires_grad]
    save_folder(tmp_path / "again", reloaded)
    files = [(tmp_path / directory / "model.safetensors").read_bytes() for directory in ("m", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("name", ["fused", "interleaved"])
def test_layers_with_and_without_zeros_may_be_one_in_the_files(name: str, tmp_path: Path) -> None:
    model = build(SPECS[name], seed=0).eval().requires_grad_(False)
    for module_name, layer in block_linears(model).items():
        symmetric = not module_name.endswith(("k_proj", "up_proj"))
        layer.keep(from_codes(quantize_weights(layer.matrix, 4, 32, symmetric=symmetric)))
    save_folder(tmp_path / "m", model)
    stored = load_folder(tmp_path / "m").quantized
    for module_name, layer in quantized_layers(model).items():
        expected, matrix = layer.panels.unpack(), stored[module_name].read()
        assert torch.equal(matrix.codes, expected.codes)
        assert torch.equal(matrix.zero_or_middle, expected.zero_or_middle)


def test_the_folder_is_as_small_as_it_says(tmp_path: Path) -> None:
    model = build(LLAMA, seed=0, dtype=torch.bfloat16)
    quantize_model(model, "int4", output=True)
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    numbers = sum(layer.shape[0] * layer.shape[1] for layer in quantized_layers(model).values())
    other_bytes = sum(p.nbytes for p in model.parameters())
    assert folder.stored.nbytes == numbers // 2 + numbers // 32 * 2 + 16 * len(folder.quantized) + other_bytes
    assert folder.weights == "int4, groups of 32 (pack-quantized)"
    assert json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["ignore"] == []


def test_layers_that_a_folder_cannot_hold_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be saved in 8 or 4 bits: .*gpt2.*\[in, out\]"):
        save_folder(tmp_path / "m", quantized(ModelSpec.of("gpt2", **SIZE), "int8"))
    mixed = quantized(LLAMA, "int4")
    int8_model = quantized(LLAMA, "int8")
    mixed.model.layers[0] = int8_model.model.layers[0]
    with pytest.raises(CheckpointError, match=r"quantized with different bits"):
        save_folder(tmp_path / "m", mixed)


@pytest.mark.parametrize("bits", [4, 8])
def test_words_are_codes_side_by_side(bits: int) -> None:
    codes = torch.randint(1 << bits, (3, 13), generator=torch.Generator().manual_seed(0)).byte()
    words = to_words(codes, bits)
    per_word = 32 // bits
    for row in range(3):
        for i in range(13):
            word = int(words[row, i // per_word]) & 0xFFFFFFFF
            assert word >> bits * (i % per_word) & (1 << bits) - 1 == int(codes[row, i])
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
    module_name = "model.layers.0.mlp.up_proj"
    layer, x = adapted.get_submodule(module_name), torch.randn(3, 64).bfloat16()
    a, b = (factors[f"{module_name}.{leaf}.weight"].double() for leaf in ("lora_A", "lora_B"))
    assert layer.kept.name == "int4"
    assert layer(x).dtype == torch.bfloat16
    base, added = layer.kept.product(x).double(), 4 * x.double() @ a.T @ b.T
    # rounded to bfloat16 are the product with A, the added term, and the sum
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
    """transformers dequantizes layers to float32, as we do if the kernels do not run: equal up to the order of
    summation."""
    monkeypatch.setattr("headway.nn.weights.rounded.unsupported_reason", lambda *_: "by the formula")
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

    model = quantized(SPECS[name], weights)
    save_folder(tmp_path / "m", model)
    auto_class = AutoModelForMaskedLM if name == "encoder" else AutoModelForCausalLM
    peer = auto_class.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        ours, peer_logits = model(IDS), peer(IDS).logits
    assert float((ours - peer_logits).abs().max() / ours.abs().max()) < 1e-5
