"""Folders with weights of 8 and 4 bits: written and read again to the bit, others' folders by their own formulas."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.checkpoints import load_folder, load_model, save_folder
from headway.checkpoints.quantized.words import AWQ_ORDER, from_words, to_words
from headway.checkpoints.restore import build_model
from headway.checkpoints.storage.safetensors import write_safetensors
from headway.checkpoints.storage.tensors import open_tensors
from headway.errors import CheckpointError, ConfigError
from headway.models import Model, ModelSpec, build
from headway.models.quantize import quantize_model, quantized_layers
from headway.quantization import QuantizedMatrix, quantize_weights

SIZE: dict[str, Any] = {"vocab": 61, "width": 64, "layers": 2, "heads": 4, "hidden": 96, "init_std": 0.2}
LLAMA = ModelSpec.of("llama", **SIZE, kv_heads=2, tied=False)
IDS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


def adjacent(spec: ModelSpec) -> ModelSpec:
    return replace(spec, positions=spec.positions.with_pairing("adjacent"))


SPECS = {
    "llama": LLAMA,
    "tied": replace(LLAMA, tied=True),
    "adjacent": adjacent(LLAMA),
    "fused": ModelSpec.of("mpt", **SIZE),
    "interleaved": ModelSpec.of("gpt_neox", **SIZE),
    "biases": ModelSpec.of("qwen2", **SIZE, kv_heads=2),
    "encoder": ModelSpec.of("bert", **SIZE),
}


def quantized(spec: ModelSpec, weights: str, **how: Any) -> Model:
    model = build(spec, seed=0).eval()
    quantize_model(model, weights, **how)
    return model


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("name", SPECS)
def test_a_folder_gives_back_the_same_bits_whatever_its_family_calls_them(
    name: str, weights: str, tmp_path: Path
) -> None:
    """Rows of codes move as rows of weights: what is dequantised and then renamed is what is renamed and then
    dequantised. In another rotary pairing they are other rows of the same layer, and the model is the same."""
    model = quantized(SPECS[name], weights)
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    assert folder.scheme is not None
    for layer, matrix in folder.quantized.items():
        assert torch.equal(matrix.dequantize(), folder.tensors[f"{layer}.weight"])
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


def test_the_folder_is_as_small_as_it_says(tmp_path: Path) -> None:
    model = build(LLAMA, seed=0, dtype=torch.bfloat16)
    quantize_model(model, "int4", output=True)
    save_folder(tmp_path / "m", model)
    folder = load_folder(tmp_path / "m")
    numbers = sum(layer.in_features * layer.out_features for layer in quantized_layers(model).values())
    others = sum(p.nbytes for p in model.parameters())
    assert folder.stored.nbytes == numbers // 2 + numbers // 32 * 2 + 16 * len(folder.quantized) + others
    assert str(folder.scheme) == "int4, groups of 32 (pack-quantized)"
    assert json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]["ignore"] == []


def test_layers_that_a_folder_cannot_hold_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gpt2.*\[in, out\].*cannot be kept"):
        save_folder(tmp_path / "m", quantized(ModelSpec.of("gpt2", **SIZE), "int8"))
    mixed = quantized(LLAMA, "int4", output=False)
    whole = quantized(LLAMA, "int8")
    mixed.model.layers[0] = whole.model.layers[0]
    with pytest.raises(CheckpointError, match=r"quantised in different ways"):
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


def naive_words(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """int32 [R, C bits / 32]: at place p of a word, the code that `order` names."""
    rows, columns = codes.shape
    each = 32 // bits
    words = torch.zeros(rows, columns // each, dtype=torch.int64)
    for p in range(each):
        words |= codes[:, order[p] :: each].long() << bits * p
    return words.to(torch.int32) if words.max() < 2**31 else (words - (words >> 31 << 32)).to(torch.int32)


def as_gptq(matrix: QuantizedMatrix, less: int) -> dict[str, Tensor]:
    order, most = tuple(range(8)), (1 << matrix.bits) - 1
    inputs = torch.arange(matrix.codes.shape[1], dtype=torch.int32)
    return {
        "qweight": naive_words(matrix.codes, matrix.bits, order).T,
        "qzeros": naive_words(matrix.zero_or_middle.T - less & most, matrix.bits, order),
        "scales": matrix.scale.T.half(),
        "g_idx": inputs // matrix.group,
    }


def as_awq(matrix: QuantizedMatrix) -> dict[str, Tensor]:
    return {
        "qweight": naive_words(matrix.codes.T, 4, AWQ_ORDER),
        "qzeros": naive_words(matrix.zero_or_middle.T, 4, AWQ_ORDER),
        "scales": matrix.scale.T.half(),
    }


def theirs(
    path: Path, config: dict[str, Any], bits: int, kept: Callable[[QuantizedMatrix], dict[str, Tensor]]
) -> dict[str, QuantizedMatrix]:
    """Write a LLaMA with layers as others keep them; the matrices by their names."""
    save_folder(path, build(LLAMA, seed=0, dtype=torch.float16))
    tensors: dict[str, Tensor] = {}
    matrices = {}
    for name, value in open_tensors(path).items():
        layer = name.removesuffix(".weight")
        if ".layers." not in name or value.dim() == 1:
            tensors[name] = value.clone()
            continue
        matrix = quantize_weights(value, bits, 32, symmetric=False)
        matrices[layer] = replace(matrix, scale=matrix.scale.half())
        tensors |= {f"{layer}.{leaf}": part.contiguous() for leaf, part in kept(matrices[layer]).items()}
    (path / "model.safetensors").unlink()
    write_safetensors(path / "model.safetensors", tensors)
    change_config(path, config)
    return matrices


def change_config(path: Path, quantization: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": quantization}))


GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": False,
    "damp_percent": 0.01,
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[dict[str, Any], int, Callable[[QuantizedMatrix], dict[str, Tensor]]]] = {
    "gptq": (GPTQ, 4, lambda m: as_gptq(m, 1)),
    "gptq of 8 bits": ({**GPTQ, "bits": 8, "checkpoint_format": "gptq"}, 8, lambda m: as_gptq(m, 1)),
    "gptq_v2": ({**GPTQ, "checkpoint_format": "gptq_v2"}, 4, lambda m: as_gptq(m, 0)),
    "awq": (AWQ, 4, as_awq),
}


@pytest.mark.parametrize("name", CASES)
def test_folders_of_gptq_and_awq_are_read(name: str, tmp_path: Path) -> None:
    config, bits, kept = CASES[name]
    matrices = theirs(tmp_path / "m", config, bits, kept)
    folder = load_folder(tmp_path / "m")
    assert set(folder.quantized) == set(matrices)
    for layer, matrix in folder.quantized.items():
        wanted = matrices[layer]
        assert torch.equal(matrix.codes, wanted.codes)
        assert torch.equal(matrix.scale, wanted.scale)
        assert torch.equal(matrix.zero_or_middle, wanted.zero_or_middle)
        assert torch.equal(folder.tensors[f"{layer}.weight"], wanted.dequantize(torch.float16))
    model = load_model(tmp_path / "m")
    save_folder(tmp_path / "ours", model)
    again = load_model(tmp_path / "ours").state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())


def test_biases_of_zeros_are_left_out_and_others_are_an_error(tmp_path: Path) -> None:
    path = tmp_path / "m"
    theirs(path, *CASES["gptq"])
    tensors = {name: value.clone() for name, value in open_tensors(path).items()}
    for size in (0, 1):
        (path / "model.safetensors").unlink()
        bias = torch.full((64,), size, dtype=torch.float16)
        write_safetensors(
            path / "model.safetensors", {**tensors, "model.layers.0.self_attn.o_proj.bias": bias}
        )
        if size:
            with pytest.raises(CheckpointError, match=r"unexpected: model.layers.0.self_attn.o_proj.bias"):
                load_folder(path)
        else:
            assert load_folder(path).quantized


def test_scales_that_the_stored_dtype_does_not_hold_are_an_error(tmp_path: Path) -> None:
    theirs(tmp_path / "m", *CASES["gptq"])
    model = load_model(tmp_path / "m", dtype=torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"bfloat16 does not hold the scales.*dtype=torch.float32"):
        save_folder(tmp_path / "n", model)
    save_folder(tmp_path / "n", model, dtype=torch.float32)
    assert not load_folder(tmp_path / "n").quantized.keys() ^ load_folder(tmp_path / "m").quantized.keys()


def test_folders_that_are_not_read_say_what_is(tmp_path: Path) -> None:
    config, bits, kept = CASES["gptq"]
    path = tmp_path / "m"
    theirs(path, config, bits, kept)

    def refused(match: str, quantization: Any, error: type[Exception] = ConfigError) -> None:
        change_config(path, quantization)
        with pytest.raises(error, match=match):
            load_folder(path)

    refused(
        r"quant_method 'bitsandbytes', and compressed-tensors, gptq, awq are read",
        {"quant_method": "bitsandbytes"},
    )
    refused(r"unsupported.*supported are", {**GPTQ, "is_marlin_format": True})
    refused(r"has bits = 3; supported is 4 or 8", {**GPTQ, "bits": 3})
    refused(r"groups of 16 inputs, and those of a multiple of 32", {**GPTQ, "group_size": 16})
    refused(r"group_size 'x', which is no number", {**GPTQ, "group_size": "x"})
    refused(r"has version = gemv; supported is 'gemm'", {**AWQ, "version": "gemv"})
    refused(r"lacks bits", {"quant_method": "gptq"})
    refused(r"unexpected: .*g_idx|scales is \[2, ", AWQ, CheckpointError)  # another packing of the same names
    refused(r"scales is \[2, 64\].*have \[1, 64\]", {**GPTQ, "group_size": 64}, CheckpointError)
    change_config(path, GPTQ)
    tensors = {name: value.clone() for name, value in open_tensors(path).items()}
    name = "model.layers.1.mlp.up_proj"

    def broken(match: str, **changed: Tensor | None) -> None:
        found = {**tensors, **{f"{name}.{leaf}": value for leaf, value in changed.items()}}
        (path / "model.safetensors").unlink()
        write_safetensors(path / "model.safetensors", {n: v for n, v in found.items() if v is not None})
        with pytest.raises(CheckpointError, match=match):
            load_folder(path)

    broken(r"up_proj.scales is missing", scales=None)
    broken(
        r"groups of model.layers.1.mlp.up_proj are not of neighbouring inputs",
        g_idx=tensors[f"{name}.g_idx"].flip(0),
    )
    change_config(
        path, {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {}}}
    )
    with pytest.raises(ConfigError, match=r"without weights"):
        load_folder(path)
    group = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}}
    change_config(
        path, {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"g": group}}
    )
    with pytest.raises(ConfigError, match=r"config_groups.g.input_activations.*unsupported"):
        load_folder(path)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_transformers_computes_the_same(weights: str, tmp_path: Path) -> None:
    """Its layers are dequantised to float32: equal up to the order of summation."""
    from transformers import AutoModelForCausalLM

    model = quantized(LLAMA, weights)
    save_folder(tmp_path / "m", model)
    other = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    with torch.no_grad():
        ours, found = model(IDS), other(IDS).logits
    assert float((ours - found).abs().max() / ours.abs().max()) < 1e-5
