"""Builds a module from a checked checkpoint."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.adapters import attach_folders
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.quantized.packed import PackedLayer
from headway.errors import ConfigError
from headway.models import Decoder, Model, ModelSpec, blank
from headway.models.build import allocate_
from headway.nn import Keeps
from headway.nn.weights import from_codes
from headway.storage.lazy import lazy


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
    dequantize: bool = False,
) -> Decoder:
    """Returns the decoder of a folder, in evaluation mode.

    `dtype` None keeps the file's, but float16 becomes float32 on a CPU, and mixed dtypes become the widest
    (`choose_dtype`). Weights that are quantized in the files stay quantized, and products with them round x to 8 bits
    (`headway.nn.Rounded`), unless `dequantize` is set. Raises as `load_folder` does, and ConfigError if the model is
    not a decoder.
    """
    folder = load_folder(path, allow_pickle=allow_pickle)
    return as_decoder(build_model(folder, dtype=dtype, dequantize=dequantize))


def build_model(
    folder: Folder,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    dequantize: bool = False,
) -> Model:
    """Returns the model of a folder that `load_folder` has read, with its adapters attached.

    It is on the CPU unless `device` says otherwise; `backend` is its attention backend (`headway.attend`). The other
    arguments are as in `load_model`."""
    where = torch.device("cpu" if device is None else device)
    run_dtype, choice = folder.choose_dtype(dtype, where)
    if dtype == torch.float16 and where.type == "cpu":
        warnings.warn(f"{choice.what} on a CPU: {choice.why}", stacklevel=3)
    quantized = {} if dequantize else folder.quantized
    model = restore(
        folder.spec, folder.tensors, dtype=run_dtype, device=where, backend=backend, quantized=quantized
    )
    attach_folders(model, folder.adapters)
    return model


def restore(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
    quantized: Mapping[str, PackedLayer] = MappingProxyType({}),
) -> Model:
    """Returns a model of `spec` with the weights of `state` (copied, cast to `dtype`), in evaluation mode. Layers in
    `quantized` keep their codes instead of weights; if there are any, the model is frozen."""
    with torch.device("meta"):
        model = blank(spec, backend).to(dtype)
    layers = {name: m for name, m in model.named_modules() if isinstance(m, Keeps) and name in quantized}
    for layer in layers.values():
        layer.vacate()
    allocated = allocate_(model, device).state_dict()
    expected = state.keys() - {f"{name}.weight" for name in quantized}
    assert allocated.keys() == expected, sorted(allocated.keys() ^ expected)
    values = lazy(state)
    with torch.no_grad():
        for name, value in allocated.items():
            values.copy_into(name, value)
    if quantized:
        model.requires_grad_(False)
        for name, layer in layers.items():
            layer.keep(from_codes(quantized[name].read()))
            layer.to(device)
    return model.eval()


def fill(spec: ModelSpec, state: Mapping[str, Tensor], **options: Any) -> Decoder:
    """Returns `restore` of a decoder's spec. Raises ConfigError if it is not a decoder's."""
    return as_decoder(restore(spec, state, **options))


def as_decoder(model: Model) -> Decoder:
    """Returns the model itself. Raises ConfigError if it is not a decoder."""
    if not isinstance(model, Decoder):
        raise ConfigError(
            f"a decoder is needed, but this model is an {type(model).__name__} ({model.spec.family}); encoders fill "
            "masks, classify and embed, encoder-decoders translate"
        )
    return model
