"""Linear attention of a few rows as an operation of the native kernels, and the sums that it adds to.

Legend: R rows, K kv heads, F features, E per value.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headway.cache import PagedStates, PageTable
from headway.models.operations import NotLowered
from headway.models.rotated import Rotated
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.nn.linear_attention import LinearAttention, LinearMixer


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

    def place(self, tables: Sequence[PageTable], index: Tensor) -> None:
        """The text of each row, and which of its tokens the row is."""
        count, of = len(tables), self._layers[0][0].of
        pages = self.pages[:count] = torch.tensor([table.pages[of][0] for table in tables])
        self.begins[:count] = index == 0
        lengths = torch.tensor([len(table) for table in tables])
        for cache, struct in self._layers:
            kv, z, counts = cache.tensors
            struct.kv, struct.z = kv.data_ptr(), z.data_ptr()
            counts[pages] = lengths
