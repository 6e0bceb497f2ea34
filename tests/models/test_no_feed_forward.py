"""Row 20: models whose layers have no feed-forward (hidden=0) are built, counted, saved and decoded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from headway.checkpoints import (
    build_model,
    config_from_spec,
    load_folder,
    save_folder,
    spec_from_config,
    unsupported_by_transformers,
)
from headway.checkpoints.formats.gguf.metadata import write_spec
from headway.checkpoints.hf.layouts import LAYOUTS
from headway.errors import CheckpointError, ConfigError
from headway.models import FAMILIES, EncoderDecoder, ModelSpec, build, cost
from headway.models.description import ASPECTS
from headway.nn import Attention, Block, LayerNorm, RMSNorm
from headway.positions import PerLayer
from headway.train.tasks.translation import TranslationConfig, translation_spec
from tests.models.test_transformer_2017 import SOURCE, TARGET, Reference, made

SIZE: dict[str, Any] = {"vocab": 53, "width": 32, "layers": 2, "heads": 4, "hidden": 0}


class AttentionAlone(Reference):
    """The paper without section 3.3: no feed-forward, and no norm around it."""

    def around(self, x: torch.Tensor, norm: str, layer: Any) -> torch.Tensor:
        return x if norm.endswith("post_attention_layernorm") else super().around(x, norm, layer)


@pytest.mark.parametrize("order", ["post", "pre"])
@torch.no_grad()
def test_row_20_the_model_is_the_paper_without_its_third_section(order: str) -> None:
    model = made(order=order, final_norm=order == "pre", hidden=0)
    assert not any("mlp" in name or "post_attention" in name for name in model.state_dict())
    full = model(SOURCE, TARGET)
    for row in range(2):
        expected = AttentionAlone(model, order)(SOURCE[row], TARGET[row])
        assert float((full[row] - expected).abs().max()) < 1e-12 * float(expected.abs().max())


@torch.no_grad()
def test_a_block_without_one_adds_attention_alone() -> None:
    x = torch.randn(2, 5, 32, dtype=torch.float64)
    for kind in (RMSNorm, LayerNorm):
        block = Block(Attention(32, 4), None, lambda kind=kind: kind(32)).double()
        assert torch.equal(block(x), x + block.self_attn(block.input_layernorm(x)))
        block.order = "post"
        torch.testing.assert_close(
            block(x), block.input_layernorm(x + block.self_attn(x)), rtol=0, atol=1e-14
        )
    for order in ("parallel", "joint"):
        with pytest.raises(ConfigError, match=f"Block: order '{order}' needs a feed-forward"):
            Block(Attention(32, 4), None, lambda: RMSNorm(32), order)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=f"order '{order}' needs a feed-forward in every layer"):
            ModelSpec.of("llama", **SIZE, order=order)
    with pytest.raises(ConfigError, match="hidden must be a whole number of at least 0, got -1"):
        ModelSpec.of("llama", **{**SIZE, "hidden": -1})


def test_what_it_costs_is_attention_embedding_and_norms() -> None:
    spec = ModelSpec.of("llama", **SIZE)
    with_feed_forward = replace(spec, hidden=88)
    m, layers = spec.width, spec.layers
    assert cost.parameter_count(with_feed_forward) - cost.parameter_count(spec) == layers * (3 * m * 88 + m)
    assert cost.parameters(spec)["feed-forward"] == 0
    assert (
        cost.prefill_flops(with_feed_forward, 16, 16) - cost.prefill_flops(spec, 16, 16)
        == 2 * 16 * layers * 3 * m * 88
    )
    assert ASPECTS["feed-forward"].words(spec) == "none: layers of attention alone"


@pytest.mark.parametrize(
    "family",
    [
        name
        for name, family in FAMILIES.items()
        if family.defaults.get("order", "pre") in ("pre", "post")
        and "hidden" not in family.defaults
        and name != "nemotron_h"  # whose folders name the kind of each sub-layer
    ],
)
def test_a_folder_of_our_own_has_it_and_transformers_has_no_name_for_it(family: str, tmp_path: Path) -> None:
    is_pair = (family in LAYOUTS and LAYOUTS[family].encoder_keys is not None) or family == "transformer"
    positions = FAMILIES[family].defaults.get("positions")  # a folder keeps the schemes of its layers
    size = {**SIZE, "layers": len(positions.schemes)} if isinstance(positions, PerLayer) else SIZE
    spec = (ModelSpec.of_pair if is_pair else ModelSpec.of)(family, **size)
    assert unsupported_by_transformers(spec), "hidden=0 would be read as another model"
    assert config_from_spec(spec)["model_type"] == "headway"
    model = build(spec, seed=0)
    save_folder(tmp_path / "it", model)
    loaded = build_model(load_folder(tmp_path / "it"))
    assert loaded.spec == spec
    assert {n: p.tolist() for n, p in loaded.state_dict().items()} == {
        n: p.tolist() for n, p in model.state_dict().items()
    }


def test_other_formats_refuse_it_by_name() -> None:
    spec = ModelSpec.of("llama", **SIZE)
    assert "intermediate_size" in str(unsupported_by_transformers(spec))
    config = {**config_from_spec(replace(spec, hidden=88)), "intermediate_size": 0}
    with pytest.raises(ConfigError, match='"intermediate_size" must be a positive whole number, got 0'):
        spec_from_config(config)
    with pytest.raises(CheckpointError, match="feed_forward_length"):
        write_spec(spec)


def test_a_translator_s_setting() -> None:
    config = TranslationConfig.of({"source": "a", "target": "b", "width": 32, "hidden": 0})
    model = build(translation_spec(config, 300), seed=0)
    assert isinstance(model, EncoderDecoder)
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    assert len(blocks) == 2 * config.layers
    assert all(block.mlp is None for block in blocks)
    assert isinstance(blocks[-1].cross_attn, nn.Module)
