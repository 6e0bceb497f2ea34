"""Folders of GPTQ and AWQ, packed here by their own formulas, and errors for folders that are not read."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.checkpoints import load_folder, load_model, save_folder
from headway.checkpoints.quantized.packed import AWQ_ORDER
from headway.errors import CheckpointError, ConfigError
from headway.models import build
from headway.quantization import QuantizedMatrix, quantize_weights
from headway.storage.safetensors import write_safetensors
from headway.storage.tensors import open_tensors
from tests.checkpoints.edits import set_keys
from tests.checkpoints.test_quantized import LLAMA


def naive_words(codes: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """Returns int32 [R, C bits / 32]: place p of each word holds the code that `order` names."""
    rows, columns = codes.shape
    per_word = 32 // bits
    words = torch.zeros(rows, columns // per_word, dtype=torch.int64)
    for p in range(per_word):
        words |= codes[:, order[p] :: per_word].long() << bits * p
    return words.to(torch.int32) if words.max() < 2**31 else (words - (words >> 31 << 32)).to(torch.int32)


def as_gptq(matrix: QuantizedMatrix, offset: int) -> dict[str, Tensor]:
    order, mask = tuple(range(8)), (1 << matrix.bits) - 1
    inputs = torch.arange(matrix.codes.shape[1], dtype=torch.int32)
    return {
        "qweight": naive_words(matrix.codes, matrix.bits, order).T,
        "qzeros": naive_words(matrix.zero_or_middle.T - offset & mask, matrix.bits, order),
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
    path: Path, config: dict[str, Any], bits: int, pack: Callable[[QuantizedMatrix], dict[str, Tensor]]
) -> dict[str, QuantizedMatrix]:
    """Saves a LLaMA whose layers are packed by `pack`, and returns the layers' matrices by name."""
    save_folder(path, build(LLAMA, seed=0, dtype=torch.float16))
    tensors: dict[str, Tensor] = {}
    matrices = {}
    for name, value in open_tensors(path).items():
        layer = name.removesuffix(".weight")
        if ".layers." not in name or value.dim() == 1:
            tensors[name] = value.clone()
            continue
        value = torch.cat(
            (value[:9].abs(), -value[9:18].abs(), value[18:])
        )  # so that zero points are 0 and the last code, too
        matrix = quantize_weights(value, bits, 32, symmetric=False)
        matrices[layer] = replace(matrix, scale=matrix.scale.half())
        tensors |= {f"{layer}.{leaf}": part.contiguous() for leaf, part in pack(matrices[layer]).items()}
    (path / "model.safetensors").unlink()
    write_safetensors(path / "model.safetensors", tensors)
    set_keys(path, quantization_config=config)
    return matrices


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
    config, bits, pack = CASES[name]
    matrices = theirs(tmp_path / "m", config, bits, pack)
    folder = load_folder(tmp_path / "m")
    assert set(folder.quantized) == set(matrices)
    zeros = matrices["model.layers.1.mlp.up_proj"].zero
    assert (int(zeros.min()), int(zeros.max())) == (0, 2**bits - 1)
    for layer, stored in folder.quantized.items():
        matrix, expected = stored.read(), matrices[layer]
        assert stored.form.shape == expected.codes.shape
        assert torch.equal(matrix.codes, expected.codes)
        assert torch.equal(matrix.scale, expected.scale)
        assert torch.equal(matrix.zero_or_middle, expected.zero_or_middle)
        assert torch.equal(folder.tensors[f"{layer}.weight"], expected.dequantize(torch.float16))
    model = load_model(tmp_path / "m")
    save_folder(tmp_path / "ours", model)
    reloaded = load_model(tmp_path / "ours").state_dict()
    assert all(torch.equal(value, reloaded[key]) for key, value in model.state_dict().items())


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
    with pytest.raises(CheckpointError, match=r"bfloat16 cannot store the scales.*dtype=torch.float32"):
        save_folder(tmp_path / "n", model)
    save_folder(tmp_path / "n", model, dtype=torch.float32)
    assert not load_folder(tmp_path / "n").quantized.keys() ^ load_folder(tmp_path / "m").quantized.keys()


def test_folders_that_are_not_read_say_what_is(tmp_path: Path) -> None:
    config, bits, pack = CASES["gptq"]
    path = tmp_path / "m"
    theirs(path, config, bits, pack)

    def refused(match: str, quantization: Any, error: type[Exception] = ConfigError) -> None:
        set_keys(path, quantization_config=quantization)
        with pytest.raises(error, match=match):
            load_folder(path)

    refused(
        r"quant_method 'bitsandbytes'; supported are compressed-tensors, gptq, awq, mxfp4",
        {"quant_method": "bitsandbytes"},
    )
    refused(r'unknown key "quantization_config.is_marlin_format"', {**GPTQ, "is_marlin_format": True})
    refused(r'"quantization_config.bits" is 3, which is unsupported; accepted is 4 or 8', {**GPTQ, "bits": 3})
    refused(r"must be a multiple of 32, got 16", {**GPTQ, "group_size": 16})
    refused(r"must be a positive whole number, -1 or null, got 'x'", {**GPTQ, "group_size": "x"})
    refused(r"version\" is 'gemv', which is unsupported; accepted is 'gemm'", {**AWQ, "version": "gemv"})
    refused(r"lacks bits", {"quant_method": "gptq"})
    refused(
        r"unexpected: .*g_idx|scales has shape \[2, ", AWQ, CheckpointError
    )  # another packing of the same names
    refused(r"scales has shape \[2, 64\].*need \[1, 64\]", {**GPTQ, "group_size": 64}, CheckpointError)
    set_keys(path, quantization_config=GPTQ)
    tensors = {name: value.clone() for name, value in open_tensors(path).items()}
    name = "model.layers.1.mlp.up_proj"

    def broken(match: str, **changed: Tensor | None) -> None:
        written = {**tensors, **{f"{name}.{leaf}": value for leaf, value in changed.items()}}
        (path / "model.safetensors").unlink()
        write_safetensors(path / "model.safetensors", {n: v for n, v in written.items() if v is not None})
        with pytest.raises(CheckpointError, match=match):
            load_folder(path)

    broken(r"up_proj.scales is missing", scales=None)
    broken(
        r"groups of model.layers.1.mlp.up_proj are not of consecutive inputs",
        g_idx=tensors[f"{name}.g_idx"].flip(0),
    )
    packed = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    set_keys(path, quantization_config={**packed, "config_groups": {"g": {}}})
    with pytest.raises(ConfigError, match=r"without weights"):
        load_folder(path)
    group = {"weights": {"num_bits": 8, "strategy": "channel"}, "input_activations": {"num_bits": 8}}
    set_keys(path, quantization_config={**packed, "config_groups": {"g": group}})
    with pytest.raises(
        ConfigError, match=r"unknown key .quantization_config.config_groups.g.input_activations"
    ):
        load_folder(path)
