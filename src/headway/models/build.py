"""From a spec to its module."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import nn

from headway.models.decoder import Decoder
from headway.models.encoder import Encoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.initialize import initialize_
from headway.models.spec import ModelSpec
from headway.nn import Linear, replace_linear

Model = Decoder | Encoder | EncoderDecoder
MODELS: Mapping[str, type[Decoder] | type[Encoder] | type[EncoderDecoder]] = {
    "decoder": Decoder,
    "encoder": Encoder,
    "encoder-decoder": EncoderDecoder,
}
MakeLinear = Callable[[str, Linear], nn.Module]


def blank(spec: ModelSpec, backend: str = "auto", linear: MakeLinear | None = None) -> Model:
    """The module of a spec with uninitialised weights on torch's default device (see `torch.device`).

    `linear(name, layer)` gives what takes the place of each `Linear` (`headway.nn.replace_linear`)."""
    model = MODELS[spec.kind](spec, backend)
    if linear is not None:
        replace_linear(model, linear)
    return model


def build(
    spec: ModelSpec,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    backend: str = "auto",
    linear: MakeLinear | None = None,
) -> Model:
    """A model with fresh weights (`initialize_`), in training mode: `Decoder`, `Encoder` or `EncoderDecoder`.

    Args:
        spec: what it is.
        device: "meta" gives shapes without memory or weights.
        dtype: of all parameters; torch's default unless given.
        seed: equal seeds give equal weights on every device (in bfloat16: their rounding); None draws one.
        backend: of attention, in every layer.
        linear: as in `blank`: quantised or adapted layers, put in before there are weights.
    """
    dtype = torch.get_default_dtype() if dtype is None else dtype
    with torch.device("meta"):
        model = blank(spec, backend, linear).to(dtype)
    where = torch.device("cpu" if device is None else device)
    if where.type != "meta":
        initialize_(model.to_empty(device=where), seed)
    return model
