"""Codes of 8 and 4 bits in GGUF: kept if GGUF's blocks can hold them; otherwise the loss is measured and reported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headway.checkpoints import Folder, convert, load_folder, load_model, save_folder
from headway.checkpoints.restore import fill
from headway.cli import run
from headway.errors import CheckpointError
from headway.models import ModelSpec, build
from headway.models.quantize import quantize_model
from headway.quantization import QuantizedMatrix, quantize_weights
from headway.storage.gguf import read_gguf
from headway.storage.gguf_blocks import Q4_0, Q8_0, block_type, blocks, codes, dequantize
from headway.storage.safetensors import write_safetensors
from headway.storage.tensors import open_tensors
from tests.checkpoints.test_gptq_awq import AWQ, as_awq, theirs

SIZE: dict[str, Any] = {"vocab": 61, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 96}
FAMILIES = {name: ModelSpec.of(name, **SIZE, init_std=0.2) for name in ("llama", "qwen2")}
IDS = torch.randint(61, (2, 40), generator=torch.Generator().manual_seed(0))


def folder(
    path: Path, weights: str, family: str = "llama", dtype: torch.dtype | None = None, **options: Any
) -> Path:
    """Saves a folder of a quantized model, and returns its path."""
    model = build(FAMILIES[family], seed=0, dtype=dtype).eval()
    quantize_model(model, weights, **options)
    save_folder(path, model)
    return path


def numbers(source: Folder) -> dict[str, Tensor]:
    """Returns a folder's weights, with quantized ones dequantized in float32."""
    exact = {f"{layer}.weight": matrix.read().dequantize() for layer, matrix in source.quantized.items()}
    return {name: exact.get(name, value) for name, value in source.tensors.items()}


@torch.no_grad()
def changed(source: Path, target: Path) -> float:
    """Returns the largest difference of logits in float32, relative to the largest logit."""
    original = load_folder(source)
    expected = fill(original.spec, numbers(original), dtype=torch.float32)(IDS)
    actual = load_model(target, dtype=torch.float32, dequantize=True)(IDS)
    return float((actual - expected).abs().max() / expected.abs().max())


