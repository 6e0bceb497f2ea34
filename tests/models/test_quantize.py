"""Models of 8 and 4 bits: which layers are rounded, to what, and that all ways of running them agree."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.models import Decoder, ModelSpec, build
from headway.models.decode_step import DecodeStep
from headway.models.decode_support import unsupported_reason
from headway.models.gptq import gptq
from headway.models.quantize import quantize_model, quantized_layers
from headway.native.loader import library
from headway.nn import Adapter, Lora, attach, block_linears
from headway.quantization import quantize_clipped

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
    with pytest.raises(ConfigError, match=r"int8 or int4, not to 'int3'"):
        quantize_model(fresh(), "int3")
    with pytest.raises(ConfigError, match=r"a multiple of 32 inputs, or of all \(-1\), not of 48"):
        quantize_model(fresh(), "int4", group=48)
    with pytest.raises(ConfigError, match=r"no output layer apart from its embedding"):
        quantize_model(fresh(replace(SPEC, tied=True)), "int8", output=True)
    with pytest.raises(ConfigError, match=r"at least one"):
        quantize_model(fresh(), "int8", calibrate=[])
    adapted = fresh()
    attach(adapted, Adapter.fresh(adapted, Lora(rank=2)))
    with pytest.raises(ConfigError, match=r"merge adapters first"):
        quantize_model(adapted, "int8")
    done = fresh()
    quantize_model(done, "int8")
    with pytest.raises(ConfigError, match=r"quantize a model of plain weights"):
        quantize_model(done, "int4")


@torch.no_grad()
def test_calibration_is_gptq_of_what_the_quantized_layers_before_give() -> None:
    rows = list(IDS)
    model, plain = fresh(), fresh()
    quantize_model(model, "int4", calibrate=rows)
    partly = fresh()
    found = quantized_layers(model)
    name = "model.layers.1.mlp.gate_proj"
    # the first block as it was made, the second as it was: what its feed-forward is given is what was summed
    partly.model.layers[0] = model.model.layers[0]
    seen: list[Tensor] = []
    partly.get_submodule(name).register_forward_pre_hook(lambda _, x: seen.append(x[0]))
    for row in rows:
        partly(row[None])
    hessian = sum(x[0].T @ x[0] for x in seen).double()
    wanted = gptq(plain.get_submodule(name).weight, hessian, 4, 32)
    assert (found[name].panels.unpack().codes == wanted.codes).float().mean() > 0.999
    other = fresh()
    quantize_model(other, "int4")
    reference = plain(IDS)
    gaps = [float((one(IDS) - reference).square().mean()) for one in (model, other)]
    assert gaps[0] < 0.8 * gaps[1]


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_native_steps_are_those_of_the_modules(weights: str, dtype: torch.dtype) -> None:
    if library() is None:
        pytest.skip("needs the native kernels")
    model = fresh(dtype=dtype)
    quantize_model(model, weights, output=weights == "int8")
    native, plain = model.make_cache(3), model.make_cache(3)
    assert unsupported_reason(model, native) is None
    for cache in (native, plain):
        model(IDS[:, :30], cache=cache)
    step = DecodeStep(model, native)
    # both round to 8 bits what they sum; a rounding of the norm before it may fall on the other side
    close = {torch.float32: 2e-2, torch.bfloat16: 6e-2}[dtype]
    for at in range(30, 36):
        ids = IDS[:, at : at + 1]
        wanted = model(ids, cache=plain).float()
        assert float((step(ids).float() - wanted).abs().max() / wanted.abs().max()) < close
