"""Experts in 4 bits, as published for gpt-oss, are read as the numbers that they stand for."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headway.checkpoints.folder import load_folder
from headway.checkpoints.quantized.packed import mxfp4_numbers, unpack_mxfp4
from headway.checkpoints.quantized.scheme import Scheme, written_config
from headway.checkpoints.restore import build_model
from headway.checkpoints.saving import save_folder
from headway.errors import CheckpointError
from headway.storage.lazy import lazy
from tests.checkpoints.decoders import CASES, IDS, theirs
from tests.checkpoints.edits import set_keys


def packed(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random blocks and scales of matrices of these sizes, the last of which is the number of inputs."""
    *rows, inputs = shape
    g = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*rows, inputs // 32, 16), generator=g, dtype=torch.uint8)
    return blocks, torch.randint(120, 128, (*rows, inputs // 32), generator=g, dtype=torch.uint8)


def test_numbers_are_theirs() -> None:
    blocks, scales = packed(3, 10, 64)
    assert torch.equal(mxfp4_numbers(blocks, scales).mT, convert_moe_packed_tensors(blocks, scales))
    block = torch.tensor([[0x21] + [0] * 15], dtype=torch.uint8)
    assert mxfp4_numbers(block, torch.tensor([128], dtype=torch.uint8))[:3].tolist() == [1.0, 2.0, 0.0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Saves a small gpt-oss whose experts are blocks, and returns its folder."""
    family, settings = CASES["gpt-oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    monkeypatch.setitem(CASES, "gpt-oss", (family, {**settings, **sizes}))
    model = theirs("gpt-oss").bfloat16()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        state[f"{name}_blocks"], state[f"{name}_scales"] = packed(experts, outputs, inputs)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    set_keys(tmp_path, quantization_config=method)
    return tmp_path


@torch.no_grad()
def test_a_folder_is_the_model_of_its_numbers(folder: Path, tmp_path: Path) -> None:
    ours = build_model(load_folder(folder))
    state = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    down = convert_moe_packed_tensors(state[f"{name}_blocks"], state[f"{name}_scales"])
    for expert in range(4):
        assert torch.equal(
            ours.get_submodule(f"model.layers.1.mlp.experts.{expert}.down_proj").weight, down[expert].mT
        )
    gate_up = name.replace("down", "gate_up")
    fused = convert_moe_packed_tensors(state[f"{gate_up}_blocks"], state[f"{gate_up}_scales"])
    gate = ours.get_submodule("model.layers.1.mlp.experts.2.gate_proj").weight
    assert torch.equal(gate, fused[2].mT[::2])
    save_folder(tmp_path / "plain", ours)
    assert torch.equal(build_model(load_folder(tmp_path / "plain"))(IDS), ours(IDS))


def test_blocks_without_scales_are_refused(tmp_path: Path) -> None:
    blocks, scales = packed(2, 4, 32)
    for state, message in (
        ({"a_blocks": blocks}, "a needs both _blocks and _scales"),
        ({"a_scales": scales}, "has only one of them"),
        ({"a_blocks": blocks[..., :8], "a_scales": scales}, "a in mxfp4 must be uint8"),
        ({"a_blocks": blocks.int(), "a_scales": scales}, "a in mxfp4 must be uint8"),
    ):
        with pytest.raises(CheckpointError, match=message):
            unpack_mxfp4(lazy(state), tmp_path)


def test_codes_of_single_experts_are_refused_where_a_family_has_them_in_one_tensor(folder: Path) -> None:
    """Quantizers that split experts write such codes; transformers has no such folders of this family."""
    state = {
        name: value
        for name, value in load_file(folder / "model.safetensors").items()
        if ".experts." not in name
    }
    expert = "model.layers.0.mlp.experts.0.gate_proj"
    state |= {
        f"{expert}.weight_packed": torch.zeros(96, 8, dtype=torch.int32),
        f"{expert}.weight_scale": torch.ones(96, 1),
        f"{expert}.weight_shape": torch.tensor([96, 64]),
    }
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    method = written_config(Scheme("pack-quantized", 4, None, False), ["lm_head"])
    set_keys(folder, quantization_config=method)
    with pytest.raises(CheckpointError, match=rf"{expert} is the quantized matrix of one expert.*mxfp4 only"):
        load_folder(folder)
