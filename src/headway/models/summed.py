"""Linear attention of a few rows as an operation of the native kernels, and the sums that it adds to.

Legend: R rows, K kv heads, F features, E per value.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headway.cache import PagedStates
from headway.models.operations import NotLowered
from headway.models.rotated import Rotated
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.nn.linear_attention import LinearAttention, LinearMixer
from headway.tokens import Tokens


class Summed(NamedTuple):
    """A layer whose past is sums, and its operation, whose sums are to be set."""

    layer: LinearAttention
    struct: c.SumsStruct


def sums_of(
    layer: LinearAttention, rotated: Rotated | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor
) -> Summed:
    """The operation of a layer on its queries, keys and values in rows. Raises NotLowered where the kernels do not
    compute what the layer does."""
    mixer = layer.mixer
    if type(mixer) is not LinearMixer or not mixer.pattern.is_causal:
        raise NotLowered("the kernels know linear attention to earlier tokens alone")
    if layer.q_norm is not None or (rotated is not None and rotated.rotates_values):
        raise NotLowered("the kernels know no norms of queries and no rotated values of linear attention")
    linear, heads, known = mixer.linear, layer.heads, c.FEATURES
    for feature in (linear.feature, linear.key_feature):
        if feature not in known:
            raise NotLowered(f"the kernels know no feature {feature!r} of linear attention")
    assert linear.key_feature is not None
    struct = c.SumsStruct(
        0, heads.query_heads, heads.kv_heads, layer.head_dim, layer.value_dim, c.TYPES[q.dtype],
        known.index(linear.feature), known.index(linear.key_feature),
        linear.eps if linear.is_safe or rotated is None else -math.inf,
        *(t.data_ptr() for t in (q, k, v)), *(t.stride(0) for t in (q, k, v)),
    )  # fmt: skip
    if rotated is not None:
        rotated.into(struct)
        struct.rotates_both = linear.rotary == "both"
    struct.out, struct.out_row = out.data_ptr(), out.stride(0)
    return Summed(layer, struct)


class PagedSums:
    """What layers of one class of pages share: the page of each row, int64 [R], and where texts begin."""

    def __init__(self) -> None:
        self.pages = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self.begins = torch.zeros(MOST_ROWS, dtype=torch.uint8)
        self._layers: list[tuple[PagedStates, c.SumsStruct]] = []

    def bind(self, summed: Summed, cache: PagedStates) -> None:
        """A layer adds to these sums."""
        summed.struct.pages, summed.struct.begins = self.pages.data_ptr(), self.begins.data_ptr()
        self._layers.append((cache, summed.struct))

    def place(self, tokens: Tokens, rows: slice) -> None:
        """Says of some of the tokens of a step whose they are."""
        first = self._layers[0][0]
        step, count = first.cache.step_of(tokens), rows.stop - rows.start
        pages, lengths = step.states[first.of], torch.tensor([len(table) for table in step.tables])
        self.pages[:count] = pages.repeat_interleave(torch.tensor(step.counts))[rows]
        self.begins[:count] = tokens.index[0, rows] == 0
        for cache, struct in self._layers:
            struct.kv, struct.z = cache.state.kv.data_ptr(), cache.state.k.data_ptr()
            cache.state.count[pages] = lengths
