"""What an adapter costs beside a frozen model, counted from the spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from headway.models.build import blank
from headway.models.cost.peak import trained_bytes_each
from headway.models.cost.weights import parameter_count
from headway.models.spec import ModelSpec
from headway.nn import Lora
from headway.nn.adapters import target_layers
from headway.nn.weights.nf4 import nf4_bytes


def adapter_parameters(spec: ModelSpec, lora: Lora, targets: Sequence[str] = ()) -> int:
    """Trained numbers of an adapter: R (I + O) for each layer, and O more with magnitudes; `targets` as in
    `headway.nn.Adapter.fresh`."""
    sizes = linear_sizes(spec, tuple(targets)).values()
    return sum(lora.rank * (inputs + outputs) + outputs * lora.magnitude for outputs, inputs in sizes)


@lru_cache(maxsize=16)
def linear_sizes(spec: ModelSpec, targets: tuple[str, ...] = ()) -> Mapping[str, tuple[int, int]]:
    """(O, I) of each linear layer of the blocks by its name, or of those that are `targets`."""
    with torch.device("meta"):
        layers = target_layers(blank(spec), targets)
    return {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}


def frozen_bytes(spec: ModelSpec, dtype: torch.dtype, *, nf4: bool = False) -> int:
    """Bytes of a model's weights in `dtype`; with `nf4`, linear layers of the blocks in 4 bits."""
    if not nf4:
        return parameter_count(spec) * dtype.itemsize
    linears = [outputs * inputs for outputs, inputs in linear_sizes(spec).values()]
    return (parameter_count(spec) - sum(linears)) * dtype.itemsize + sum(map(nf4_bytes, linears))


def trained_bytes(spec: ModelSpec, lora: Lora | None = None, targets: Sequence[str] = ()) -> int:
    """Bytes of gradients and moments, all float32: of an adapter, or of the whole model."""
    each = trained_bytes_each(torch.float32)
    return each * (parameter_count(spec) if lora is None else adapter_parameters(spec, lora, targets))
