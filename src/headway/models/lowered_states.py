"""Lowers layers with recurrent states to operations of the native kernels, and binds them to the pages of their states.

Legend: R rows, C channels.
"""

import ctypes
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.cache import PagedStates, PageTable
from headway.models.lowered_layers import LayerOperations
from headway.models.operations import NotLowered, address
from headway.models.rotated import Rotated
from headway.native import interface as c
from headway.native.linear import MOST_ROWS
from headway.nn.delta import UNIT_EPS, GatedDelta
from headway.nn.linear_attention import LinearAttention, LinearMixer
from headway.nn.mixing import StateLayer
from headway.nn.short_conv import ShortConvolution


class Stated(NamedTuple):
    """A layer whose past is a recurrent state: its operations, each with the fields that point to cache tensors and
    the numbers of these tensors."""

    layer: LinearAttention | StateLayer
    structs: Sequence[tuple[ctypes.Structure, Sequence[tuple[str, int]]]]


class PagedTexts:
    """Data shared by the layers of one page class: the page of each row, int64 [R], and which rows begin a sequence."""

    def __init__(self) -> None:
        self.pages = torch.zeros(MOST_ROWS, dtype=torch.int64)
        self.begins = torch.zeros(MOST_ROWS, dtype=torch.uint8)
        self._layers: list[tuple[PagedStates, Stated]] = []

    def bind(self, stated: Stated, cache: PagedStates) -> None:
        """Makes a layer's operations read and write these pages."""
        for struct, _ in stated.structs:
            struct.texts = c.TextsStruct(self.pages.data_ptr(), self.begins.data_ptr())
        self._layers.append((cache, stated))

    def place(self, tables: Sequence[PageTable], index: Tensor) -> None:
        """Sets the page of each row's sequence, and marks the rows that begin one (token index 0)."""
        count, of = len(tables), self._layers[0][0].of
        pages = self.pages[:count] = torch.tensor([table.pages[of][0] for table in tables])
        self.begins[:count] = index == 0
        for cache, stated in self._layers:
            for struct, fields in stated.structs:
                for name, number in fields:
                    setattr(struct, name, cache.tensors[number].data_ptr())
            if isinstance(stated.layer, LinearAttention):  # its third tensor stores the number of keys
                cache.tensors[2][pages] = torch.tensor([len(table) for table in tables])


