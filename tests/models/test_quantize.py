"""Models in 8 and 4 bits: which layers are rounded, to what, and that all ways to run them agree."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.models import Decoder, ModelSpec, build
from headway.models.decode_step import DecodeStep
from headway.models.gptq import gptq
from headway.models.quantize import quantize_model, quantized_layers
from headway.nn import Adapter, Lora, attach, block_linears
from headway.positions import PerLayer, Rotary
from headway.quantization import quantize_clipped
from tests.checkpoints.hf import off
from tests.models.test_decode_step import native as native_step
from tests.native.presence import needs_kernels

SPEC = ModelSpec.of(
    "llama", vocab=61, width=64, layers=2, heads=4, kv_heads=2, hidden=96, tied=False, init_std=0.2
)
IDS = torch.randint(61, (3, 40), generator=torch.Generator().manual_seed(0))


def fresh(spec: ModelSpec = SPEC, dtype: torch.dtype = torch.float32) -> Decoder:
    model = build(spec, seed=0, dtype=dtype).eval()
    assert isinstance(model, Decoder)
    return model


@pytest.mark.parametrize(
    ("weights", "asked", "bits", "group"),
    [("int8", None, 8, 32), ("int8", -1, 8, None), ("int4", None, 4, 32)],
)
def test_every_layer_of_the_blocks_is_rounded_and_nothing_else(
    weights: str, asked: int | None, bits: int, group: int | None
) -> None:
    model, plain = fresh(), fresh()
    quantize_model(model, weights, group=asked)
    layers = quantized_layers(model)
    assert set(layers) == set(block_linears(plain))
    for name, layer in block_linears(plain).items():
        assert torch.equal(
            layers[name].dequantize(), quantize_clipped(layer.matrix, bits, group).dequantize()
        )
    assert torch.equal(model.lm_head.weight, plain.lm_head.weight)
    assert not any(p.requires_grad for p in model.parameters())
    quantize_model(model := fresh(), weights, output=True)
    assert set(quantized_layers(model)) == {*block_linears(plain), "lm_head"}


def test_what_cannot_be_quantized_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"there is no kind of weights 'int3'.*there are int8, int4"):
        quantize_model(fresh(), "int3")
    with pytest.raises(
        ConfigError, match=r"group must be a multiple of 32, or -1 for one scale per output, got 48"
    ):
        quantize_model(fresh(), "int4", group=48)
    with pytest.raises(ConfigError, match=r"an output layer that is not tied to the embedding"):
        quantize_model(fresh(replace(SPEC, tied=True)), "int8", output=True)
    with pytest.raises(ConfigError, match=r"at least one"):
        quantize_model(fresh(), "int8", calibrate=[])
    adapted = fresh()
    attach(adapted, Adapter.fresh(adapted, Lora(rank=2)))
    with pytest.raises(ConfigError, match=r"merge adapters first"):
        quantize_model(adapted, "int8")
    quantized = fresh()
    quantize_model(quantized, "int8")
    with pytest.raises(ConfigError, match=r"use unquantized weights"):
        quantize_model(quantized, "int4")


@pytest.mark.parametrize(("weights", "value"), [("int8", torch.nan), ("int4", torch.inf)])
def test_a_weight_that_is_no_number_is_named_and_nothing_is_changed(weights: str, value: float) -> None:
    for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight"):
        broken = fresh()
        broken.get_parameter(name).data[5] = value
        with pytest.raises(
            ConfigError, match=rf"{name} has \d+ of .* the first at \[5.*\({value}\).*use an earlier"
        ):
            quantize_model(broken, weights)
        assert not quantized_layers(broken)


@torch.no_grad()
def test_calibration_is_gptq_of_what_the_quantized_layers_before_give() -> None:
    """The blocks have different positions, so that calibration must give each its own rotation."""
    rows = list(IDS)
    schemes = tuple(Rotary(pairing="halves", theta=theta) for theta in (10000.0, 3.0, 100.0))
    spec = replace(SPEC, layers=3, patterns=3 * SPEC.patterns[:1], positions=PerLayer(schemes))
    model, plain = fresh(spec), fresh(spec)
    quantize_model(model, "int4", calibrate=rows)
    partly = fresh(spec)
    layers = quantized_layers(model)
    name = "model.layers.2.mlp.gate_proj"
    # the first two blocks are quantized, the third is not: its feed-forward is given the inputs that were summed
    for index in (0, 1):
        partly.model.layers[index] = model.model.layers[index]
    inputs: list[Tensor] = []
    partly.get_submodule(name).register_forward_pre_hook(lambda _, x: inputs.append(x[0]))
    for row in rows:
        partly(row[None])
    hessian = sum(x[0].T @ x[0] for x in inputs).double()
    expected = gptq(plain.get_submodule(name).weight, hessian, 4, 32)
    assert (layers[name].panels.unpack().codes == expected.codes).float().mean() > 0.999
    rounded = fresh(spec)
    quantize_model(rounded, "int4")
    reference = plain(IDS)
    gaps = [float((candidate(IDS) - reference).square().mean()) for candidate in (model, rounded)]
    assert gaps[0] < 0.8 * gaps[1]


def dense(model: Decoder, dtype: torch.dtype) -> Tensor:
    """Returns logits of a few positions in a dtype, with dequantized weights in place of the codes."""
    plain = fresh(dtype=next(model.parameters()).dtype).to(dtype)
    for name, layer in quantized_layers(model).items():
        plain.get_submodule(name).weight.data = layer.dequantize().to(dtype)
    return plain(IDS[:, :36])[:, 30:]


@needs_kernels
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_native_steps_are_those_of_the_modules(weights: str, dtype: torch.dtype) -> None:
    """Both round inputs to the same 8 bits and differ by at most twice the error of the dtype with plain weights."""
    model = fresh(dtype=dtype)
    quantize_model(model, weights, output=weights == "int8")
    native_cache, plain_cache = model.make_cache(3), model.make_cache(3)
    for cache in (native_cache, plain_cache):
        model(IDS[:, :30], cache=cache)
    step = DecodeStep(model, native_cache.pages)
    tolerance = 2 * off(dense(model, dtype), dense(model, torch.float64))
    for position in range(30, 36):
        ids = IDS[:, position : position + 1]
        assert off(native_step(step, native_cache, ids), model(ids, cache=plain_cache)) < tolerance
