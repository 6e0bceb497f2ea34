"""From a spec to its module, and fresh weights."""

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
    """The module of a spec with uninitialised weights on torch's default device (see `torch.device`)."""
    with _Unfilled():
        return MODELS[spec.kind](spec, backend)


class _Unfilled(TorchFunctionMode):
    """Has `torch.nn.init` leave tensors as they are. On the device "meta" a number that is drawn costs the import of
    torch's compiler, which takes as long as that of torch itself."""

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
    """A model with fresh weights (`initialize_`), in training mode: `Decoder`, `Encoder` or `EncoderDecoder`.

    Args:
        spec: what it is.
        device: "meta" gives shapes without memory or weights.
        dtype: of all parameters; torch's default unless given.
        seed: equal seeds give equal weights on every device (in bfloat16: their rounding); None draws one.
        backend: of attention, in every layer.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    with torch.device("meta"):
        model = blank(spec, backend).to(dtype)
    where = torch.device("cpu" if device is None else device)
    if where.type != "meta":
        initialize_(allocate_(model, where), seed)
    return model


def allocate_(model: Model, device: torch.device | str) -> Model:
    """Gives every parameter memory on `device`, with anything in it, in place; returns the model.

    `torch.nn.Module.to_empty` would import sympy, to ask which strides tensors without memory have."""
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))  # type: ignore[no-untyped-call]
    large_pages(model.parameters())
    return model


def initialize_(model: Model, seed: int | None = None) -> None:
    """Fills every parameter, in place.

        parameter                                   value
        embeddings, output layer, score tables      normal, std s
        other matrices                              normal, std s
        o_proj, down_proj                           normal, std s / sqrt(2 L): 2 L of them add to the stream
        gains of norms                              1, with what is added to their weights
        numbers that multiply layers                1
        biases, sink logits, offsets of trained frequencies      0 (those of routers, too, that only choose)
        numbers of a trained activation             `XIELU.start`

    and what a layer fills otherwise (`MixingLayer.initialize_`),
    with s = `spec.init_std` and L layers (GPT-2: Radford et al. 2019, section 2.3). Numbers are drawn in
    float32 on the CPU, in the order of `named_parameters`, so a seed gives the same weights on every device.
    """
    generator = torch.Generator()
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    std, depth = model.spec.init_std, model.spec.layers  # of an encoder-decoder: the decoder's, for both
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
