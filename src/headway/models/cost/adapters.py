"""What an adapter costs beside a frozen model, counted from the spec."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from headway.models.build import blank
from headway.models.cost.peak import trained_bytes_each
from headway.models.cost.weights import parameter_count
from headway.models.spec import ModelSpec
from headway.nn import Adapter, Lora, block_linears
from headway.nn.weights.nf4 import nf4_bytes


def adapter_parameters(spec: ModelSpec, lora: Lora, targets: Sequence[str] = ()) -> int:
    """Trained numbers of an adapter: R (I + O) for each layer, and O more with magnitudes; `targets` as in
    `headway.nn.Adapter.fresh`."""
    with torch.device("meta"):
        fresh = Adapter.fresh(blank(spec), lora, targets)
    return sum(value.numel() for value in fresh.tensors.values())


def frozen_bytes(spec: ModelSpec, dtype: torch.dtype, *, nf4: bool = False) -> int:
    """Bytes of a model's weights in `dtype`; with `nf4`, linear layers of the blocks in 4 bits."""
    if not nf4:
        return parameter_count(spec) * dtype.itemsize
    with torch.device("meta"):
        linears = [layer.matrix.numel() for layer in block_linears(blank(spec)).values()]
    return (parameter_count(spec) - sum(linears)) * dtype.itemsize + sum(map(nf4_bytes, linears))


def trained_bytes(spec: ModelSpec, lora: Lora | None = None, targets: Sequence[str] = ()) -> int:
    """Bytes of gradients and moments, all float32: of an adapter, or of the whole model."""
    each = trained_bytes_each(torch.float32)
    return each * (parameter_count(spec) if lora is None else adapter_parameters(spec, lora, targets))
