"""A model with compressed weights: bit-identical results, the same state dict, and what is refused."""

from pathlib import Path

import pytest
import torch

from headway.checkpoints import load_model, save_folder
from headway.errors import ConfigError
from headway.generate import GenerationConfig, generate
from headway.models import ModelSpec, build
from headway.models.quantize import compress_model, quantize_model

SIZES = {"vocab": 96, "width": 64, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 160, "max_context": 128}
PROMPTS = [list(range(3, 30)), [7, 8]]


def decoder(tied: bool = False) -> torch.nn.Module:
    return build(ModelSpec.of("llama", **SIZES, tied=tied), dtype=torch.bfloat16, seed=0).eval()


@pytest.mark.parametrize("tied", [False, True])
def test_text_and_states_are_the_same(tied: bool, tmp_path: Path) -> None:
    model, config = decoder(tied), GenerationConfig(max_new_tokens=12)
    expected, state = generate(model, PROMPTS, config), model.state_dict()
    compress_model(model)
    assert [result.ids for result in generate(model, PROMPTS, config)] == [result.ids for result in expected]
    assert model.lm_head.kept.name == ("plain" if tied else "compressed")
    actual = model.state_dict()
    assert actual.keys() == state.keys()
    assert all(torch.equal(t, state[name]) for name, t in actual.items())
    save_folder(tmp_path, model)
    assert all(torch.equal(t, state[name]) for name, t in load_model(tmp_path).state_dict().items())
    compress_model(model)  # a second call does nothing


def test_many_rows_and_gradients() -> None:
    """A prompt of more rows than a decode step goes through torch, as with plain weights; inputs get gradients."""
    model, ids = decoder(), torch.arange(90).view(1, 90) % 96
    with torch.no_grad():
        expected = model(ids)
        compress_model(model)
        assert torch.equal(model(ids), expected)
    layer = model.model.blocks[0].self_attn.q_proj
    x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
    layer(x).sum().backward()
    expected_gradient = layer.matrix.float().sum(0).expand(3, 64)
    torch.testing.assert_close(x.grad.float(), expected_gradient, atol=0.02, rtol=0.02)


def test_quantized_layers_are_not_compressed() -> None:
    quantized = decoder()
    quantize_model(quantized, "int8")
    with pytest.raises(ConfigError, match="adapters or quantized layers"):
        compress_model(quantized)
