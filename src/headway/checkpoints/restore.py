"""From a checked checkpoint to a module."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.folder import Folder, load_folder
from headway.errors import ConfigError
from headway.models import Decoder, Model, ModelSpec, blank
from headway.models.build import allocate_
from headway.nn import from_codes, linears
from headway.quantization import QuantizedMatrix
from headway.storage.lazy import copy_into


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    allow_pickle: bool = False,
) -> Decoder:
    """The decoder of a folder, in evaluation mode.

    `dtype` None keeps the file's, but float16 becomes float32 on a CPU and a mix becomes its widest
    (`choose_dtype`). Raises as `load_folder` does, and ConfigError for a model that is no decoder.
    """
    return as_decoder(
        build_model(load_folder(path, allow_pickle=allow_pickle), dtype=dtype, device=device, backend=backend)
    )


def build_model(
    folder: Folder,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> Model:
    """The model of a folder that `load_folder` has read; arguments as in `load_model`."""
    where = torch.device("cpu" if device is None else device)
    wanted, choice = folder.choose_dtype(dtype, where)
    if dtype == torch.float16 and where.type == "cpu":
        warnings.warn(f"{choice.what} on a CPU: {choice.why}", stacklevel=3)
    return restore(
        folder.spec, folder.tensors, dtype=wanted, device=where, backend=backend, quantized=folder.quantized
    )


def restore(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    quantized: Mapping[str, QuantizedMatrix] = MappingProxyType({}),
) -> Model:
    """A model of `spec` with the weights of `state` (copied, cast to `dtype`), in evaluation mode. Layers in
    `quantized` keep these matrices in place of their weights, and the model is then frozen."""
    with torch.device("meta"):
        model = blank(spec, backend).to(dtype)
    for name in quantized:
        setattr(model.get_submodule(name), "weight", None)  # noqa: B010  (a Parameter to the type checker)
    own = allocate_(model, device).state_dict()
    wanted = state.keys() - {f"{name}.weight" for name in quantized}
    assert own.keys() == wanted, sorted(own.keys() ^ wanted)
    with torch.no_grad():
        for name, value in own.items():
            copy_into(state, name, value)
    if quantized:
        model.requires_grad_(False)
        for name, layer in linears(model).items():
            if name in quantized:
                layer.keep(from_codes(quantized[name]))
                layer.to(device)
    return model.eval()


def fill(spec: ModelSpec, state: Mapping[str, Tensor], **options: Any) -> Decoder:
    """`restore` for the spec of a decoder. Raises ConfigError for another."""
    return as_decoder(restore(spec, state, **options))


def as_decoder(model: Model) -> Decoder:
    """The same model. Raises ConfigError unless it is a decoder."""
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"this is an {type(model).__name__} ({model.spec.family}), and a decoder is needed here, which continues "
            "a text; encoders fill masks, classify and embed, encoder-decoders translate"
        )
    return model
