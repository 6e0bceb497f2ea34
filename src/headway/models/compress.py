"""Weights of bf16 in 70 % of their bytes, for decoding: the same numbers, to the bit."""

from __future__ import annotations

import torch
from torch import nn

from headway.errors import BackendError, ConfigError
from headway.models.build import Model
from headway.models.quantize import quantized_layers
from headway.native.compressed import Compressed
from headway.native.loader import library, why_missing
from headway.nn import CompressedLinear, Linear, OutputLayer, adapter_names, replace_linear


def compress_model(model: Model) -> None:
    """Put a `CompressedLinear` in the place of each linear layer, in place; the model is frozen, in evaluation mode.

    Embeddings stay as they are, and so does an output layer that is one. Layer by layer: the weights are never twice
    in memory. A step of decoding is as much faster as it waits for memory (up to 1.4 times, on CPUs with AVX-512 VBMI2
    and bf16; on others compressed weights save memory alone, and are slower).

    Raises ConfigError for weights that are not bf16 on the CPU, and for a model with adapters or quantized layers;
    BackendError where there are no native kernels."""
    if adapter_names(model) or quantized_layers(model):
        raise ConfigError(
            "compress_model: the model has adapters or quantized layers; merge adapters first (headway surgery merge), "
            "and compress a model of plain weights"
        )
    check_compressible(model)
    model.eval().requires_grad_(False)

    def compressed(_: str, layer: Linear) -> nn.Module:
        tied = isinstance(layer, OutputLayer) and layer.embedding is not None
        return (
            layer
            if tied or isinstance(layer, CompressedLinear)
            else CompressedLinear(layer, Compressed.pack(layer.matrix))
        )

    replace_linear(model, compressed)


def check_compressible(model: nn.Module) -> None:
    """Raises ConfigError for weights that are not bf16 on the CPU, and BackendError where no kernels read others."""
    kinds = {(p.dtype, p.device.type) for p in model.parameters()}
    if kinds != {(torch.bfloat16, "cpu")}:
        found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
        raise ConfigError(f"weights of bf16 on the CPU are compressed, not {found}; load the model in bf16")
    if library() is None:
        raise BackendError(f"compressed weights are read by the native kernels: {why_missing()}")
