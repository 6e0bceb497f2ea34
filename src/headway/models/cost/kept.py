"""Bytes of a model's weights as they are kept in memory, and of what an adapter adds, counted from the spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from headway.models.build import blank
from headway.models.cost.peak import trained_bytes_each
from headway.models.cost.weights import parameter_count, parameters, place_of
from headway.models.quantize import WeightKind
from headway.models.spec import ModelSpec
from headway.native.panels import panel_bytes
from headway.nn import Lora
from headway.nn.adapters import target_layers
from headway.nn.weights.nf4 import nf4_bytes


class Codes(NamedTuple):
    """Weights as the codes of a file: what they are, and of each by the name of its layer how many there are, and their
    bytes in memory."""

    what: str
    sizes: Mapping[str, tuple[int, int]]

    def __str__(self) -> str:
        return self.what


Quantized = WeightKind | Codes


class Kept(NamedTuple):
    """How weights are kept: the dtype of the products, in which all weights are but those that are `quantized`; and
    why."""

    dtype: torch.dtype
    quantized: Quantized | None = None
    why: str = ""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return dtype if self.quantized is None else f"{self.quantized}, else {dtype}"


def kept_bytes(spec: ModelSpec, kept: Kept) -> dict[str, int]:
    """Bytes of the weights by place, as `parameters` names them; of weights of few bits those in memory
    (`headway.models.quantize.quantize_model`), where scales lie with each 32 inputs."""
    e, saved = kept.dtype.itemsize, Counter[str]()
    for name, (count, nbytes) in _sizes(spec, kept.quantized).items():
        saved[place_of(name)] += count * e - nbytes
    return {place: count * e - saved[place] for place, count in parameters(spec).items()}


def _sizes(spec: ModelSpec, quantized: Quantized | None) -> Mapping[str, tuple[int, int]]:
    if isinstance(quantized, Codes):
        return quantized.sizes
    if quantized is None:
        return {}
    bits, group = quantized
    return {
        name: (o * i, panel_bytes(o, i, bits, group is not None and group < i))
        for name, (o, i) in linear_sizes(spec).items()
    }


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
