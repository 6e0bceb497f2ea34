"""Weights of bf16 in 70 % of their bytes, for decoding: the same numbers, to the bit."""

from __future__ import annotations

import torch
from torch import nn

from headway.errors import BackendError, ConfigError
from headway.models.build import Model
from headway.native.loader import library, why_missing
from headway.nn import CompressedWeight, Plain, adapter_names, linears


def compress_model(model: Model) -> None:
    """Compress the weights of each linear layer, in place; the model is frozen, in evaluation mode.

    Embeddings stay as they are, and so does an output layer that is one. Layer by layer: the weights are never twice
    in memory. A step of decoding is as much faster as it waits for memory (up to 1.4 times, on CPUs with AVX-512 VBMI2
    and bf16; on others compressed weights save memory alone, and are slower).

    Raises ConfigError for weights that are not bf16 on the CPU, and for a model with adapters or quantized layers;
    BackendError where there are no native kernels."""
    layers = {name: layer for name, layer in linears(model).items() if layer.embedding is None}
    if adapter_names(model) or any(not layer.kept.exact for layer in layers.values()):
        raise ConfigError(
            "compress_model: the model has adapters or quantized layers; merge adapters first (headway surgery merge), "
            "and compress a model of plain weights"
        )
    check_compressible(model)
    model.eval().requires_grad_(False)
    for layer in layers.values():
        if isinstance(layer.kept, Plain):
            layer.keep(CompressedWeight.pack(layer.matrix))


def check_compressible(model: nn.Module) -> None:
    """Raises ConfigError for weights that are not bf16 on the CPU, and BackendError where no kernels read others."""
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    if kinds != {(torch.bfloat16, "cpu")}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigError(f"weights of bf16 on the CPU are compressed, not {found}; load the model in bf16")
    if library() is None:
        raise BackendError(f"compressed weights are read by the native kernels: {why_missing()}")
