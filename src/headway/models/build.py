"""From a spec to its module."""

from __future__ import annotations

import torch

from headway.models.decoder import Decoder
from headway.models.encoder import Encoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.initialize import initialize_
from headway.models.spec import ModelSpec

Model = Decoder | Encoder | EncoderDecoder


def blank(spec: ModelSpec, backend: str = "auto") -> Model:
    """The module of a spec with uninitialised weights on torch's default device (see `torch.device`)."""
    if spec.encoder is not None:
        return EncoderDecoder(spec, backend)
    return Decoder(spec, backend) if spec.causal else Encoder(spec, backend)


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
        initialize_(model.to_empty(device=where), seed)
    return model
