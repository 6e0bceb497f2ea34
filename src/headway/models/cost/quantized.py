"""How a model's weights are kept in memory, and the bytes of each part, counted from the spec."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch

from headway.models.cost.adapters import linear_sizes
from headway.models.cost.weights import parameters
from headway.models.spec import ModelSpec
from headway.native.linear import panel_bytes

Quantized = tuple[int, int | None]
"""Bits of a weight, and inputs that share a scale: None, all of a row."""


class Kept(NamedTuple):
    """How weights are kept: the dtype of the products, in which all weights are but those that are `quantized`, the
    linear layers of the blocks; and why."""

    dtype: torch.dtype
    quantized: Quantized | None = None
    why: str = ""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self.quantized is None:
            return dtype
        bits, group = self.quantized
        each = "output" if group is None else f"{group} inputs"
        return f"int{bits} in the blocks with a scale for each {each}, else {dtype}"


def kept_bytes(spec: ModelSpec, kept: Kept) -> dict[str, int]:
    """Bytes of the weights by place, as `parameters` names them; of weights of 8 or 4 bits those in memory
    (`headway.models.quantize.quantize_model`), where scales lie with each 32 inputs."""
    e, saved = kept.dtype.itemsize, Counter[str]()
    if kept.quantized is not None:
        bits, group = kept.quantized
        for name, (o, i) in linear_sizes(spec).items():
            saved[_place(spec, name)] += o * i * e - panel_bytes(o, i, bits, group is not None and group < i)
    return {place: count * e - saved[place] for place, count in parameters(spec).items()}


def _place(spec: ModelSpec, name: str) -> str:
    """Where `parameters` counts a linear layer of the blocks."""
    if spec.encoder is not None and ".encoder." in f".{name}":
        return "encoder"
    return "feed-forward" if ".mlp." in name else "attention"