def scaled(path: Path, factor: float) -> Path:
    """Multiplies the scales of a folder by `factor`, in float32, and returns the folder."""
    tensors = {name: value.clone() for name, value in open_tensors(path).items()}
    (path / "model.safetensors").unlink()
    scales = {name: factor * value.float() for name, value in tensors.items() if name.endswith("_scale")}
    write_safetensors(path / "model.safetensors", {**tensors, **scales})
    return path


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.sampled_from([32, 64, 96, 160]))
def test_blocks_of_codes_are_these_codes_with_their_scales(seed: int, bits: int, group: int) -> None:
    """Groups of more than 32, the last of which may be shorter, repeat their scale in each of their blocks."""
    generator = torch.Generator().manual_seed(seed)
    original = torch.randint(1 << bits, (3, 160), generator=generator, dtype=torch.uint8)
    scale = torch.randn(3, -(-160 // group), generator=generator).half().float()
    matrix = QuantizedMatrix(original, scale, None, bits, group)
    kind = block_type(matrix)
    assert kind is (Q8_0 if bits == 8 else Q4_0)
    assert torch.equal(codes(blocks(matrix), kind).codes, original)
    assert torch.equal(dequantize(blocks(matrix), kind), matrix.dequantize())


def test_what_has_no_place_in_blocks_is_told_apart() -> None:
    weight = torch.randn(3, 96)
    assert block_type(quantize_weights(weight, 4, 32, symmetric=False)) is None
    assert block_type(quantize_weights(weight[:, :80], 4, 32)) is None
    assert block_type(quantize_weights(weight, 8)) is Q8_0
    with pytest.raises(CheckpointError, match=r"a scale of .* is above 65504"):
        blocks(quantize_weights(1e7 * weight, 8, 32))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("weights", "how", "kind"),
    [
        ("int4", {"calibrate": list(IDS)}, "Q4_0"),
        ("int4", {"group": 64}, "Q4_0"),
        ("int8", {}, "Q8_0"),
        ("int8", {"group": -1}, "Q8_0"),
    ],
)
def test_codes_are_carried_over_and_the_model_is_the_same(
    tmp_path: Path, family: str, weights: str, how: dict[str, Any], kind: str
) -> None:
    """In LLaMA's file the rows of queries and keys are in another pairing."""
    source = folder(tmp_path / "m", weights, family, torch.bfloat16, **how)
    result = convert(source, tmp_path / "m.gguf")
    assert result.rounding is None
    (choice,) = map(str, result.choices)
    assert choice.startswith(f"14 layers of {weights}")
    assert choice.endswith(f"keep their codes, as {kind} with scales in float16")
    tensors = read_gguf(tmp_path / "m.gguf").tensors
    assert tensors["blk.1.attn_q.weight"].type.name == kind
    assert tensors["token_embd.weight"].type.name == "BF16"
    assert changed(source, tmp_path / "m.gguf") < 1e-5
    if family == "qwen2":
        matrix = load_folder(source).quantized["model.layers.1.self_attn.q_proj"].read()
        packed = load_folder(tmp_path / "m.gguf").quantized["model.layers.1.self_attn.q_proj"].read()
        assert torch.equal(packed.codes, matrix.codes)
        spread = matrix.scale.float().repeat_interleave(matrix.group // 32, 1)
        assert torch.equal(packed.scale.float(), spread)


def test_repeated_heads_take_their_codes_along(tmp_path: Path) -> None:
    source = folder(tmp_path / "m", "int4")
    convert(source, tmp_path / "m.gguf", kv_heads=4, dtype="q4_0")
    assert load_folder(tmp_path / "m.gguf").spec.kv_heads == 4
    packed = load_folder(tmp_path / "m.gguf").quantized["model.layers.0.self_attn.v_proj"].read()
    matrix = load_folder(source).quantized["model.layers.0.self_attn.v_proj"].read()
    assert torch.equal(packed.codes.view(2, 2, 16, 64)[:, 1], matrix.codes.view(2, 16, 64))


CASES: dict[str, tuple[str, Any, str]] = {
    "the embedding alone is rounded": ("int4", "q4_0", "keep their codes, as Q4_0"),
    "codes of 4 bits in 8": ("int4", "q8_0", "are rounded again, to Q8_0"),
    "codes of 8 bits in 4": ("int8", "q4_0", "are rounded again, to Q4_0"),
    "numbers of float32": ("int4", torch.float32, "become numbers of F32"),
    "numbers of bfloat16": ("int8", torch.bfloat16, "become numbers of BF16"),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_lost_is_measured_and_said(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss is measured against the codes dequantized in float32, and "equal" is printed only if there is none."""
    weights, dtype, choice = CASES[name]
    source, target = folder(tmp_path / "m", weights), tmp_path / "m.gguf"
    option = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    assert run(["convert", str(source), str(target), "--dtype", option]) == 0
    printed = capsys.readouterr().out
    assert f"14 layers of {weights}, groups of 32 (pack-quantized): {choice}" in printed
    result = convert(source, tmp_path / "again.gguf", dtype=dtype)
    loss = changed(source, target)
    assert (loss > 1e-5) == (result.rounding is not None) == (name != "numbers of float32")
    assert ("\n  equal" in printed) == (result.rounding is None)
    assert ("changed logits by up to" in printed) == (result.rounding is not None)
    if result.rounding is not None:
        assert 0.5 < result.rounding / result.differences[0].largest / loss < 2.0  # measured on other ids


def test_scales_that_float16_rounds_are_measured(tmp_path: Path) -> None:
    source = scaled(folder(tmp_path / "m", "int4"), 1 + 2**-12)
    result = convert(source, tmp_path / "m.gguf")
    assert str(result.choices[0]).endswith("keep their codes, as Q4_0 with scales in float16")
    assert result.rounding is not None
    assert 1e-5 < changed(source, tmp_path / "m.gguf") < 1e-2


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_codes_without_a_place_become_numbers_and_that_is_said(tmp_path: Path, to: Any) -> None:
    """The codes have zero points; each number is a product rounded to the dtype of the scales."""
    theirs(tmp_path / "m", AWQ, 4, as_awq)
    result = convert(tmp_path / "m", tmp_path / "out", to=to)
    reason = ": no type has a place for their codes (zeros, rows, or groups)" if to == "gguf" else ""
    dtype = "F16" if to == "gguf" else "float16"
    (choice,) = map(str, result.choices)
    assert choice == f"14 layers of int4, groups of 32, with zeros (awq): become numbers of {dtype}{reason}"
    assert result.rounding is not None
    expected = load_folder(tmp_path / "m").tensors
    loss = changed(tmp_path / "m", tmp_path / "out")
    assert 0.5 < result.rounding / result.differences[0].largest / loss < 2.0  # measured on other ids
    actual = load_folder(tmp_path / "out").tensors["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(actual, expected["model.layers.0.mlp.up_proj.weight"])
