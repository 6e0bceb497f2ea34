"""The attention maps are those of the layers: through values and output they give the layers' own outputs."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from headway.models import Decoder, ModelSpec, build
from headway.nn import Attention
from headway.patterns import Causal, Window
from headway_lab.demo import heads
from headway_lab.demo.run import shown


def model(family: str, **fields: object) -> Decoder:
    spec = ModelSpec.of_depth(2, 50, width=32, heads=4, kv_heads=2, head_dim=8, hidden=48, family=family,
                              patterns=[Window.last(4), Causal()], **fields)  # type: ignore[arg-type]  # fmt: skip
    made = build(spec, seed=0, dtype=torch.float64).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15)
    return made


@pytest.mark.parametrize("family", ["ministral", "qwen2", "qwen3"])
def test_maps_are_what_the_layers_computed(family: str) -> None:
    decoder, ids = model(family), torch.randint(0, 50, (1, 13))
    outputs: list[Tensor] = []
    values: list[Tensor] = []
    layers = [module for module in decoder.modules() if isinstance(module, Attention)]
    hooks: list[nn.modules.module.torch.utils.hooks.RemovableHandle] = []  # type: ignore[name-defined]
    for layer in layers:
        hooks.append(layer.register_forward_hook(lambda _m, _i, out: outputs.append(out)))
        hooks.append(layer.v_proj.register_forward_hook(lambda _m, _i, out: values.append(out)))
    with torch.no_grad():
        decoder(ids)
    for hook in hooks:
        hook.remove()
    maps = heads.attention_maps(decoder, ids)
    assert len(maps) == len(layers) == 2
    for weights, layer, value, output in zip(maps, layers, values, outputs, strict=True):
        assert weights.shape == (4, 13, 13)
        assert torch.allclose(weights.sum(-1), torch.ones(4, 13, dtype=torch.float64), atol=1e-12)
        v = value.unflatten(-1, (2, 8)).transpose(1, 2).repeat_interleave(2, dim=1)
        mixed = (weights @ v[0]).transpose(0, 1).reshape(1, 13, 32)
        assert torch.allclose(layer.o_proj(mixed), output, atol=1e-11)
    outside = torch.ones(13, 13).tril(-4).bool() | torch.ones(13, 13).triu(1).bool()
    assert (maps[0][:, outside] == 0).all()
    assert not [hook for module in decoder.modules() for hook in module._forward_hooks]


def test_looks_measure_where_the_weight_lies() -> None:
    itself, previous, first = torch.eye(6), torch.eye(6).roll(-1, 1).tril(), torch.zeros(6, 6)
    first[:, 0] = 1.0
    found = heads.looks([torch.stack([itself, previous, first])])
    assert [(one["itself"], one["previous"], one["first"], one["back"]) for one in found] == [
        (1.0, 0.0, 0.0, 0.0),
        (0.0, 1.0, 0.0, 1.0),
        (0.0, 0.0, 1.0, 3.5),  # queries 2..5 look 2..5 back
    ]
    text = heads.striking(found)
    assert "layer 0, head 0  100% of its weight" in text
    assert "layer 0, head 1  100% of its weight" in text
    assert "layer 0, head 2  3.5 tokens" in text


def test_the_figure_has_a_panel_a_head(tmp_path: Path) -> None:
    maps = [torch.rand(2, 5, 5).softmax(-1) for _ in range(3)]
    heads.draw_heads(maps, ["a", "b", "$\\c$", "_d", "\\e"], tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes().startswith(b"\x89PNG")


def test_spaces_and_line_ends_are_shown() -> None:
    assert shown(" x\n") == "·x¶"
    assert shown("ñ中\t\x1b") == "ñ□□□"
