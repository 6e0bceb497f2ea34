"""Builds the module of a spec, and initializes weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from headway.hardware import large_pages
from headway.models.decoder import Decoder
from headway.models.encoder import Encoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.spec import ModelSpec
from headway.nn import Block, MixingLayer
from headway.nn.feedforward import XIELU

Model = Decoder | Encoder | EncoderDecoder
MODELS: Mapping[str, type[Decoder] | type[Encoder] | type[EncoderDecoder]] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder-decoder": EncoderDecoder,
}
RESIDUAL = ("o_proj.weight", "down_proj.weight")


def blank(spec: ModelSpec, backend: str = "auto") -> Model:
    """Returns the module of a spec with uninitialized weights, on torch's default device (see `torch.device`)."""
    with _Unfilled():
        return MODELS[spec.kind](spec, backend)


class _Unfilled(TorchFunctionMode):
    """Makes the functions of `torch.nn.init` leave tensors as they are. On the "meta" device a random initialization
    would import torch's compiler, which takes as long as importing torch itself."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else named["tensor"]
        return func(*args, **named)


def build(
    spec: ModelSpec,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    backend: str = "auto",
) -> Model:
    """Returns a model with freshly initialized weights (`initialize_`), in training mode: a `Decoder`, `Encoder` or
    `EncoderDecoder`.

    Args:
        spec: the architecture.
        device: "cpu" by default; "meta" gives shapes without memory or weights.
        dtype: dtype of all parameters; torch's default dtype if None.
        seed: equal seeds give equal weights on every device (in bfloat16: their rounding); None draws a random seed.
        backend: attention backend of every layer.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    with torch.device("meta"):
        model = blank(spec, backend).to(dtype)
    target = torch.device("cpu" if device is None else device)
    if target.type != "meta":
        initialize_(allocate_(model, target), seed)
    return model


def allocate_(model: Model, device: torch.device | str) -> Model:
    """Allocates uninitialized memory on `device` for every parameter and buffer, in place; returns the model.

    Unlike `torch.nn.Module.to_empty` it does not import sympy, which that needs for the strides of meta tensors.
    """
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))  # type: ignore[no-untyped-call]
    large_pages(model.parameters())
    return model


def initialize_(model: Model, seed: int | None = None) -> None:
    """Initializes every parameter, in place.

        parameter                                   value
        embeddings, output layer, score tables      normal, std s
        other matrices                              normal, std s
        o_proj, down_proj                           normal, std s / sqrt(2 L), since 2 L of them add to the residual
                                                    stream
        gains of norms                              1 - `spec.norm_offset`, so that the effective gain is 1
        layer scalars                               1
        biases, sink logits, offsets of trained frequencies      0 (also the router biases that only affect selection)
        parameters of a trained activation          `XIELU.start`

    and what `MixingLayer.initialize_` sets, with s = `spec.init_std` and L layers (GPT-2: Radford et al. 2019, section
    2.3). Random numbers are drawn in float32 on the CPU, in the order of `named_parameters`, so a seed gives the same
    weights on every device.
    """
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    std, depth = (
        model.spec.init_std,
        model.spec.layers,
    )  # an encoder-decoder uses the decoder's values for both stacks
    gain = 1.0 - model.spec.norm_offset
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith((".bias", ".sink_logit", ".frequency_offset")):
                parameter.zero_()
            elif (leaf := name.rpartition(".")[2]) in XIELU.start:
                parameter.fill_(XIELU.start[leaf])
            elif parameter.dim() == 1:
                parameter.fill_(gain)
            else:
                width = std / math.sqrt(2 * depth) if name.endswith(RESIDUAL) else std
                fresh = torch.zeros(parameter.shape).normal_(0.0, width, generator=generator)
                parameter.copy_(fresh)
        for layer in model.modules():
            if isinstance(layer, MixingLayer):
                layer.initialize_(generator)
            if isinstance(layer, Block) and layer.layer_scalar is not None:
                layer.layer_scalar.fill_(1.0)
