"""Codes of 8 and 4 bits in GGUF: carried over where its blocks have their place, and otherwise what is lost is said."""

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
    path: Path, weights: str, family: str = "llama", dtype: torch.dtype | None = None, **how: Any
) -> Path:
    """A folder of a quantized model."""
    model = build(FAMILIES[family], seed=0, dtype=dtype).eval()
    quantize_model(model, weights, **how)
    save_folder(path, model)
    return path


def numbers(one: Folder) -> dict[str, Tensor]:
    """Its weights, of codes what these are in float32."""
    exact = {f"{layer}.weight": kept.read().dequantize() for layer, kept in one.quantized.items()}
    return {name: exact.get(name, value) for name, value in one.tensors.items()}


@torch.no_grad()
def changed(source: Path, target: Path) -> float:
    """The largest difference of logits in float32, in shares of the largest."""
    one = load_folder(source)
    wanted = fill(one.spec, numbers(one), dtype=torch.float32)(IDS)
    found = load_model(target, dtype=torch.float32, dequantize=True)(IDS)
    return float((found - wanted).abs().max() / wanted.abs().max())


def scaled(path: Path, factor: float) -> Path:
    """The same folder with other scales, in float32."""
    tensors = {name: value.clone() for name, value in open_tensors(path).items()}
    (path / "model.safetensors").unlink()
    scales = {name: factor * value.float() for name, value in tensors.items() if name.endswith("_scale")}
    write_safetensors(path / "model.safetensors", {**tensors, **scales})
    return path


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.sampled_from([32, 64, 96, 160]))
def test_blocks_of_codes_are_these_codes_with_their_scales(seed: int, bits: int, group: int) -> None:
    """Groups of more than 32, of which the last may be shorter, have their scale in each of their blocks."""
    draw = torch.Generator().manual_seed(seed)
    made = torch.randint(1 << bits, (3, 160), generator=draw, dtype=torch.uint8)
    scale = torch.randn(3, -(-160 // group), generator=draw).half().float()
    matrix = QuantizedMatrix(made, scale, None, bits, group)
    kind = block_type(matrix)
    assert kind is (Q8_0 if bits == 8 else Q4_0)
    assert torch.equal(codes(blocks(matrix), kind).codes, made)
    assert torch.equal(dequantize(blocks(matrix), kind), matrix.dequantize())


def test_what_has_no_place_in_blocks_is_told_apart() -> None:
    weight = torch.randn(3, 96)
    assert block_type(quantize_weights(weight, 4, 32, symmetric=False)) is None
    assert block_type(quantize_weights(weight[:, :80], 4, 32)) is None
    assert block_type(quantize_weights(weight, 8)) is Q8_0
    with pytest.raises(CheckpointError, match=r"a scale of .* is beyond 65504"):
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
    """In LLaMA's file the rows of queries and keys lie in other pairs."""
    source = folder(tmp_path / "m", weights, family, torch.bfloat16, **how)
    result = convert(source, tmp_path / "m.gguf")
    assert result.rounding is None
    (said,) = map(str, result.choices)
    assert said.startswith(f"14 layers of {weights}")
    assert said.endswith(f"keep their codes, as {kind} with scales in float16")
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
    """The figure is that of the codes as they are in float32, and "equal" is said of equal ones alone."""
    weights, dtype, said = CASES[name]
    source, target = folder(tmp_path / "m", weights), tmp_path / "m.gguf"
    option = dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")
    assert run(["convert", str(source), str(target), "--dtype", option]) == 0
    out = capsys.readouterr().out
    assert f"14 layers of {weights}, groups of 32 (pack-quantized): {said}" in out
    result = convert(source, tmp_path / "again.gguf", dtype=dtype)
    lost = changed(source, target)
    assert (lost > 1e-5) == (result.rounding is not None) == (name != "numbers of float32")
    assert ("\n  equal" in out) == (result.rounding is None)
    assert ("changed logits by up to" in out) == (result.rounding is not None)
    if result.rounding is not None:
        assert 0.5 < result.rounding / result.differences[0].largest / lost < 2.0  # other ids


def test_scales_that_float16_rounds_are_measured(tmp_path: Path) -> None:
    source = scaled(folder(tmp_path / "m", "int4"), 1 + 2**-12)
    result = convert(source, tmp_path / "m.gguf")
    assert str(result.choices[0]).endswith("keep their codes, as Q4_0 with scales in float16")
    assert result.rounding is not None
    assert 1e-5 < changed(source, tmp_path / "m.gguf") < 1e-2


@pytest.mark.parametrize("to", ["gguf", "hf"])
def test_codes_without_a_place_become_numbers_and_that_is_said(tmp_path: Path, to: Any) -> None:
    """Codes with zeros; each number is a product rounded to the dtype of the scales."""
    theirs(tmp_path / "m", AWQ, 4, as_awq)
    result = convert(tmp_path / "m", tmp_path / "out", to=to)
    place = ": no type has a place for their codes (zeros, rows, or groups)" if to == "gguf" else ""
    dtype = "F16" if to == "gguf" else "float16"
    (said,) = map(str, result.choices)
    assert said == f"14 layers of int4, groups of 32, with zeros (awq): become numbers of {dtype}{place}"
    assert result.rounding is not None
    wanted = load_folder(tmp_path / "m").tensors
    assert changed(tmp_path / "m", tmp_path / "out") == pytest.approx(
        result.rounding / result.differences[0].largest, rel=1.0
    )
    found = load_folder(tmp_path / "out").tensors["model.layers.0.mlp.up_proj.weight"]
    assert torch.equal(found, wanted["model.layers.0.mlp.up_proj.weight"])
