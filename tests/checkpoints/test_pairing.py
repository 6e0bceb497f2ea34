"""Pairing conversion: exact round trips, the same function, and the head count of each tensor."""

from dataclasses import replace

import pytest
import torch

from headway.checkpoints import change_pairing, save_folder
from headway.checkpoints.restore import fill
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec, build
from headway.patterns import Causal
from headway.positions import LinearScaling, NoPositions, PerLayer, Rotary, rotations, to_pairing
from tests.checkpoints.hf import off
from tests.checkpoints.test_parity import ids

ODD = ((5, 0), (1, 3), (4, 2))


def spec_of(kv_heads=2, dims=None, **fields) -> ModelSpec:
    positions = Rotary(500.0, pairing="halves", dims=dims, scaling=LinearScaling(2.0))
    sizes = {"vocab": 61, "width": 24, "layers": 2, "heads": 4, "hidden": 24, "init_std": 0.3}
    return ModelSpec.of("qwen3", **sizes, kv_heads=kv_heads, head_dim=6, positions=positions, **fields)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(("to", "dims"), [("adjacent", None), ("adjacent", 4), (ODD, None)])
def test_there_and_back_is_the_identical_file_and_the_same_function(tmp_path, kv_heads, to, dims):
    spec = spec_of(kv_heads, dims, qkv_bias=True, out_bias=True, qk_norm="head")
    model = build(spec, seed=0).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    state, turned = change_pairing(model.state_dict(), spec, to)
    changed = {key for key in state if not torch.equal(state[key], model.state_dict()[key])}
    touched = [f"{module}.{leaf}" for module in ("q_proj", "k_proj") for leaf in ("weight", "bias")]
    touched += ["q_norm.weight", "k_norm.weight"]
    assert changed == {f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in touched}
    expected = model(ids(2)).detach()
    converted = fill(turned, state)
    assert off(converted(ids(2)).detach(), expected) < 1e-5
    restored, restored_spec = change_pairing(state, turned, "halves")
    assert restored_spec == spec
    save_folder(tmp_path / "a", model)
    save_folder(tmp_path / "b", fill(restored_spec, restored))
    name = "model.safetensors"
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    # weights alone, read in the old basis, are another function
    assert off(fill(spec, state)(ids(2)).detach(), expected) > 1e-3


def test_the_head_count_is_that_of_the_tensor():
    """Keys permuted with the number of query heads (ggml-org/llama.cpp#2376) give another function."""
    spec = replace(spec_of(2), head_dim=8)
    model = build(spec, seed=0).eval()
    state, turned = change_pairing(model.state_dict(), spec, "adjacent")
    expected = model(ids()).detach()
    assert off(fill(turned, state)(ids()).detach(), expected) < 1e-5
    wrong = dict(state)
    for name, value in model.state_dict().items():
        if "k_proj" in name:
            wrong[name] = to_pairing(value, heads=4, head_dim=4, frm="halves", to="adjacent")
    assert off(fill(turned, wrong)(ids()).detach(), expected) > 1e-2


@pytest.mark.parametrize("to", ["adjacent", ODD])
def test_layers_without_positions_stay_as_they_are(to):
    """Each layer is converted by its own scheme: the rotated prefix differs between layers."""
    schemes = (Rotary(pairing="halves"), NoPositions(), Rotary(500.0, pairing="halves", dims=4))
    schemes = schemes if to == "adjacent" else schemes[:2]
    spec = replace(spec_of(2), layers=3, positions=PerLayer(schemes), patterns=(Causal(),) * 3)
    model = build(spec, seed=0).eval()
    state, turned = change_pairing(model.state_dict(), spec, to)
    changed = {key.split(".")[2] for key in state if not torch.equal(state[key], model.state_dict()[key])}
    assert changed == {str(i) for i, scheme in enumerate(spec.layer_positions) if isinstance(scheme, Rotary)}
    assert {scheme.pairing for scheme in rotations(turned.positions)} == {to}
    with torch.no_grad():
        assert off(fill(turned, state)(ids()), model(ids())) < 1e-5
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: its name has no layer number"):
        change_pairing({"q_proj.weight": torch.zeros(24, 24)}, spec, to)


def test_schemes_of_layers_are_said_in_the_fewest_words():
    rotary, none = Rotary(pairing="halves"), NoPositions()
    assert PerLayer.of([rotary] * 3) == rotary
    assert PerLayer.of([rotary, none, rotary, none, rotary]) == PerLayer((rotary, none))
    assert PerLayer.of([rotary, rotary, none]) == PerLayer((rotary, rotary, none))
    assert rotations(PerLayer((none, rotary, rotary))) == (rotary,)
    assert rotations(none) == ()


def test_adapters_are_turned_as_weights_are():
    spec = spec_of(2)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads * 6, 5, generator=g) for heads in (4, 2, 2))
    state = {
        "l.q_proj.weight": q,
        "l.q_proj.lora_B.weight": q[:, :2],
        "l.q_proj.lora_A.weight": torch.randn(2, 24, generator=g),
        "l.k_proj.lora_magnitude_vector": k[:, 0],
        "l.v_proj.weight": v,
    }
    converted, _ = change_pairing({**state, "l.k_proj.weight": k}, spec, "adjacent")
    assert torch.equal(converted["l.q_proj.lora_B.weight"], converted["l.q_proj.weight"][:, :2])
    assert torch.equal(converted["l.k_proj.lora_magnitude_vector"], converted["l.k_proj.weight"][:, 0])
    assert converted["l.q_proj.lora_A.weight"] is state["l.q_proj.lora_A.weight"]
    assert converted["l.v_proj.weight"] is v
    with pytest.raises(CheckpointError, match=r"l\.q_proj\.g_idx is an unknown part of a query"):
        change_pairing({"l.q_proj.g_idx": q}, spec, "adjacent")


def test_what_has_no_pairing_and_what_is_none():
    spec = spec_of(2)
    with pytest.raises(CheckpointError, match="positions are NoPositions"):
        change_pairing({}, replace(spec, positions=NoPositions()), "halves")
    with pytest.raises(ConfigError, match="did you mean"):
        change_pairing({}, spec, "adjacen")
    with pytest.raises(ConfigError, match="lists 2 pairs, but 6 rotated dims are 3"):
        change_pairing({}, spec, ((0, 1), (2, 3)))