class StateOperations(LayerOperations):
    """Lowers layers with recurrent states to operations."""

    def sums(
        self, layer: LinearAttention, rotated: Rotated | None, rows: Sequence[Tensor], out: Tensor
    ) -> tuple[c.OpStruct, Stated]:
        """Returns the operation of linear attention on the buffers of its queries, keys and values. Raises
        NotLowered if the kernels do not support the layer."""
        q, k, v = rows
        mixer = layer.mixer
        if type(mixer) is not LinearMixer or not mixer.pattern.is_causal:
            raise NotLowered("the kernels support causal linear attention only")
        if layer.q_norm is not None or (rotated is not None and rotated.rotates_values):
            raise NotLowered("the kernels do not support qk_norm or rotated values in linear attention")
        linear, heads, known = mixer.linear, layer.heads, c.FEATURES
        for feature in (linear.feature, linear.key_feature):
            if feature not in known:
                raise NotLowered(f"the kernels do not support the feature {feature!r} of linear attention")
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
        return self.op(c.SUMS, struct), Stated(layer, [(struct, [("kv", 0), ("z", 1)])])

    def states(
        self, x: Tensor, layer: StateLayer, norm: nn.Module | None
    ) -> tuple[list[c.OpStruct], Tensor, Stated]:
        """Returns the operations of a layer on norm(x), for rows x, the input buffer of its output projection, and its
        states.

        Raises NotLowered if the kernels do not support the layer.
        """
        if type(layer) is GatedDelta:
            return self._delta(x, layer, norm)
        if type(layer) is ShortConvolution:
            return self._short(x, layer, norm)
        raise NotLowered(f"the kernels do not support {type(layer).__name__}")

    def _short(
        self, x: Tensor, layer: ShortConvolution, norm: nn.Module | None
    ) -> tuple[list[c.OpStruct], Tensor, Stated]:
        """Lowers a short convolution: in_proj gives b, by and u, and `_taps` convolves u, with b and by as gates."""
        width = layer.width
        rows, out = self.room("gates and channels", 3 * width), self.room("convolved", width)
        b, by, u = rows.split(width, 1)
        struct = self._taps(u, layer.conv, layer.conv_bias, out, "none")
        struct.times, struct.by = b.data_ptr(), by.data_ptr()
        ops = [*self.products(x, [(layer.in_proj, rows)], norm=norm), self.op(c.TAPS, struct)]
        return ops, out, Stated(layer, [(struct, [("tail", 0)])])

    def _delta(
        self, x: Tensor, layer: GatedDelta, norm: nn.Module | None
    ) -> tuple[list[c.OpStruct], Tensor, Stated]:
        """Lowers the gated delta rule: projections, one convolution of queries, keys and values together, and the
        state update."""
        delta, kinds = layer.delta, (layer.decay_proj.out_features, layer.gate_proj.out_features)
        if delta.value_size % 16 or max(delta.head_dim, delta.value_size) > c.WIDEST:
            raise NotLowered(
                f"the kernels take keys and values of up to {c.WIDEST} per head, values in multiples of 16, got "
                f"{delta.head_dim} and {delta.value_size}"
            )
        channels = sum(delta.channels)
        rows, seen = self.room("channels", channels), self.room("convolved", channels)
        beta, decay, gate = (
            self.room(name, n)
            for name, n in zip(("beta", "decay", "gate"), (delta.heads, *kinds), strict=True)
        )
        qkv = zip((layer.q_proj, layer.k_proj, layer.v_proj), rows.split(delta.channels, 1), strict=True)
        first, behind = [*qkv, (layer.beta_proj, beta)], []
        for down, up, to in (
            (layer.decay_down, layer.decay_proj, decay),
            (layer.gate_down, layer.gate_proj, gate),
        ):
            if down is None:
                first.append((up, to))
                continue
            low = self.room(f"rank {len(first)}", down.out_features)
            first.append((down, low))
            behind += self.products(low, [(up, to)])
        taps = self._taps(rows, torch.cat((layer.q_conv, layer.k_conv, layer.v_conv)), None, seen, "silu")
        out = self.room("read", layer.o_proj.in_features)
        q, k, v = seen.split(delta.channels, 1)
        rate = self.floats(-layer.log_rate.detach().float().exp())
        struct = c.DeltaStepStruct(
            0, delta.heads, delta.key_heads, delta.head_dim, delta.value_size, c.TYPES[out.dtype],
            delta.decays // delta.heads, delta.head_dim**-0.5, delta.beta_scale, UNIT_EPS, layer.norm.eps,
            c.ACTIVATIONS[delta.gate],
            *(t.data_ptr() for t in (q, k, v, beta, decay, gate)), *(t.stride(0) for t in (q, beta, decay, gate)),
            address(rate), *(address(self.floats(t)) for t in (layer.decay_bias, layer.norm.gain)),
        )  # fmt: skip
        struct.out, struct.out_row = out.data_ptr(), out.stride(0)
        ops = [
            *self.products(x, first, norm=norm),
            *behind,
            self.op(c.TAPS, taps),
            self.op(c.DELTA, struct),
        ]
        return ops, out, Stated(layer, [(taps, [("tail", 1)]), (struct, [("state", 0)])])

    def _taps(self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, act: str) -> c.TapsStruct:
        """Returns the operation of a causal convolution of rows x into rows `out`."""
        taps = self.floats(weight.t().flip(0))
        struct = c.TapsStruct(
            0, x.shape[1], weight.shape[1], c.TYPES[x.dtype], c.ACTIVATIONS[act], x.data_ptr(), None, None, x.stride(0),
            address(taps), address(self.floats(bias)),
        )  # fmt: skip
        struct.out, struct.out_row = out.data_ptr(), out.stride(0)
        return struct
