"""Models with experts in place of the feed-forward, in all layers or in some."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints import build_model, config_from_spec, load_folder, save_folder, spec_from_config
from headway.checkpoints.adapters import check_named
from headway.checkpoints.formats.gguf.metadata import write_spec
from headway.errors import CheckpointError, ConfigError
from headway.models import Decoder, ModelSpec, build
from headway.models.description import ASPECTS
from headway.models.quantize import quantize_model, quantized_layers
from headway.nn import Adapter, Experts, FeedForward, Lora, MixtureOfExperts, attach, merge, unmerge
from headway.tokens import Tokens
from tests.checkpoints.hf import off

EXPERTS = Experts(count=6, top=2, hidden=32, shared=64, shared_gate=True)
SIZES: dict[str, Any] = {"vocab": 61, "width": 64, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 96}
SPEC = ModelSpec.of("llama", **SIZES, experts=(None, EXPERTS))
IDS = torch.randint(61, (2, 19), generator=torch.Generator().manual_seed(1))


def made(spec: ModelSpec = SPEC, std: float = 0.3) -> Decoder:
    model = build(replace(spec, init_std=std), seed=0)
    assert isinstance(model, Decoder)
    return model.eval()


def test_experts_are_those_of_their_layers() -> None:
    kinds = [type(block.mlp) for block in made().model.blocks]
    assert kinds == [FeedForward, MixtureOfExperts] * 2
    assert ModelSpec.of("mixtral", **SIZES).experts == (Experts(count=8, top=2, hidden=96),) * 4
    assert ModelSpec.of("llama", **SIZES).experts == (None,) * 4
    assert ASPECTS["feed-forward"].words(SPEC) == (
        "down(silu(gate x) * up x), layers 0, 2: 96 wide; "
        "layers 1, 3: 2 of 6 experts, 32 wide, shared 64, shared gate True"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((EXPERTS, None, None), "3 experts do not fit 4 layers"),
        ("mixtral", "experts must be values such as Experts"),
        ((None, replace(EXPERTS, count=40000)), "80,000 experts in all layers exceed the limit of 65,536"),
        (EXPERTS, "hidden=96 is the width of no layer: all have experts of 32; give hidden=32"),
    ],
)
def test_experts_that_do_not_fit_are_refused(given: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ModelSpec.of("llama", **SIZES, experts=given)
    with pytest.raises(ConfigError, match="hidden=0 means no feed-forward in any layer"):
        ModelSpec.of("llama", **{**SIZES, "hidden": 0}, experts=(None, EXPERTS))


@torch.no_grad()
def test_padded_packed_and_cached_rows_are_whole_ones() -> None:
    model = made()
    full = model(IDS)
    ids, tokens = IDS.clone(), Tokens.from_lengths([19, 12], side="left")
    ids[1, 7:] = IDS[1, :12]
    assert off(model(ids, tokens=tokens)[1, 7:], full[1, :12]) < 1e-5
    packed = model(IDS.view(1, -1), tokens=Tokens.packed([[19, 19]]))
    assert off(packed.view_as(full), full) < 1e-5
    for border in range(1, 19):
        cache = model.make_cache(2)
        steps = [model(IDS[:, :border], cache=cache), model(IDS[:, border:], cache=cache)]
        assert off(torch.cat(steps, 1), full) < 1e-5


def test_checkpointed_parts_have_the_same_gradient() -> None:
    model = made().train()
    expected: list[torch.Tensor] = []
    for mode in ("none", "block", "feed_forward", "attention"):
        model.gradient_checkpointing = mode
        model.zero_grad()
        model(IDS, targets=IDS).total.backward()
        grads = [p.grad.clone() for p in model.parameters()]
        expected = expected or grads
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), mode


@pytest.mark.parametrize("bits", ["int8", "int4"])
@torch.no_grad()
def test_rounded_experts_are_near_and_go_to_a_folder_and_back(bits: str, tmp_path: Path) -> None:
    spec = ModelSpec.of("qwen3_moe", **SIZES, experts=(None, replace(EXPERTS, shared=0, shared_gate=False)))
    model = made(spec, 0.1)
    expected = model(IDS)
    for calibrate in (None, [IDS[0, :3]]):
        rounded = made(spec, 0.1)
        quantize_model(rounded, bits, calibrate=calibrate)
        names = quantized_layers(rounded)
        assert "model.layers.1.mlp.experts.5.down_proj" in names
        assert not any(name.rpartition(".")[2] == "gate" for name in names)
        assert off(rounded(IDS), expected) < (0.05 if bits == "int8" else 0.5)
    save_folder(tmp_path / "rounded", rounded)
    loaded = build_model(load_folder(tmp_path / "rounded"))
    assert torch.equal(loaded(IDS), rounded(IDS))


def test_adapters_are_beside_experts_and_in_them() -> None:
    model = made()
    adapter = Adapter.fresh(model, Lora(rank=4), ["down_proj"])
    generator = torch.Generator().manual_seed(2)
    tensors = {name: torch.randn(t.shape, generator=generator) * 0.1 for name, t in adapter.tensors.items()}
    attach(model, replace(adapter, tensors=tensors))
    assert "model.layers.1.mlp.experts.3.down_proj" in adapter.layers
    with pytest.raises(ConfigError, match="the blocks have no linear layer 'gate'"):
        Adapter.fresh(made(), Lora(rank=4), ["gate"])
    adapted = model(IDS)
    adapted.sum().backward()
    with torch.no_grad():
        merge(model)
        assert off(model(IDS), adapted) < 1e-4
        unmerge(model)
        assert torch.equal(model(IDS), adapted)


def test_what_transformers_cannot_say_goes_to_a_folder_of_ours(tmp_path: Path) -> None:
    spec = replace(SPEC, experts=(None, replace(EXPERTS, score="sigmoid", choice_bias=True)) * 2)
    assert config_from_spec(spec)["model_type"] == "headway"
    assert spec_from_config(config_from_spec(spec)) == spec
    model = made(spec)
    for block in model.model.blocks[1::2]:
        block.mlp.gate.e_score_correction_bias.copy_(torch.randn(6))
    save_folder(tmp_path / "ours", model)
    loaded = build_model(load_folder(tmp_path / "ours"))
    with torch.no_grad():
        assert torch.equal(loaded(IDS), model(IDS))
    with pytest.raises(ConfigError, match=r"cannot express the .*experts of this llama"):
        write_spec(spec)


def test_experts_in_one_tensor_have_no_adapters_and_no_codes_of_their_own(tmp_path: Path) -> None:
    """Files of Granite keep the experts of a layer in two tensors."""
    spec = ModelSpec.of("granitemoe", **SIZES)
    adapter = Adapter.fresh(made(spec), Lora(rank=4))
    with pytest.raises(
        CheckpointError,
        match=r"model.layers.0.mlp.experts.0.down_proj, .* checkpoints of granitemoe have no name for these layers",
    ):
        check_named(adapter, spec)
    rounded = made(spec)
    quantize_model(rounded, "int8")
    with pytest.raises(CheckpointError, match=r"in one tensor with other experts"):
        save_folder(tmp_path / "rounded", rounded)
