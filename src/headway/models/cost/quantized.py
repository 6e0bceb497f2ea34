"""How a model's weights are kept in memory, and the bytes of each part, counted from the spec."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch

from headway.models.cost.adapters import linear_sizes
from headway.models.cost.weights import parameters, place_of
from headway.models.quantize import WeightKind
from headway.models.spec import ModelSpec
from headway.native.panels import panel_bytes


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
