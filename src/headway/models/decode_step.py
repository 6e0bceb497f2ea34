"""A step of decoding as one call of the native kernels: what `Decoder` computes of the next tokens of each sequence.

The blocks are described once: where their weights lie, what is done to rows between products. A step is given ids, adds
their keys and values to the cache, and returns logits; between its first product and its last no thread waits for
Python.

Legend: B sequences, T tokens of each, R = B T rows, M width, H query heads, K kv heads, D per head, V vocab.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headway.cache import DecoderCache, KVCache
from headway.errors import BackendError
from headway.models.decode_state import Past, PastOf, Rotated
from headway.models.decode_support import unsupported_reason
from headway.models.decoder import Decoder
from headway.native import interface as c
from headway.native.linear import MOST_ROWS, Matrix, matrix_struct
from headway.native.loader import library, threads
from headway.nn.attention import AttentionLayer
from headway.nn.block import Block
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear
from headway.nn.lora import LowRank
from headway.nn.mixers import Mixer
from headway.nn.norms import LayerNorm, RMSNorm
from headway.tokens import Tokens


class DecodeStep:
    """Steps of one model with one cache, of up to 64 rows.

    Raises BackendError for a model that the kernels cannot run (`unsupported_reason`)."""

    def __init__(self, model: Decoder, cache: DecoderCache) -> None:
        if reason := unsupported_reason(model, cache):
            raise BackendError(f"DecodeStep: {reason}")
        self.model, self.cache = model, cache
        spec, stack = model.spec, model.model
        dtype = stack.like.dtype
        self._kept: list[object] = []  # what the structures point to
        self._counted: list[c.ProductsStruct | c.HeadsStruct] = []  # what has a number of rows
        self._shape = 0, 0
        one = stack.blocks[0].self_attn

        def room(columns: int) -> Tensor:
            return torch.zeros(MOST_ROWS, columns, dtype=dtype)

        self.x, self.logits = room(spec.width), room(spec.vocab)
        self.q, self.k, self.v = (room(layer.out_features) for layer in (one.q_proj, one.k_proj, one.v_proj))
        self.attended, self.lse = room(one.o_proj.in_features), torch.zeros(MOST_ROWS, one.heads.query_heads)
        self.hidden = room(spec.hidden), room(spec.hidden)
        self._low: dict[int, Tensor] = {}  # x A^T of adapters, by their number in one operation and rank
        self._rotations: dict[int, Rotated] = {}
        self._pasts: dict[tuple[int, Mixer], Past] = {}
        ops: list[c.OpStruct] = []
        attends: list[tuple[Past, KVCache, c.HeadsStruct, int]] = []
        for i, (block, layer) in enumerate(zip(stack.blocks, cache.layers, strict=True)):
            assert isinstance(layer, KVCache)
            past, heads = self._past(block.self_attn, layer), self._heads(i, block.self_attn)
            heads.slots = past.slots.data_ptr()
            block_ops, at = self._block(block, heads, past.call)
            attends.append((past, layer, heads, len(ops) + at))
            ops += block_ops
        ops += self._products(self.x, [(model.lm_head, self.logits)], norm=stack.norm)
        self.ops = (c.OpStruct * len(ops))(*ops)
        for past, layer, heads, at in attends:
            past.layers.append(PastOf(layer, heads, self.ops[at]))

    def fits(self, batch: int, count: int) -> bool:
        """Whether a step may read `count` tokens of each sequence: they are up to 64 rows, and the cache forgets
        nothing that the first of them sees when it takes the last."""
        policies = [past.layers[0].cache.table.policy for past in self._pasts.values()]
        return batch * count <= MOST_ROWS and all(
            count <= 1 or one.retention.reach is None or count - 1 <= one.slack for one in policies
        )

    @torch.inference_mode()
    def __call__(self, ids: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Ids [B, T] of the next tokens; logits [B, T, V] of those after each, valid until the next step.

        lengths: how many of the T are tokens, for each sequence; all unless given. What the logits of the others are is
            not said."""
        batch, count = ids.shape
        tokens = self.cache.next_tokens(count, lengths)
        self._run(self.model.model.embed(ids, tokens), tokens, len(self.ops))
        return self.logits[: batch * count].view(batch, count, -1)

    @torch.inference_mode()
    def states(self, x: Tensor) -> Tensor:
        """Embeddings [B, T, M] of the next tokens; what the last block makes of them, before the last norm."""
        self._run(x, self.cache.next_tokens(x.shape[1]), len(self.ops) - 1)
        return self.x[: x.shape[0] * x.shape[1]].view(x.shape).clone()

    def _run(self, x: Tensor, tokens: Tokens, ops: int) -> None:
        batch, count, _ = x.shape
        self._resize(batch, count)
        self.x[: batch * count].view(x.shape).copy_(x)
        for rotated in self._rotations.values():
            rotated.turn(tokens, batch)
        for past in self._pasts.values():
            past.place(tokens, batch)
        found = library()
        assert found is not None
        if code := found.dll.headway_step(self.ops, ctypes.c_int64(ops), ctypes.c_int64(threads())):
            raise BackendError(f"a native step of decoding failed: {c.ERRORS.get(code, code)}")

    def _resize(self, batch: int, count: int) -> None:
        if self._shape == (batch, count):
            return
        if batch * count > MOST_ROWS:
            raise BackendError(
                f"DecodeStep: {batch} x {count} tokens; its kernels take up to {MOST_ROWS} rows"
            )
        self._shape = batch, count
        for struct in self._counted:
            struct.rows = batch * count
            if isinstance(struct, c.HeadsStruct):
                struct.tokens = count

    def _past(self, layer: AttentionLayer, cache: KVCache) -> Past:
        key = id(cache.table), layer.mixer
        if key not in self._pasts:
            self._pasts[key] = Past(layer, self.q, self.attended, self.lse)
        return self._pasts[key]

    def _block(self, block: Block, heads: c.HeadsStruct, call: c.CallStruct) -> tuple[list[c.OpStruct], int]:
        """The operations of a block, and which of them attends."""
        layer, mlp = block.self_attn, block.mlp
        first, last = block.input_layernorm, block.post_attention_layernorm
        qkv = [(layer.q_proj, self.q), (layer.k_proj, self.k), (layer.v_proj, self.v)]
        project = [*self._products(self.x, qkv, norm=first), self._op(c.HEADS, heads)]
        attend, at = [*project, self._op(c.ATTENTION, call)], len(project)
        mixed = self._products(self.attended, [(layer.o_proj, self.x)], add=True)
        if mlp is None:
            return [*attend, *mixed], at
        assert isinstance(mlp, FeedForward)
        gate, up = self.hidden
        wide = [(mlp.up_proj, up)] if mlp.gate_proj is None else [(mlp.gate_proj, gate), (mlp.up_proj, up)]
        inner, times = (up, None) if mlp.gate_proj is None else (gate, up)
        widen = self._products(self.x, wide, norm=first if last is None else last)
        narrow = self._products(
            inner, [(mlp.down_proj, self.x)], add=True, act=c.ACTIVATIONS[mlp.act], gate=times
        )
        if block.order == "pre":
            return [*attend, *mixed, *widen, *narrow], at
        return [*attend, *widen, *mixed, *narrow], at

    def _op(self, kind: int, struct: ctypes.Structure) -> c.OpStruct:
        self._kept.append(struct)
        return c.OpStruct(kind, ctypes.addressof(struct))

    def _products(
        self,
        x: Tensor,
        layers: list[tuple[Linear, Tensor]],
        *,
        norm: nn.Module | None = None,
        add: bool = False,
        act: int = 0,
        gate: Tensor | None = None,
    ) -> list[c.OpStruct]:
        """x W^T (+ b) of layers of one x, into their outputs or added to them. Adapters are two operations more: x A^T
        is one more matrix beside W, and what B makes of it is added to the output."""
        structs = [self._matrix(layer.kept.native(), out, layer.bias, add=add) for layer, out in layers]
        behind: list[c.OpStruct] = []
        for layer, out in layers:
            for part in layer.beside:
                low = self._room_for(part, len(structs))
                structs.append(self._matrix(part.lora_A.detach(), low))
                scaled = (part.lora.scale * part.lora_B.detach().float()).to(_exact(part))
                behind.append(self._product(low, [self._matrix(scaled, out, add=True)]))
        return [self._product(x, structs, norm=norm, act=act, gate=gate), *behind]

    def _room_for(self, part: LowRank, number: int) -> Tensor:
        key = number * 4096 + len(part.lora_A)
        if key not in self._low:
            self._low[key] = torch.zeros(MOST_ROWS, len(part.lora_A), dtype=self.x.dtype)
        return self._low[key]

    def _matrix(
        self, matrix: Matrix | str, out: Tensor, bias: Tensor | None = None, *, add: bool = False
    ) -> c.MatrixStruct:
        assert not isinstance(matrix, str), "unsupported_reason has said so"
        self._kept.append(matrix)
        return matrix_struct(matrix, out, self._floats(bias), add=add)

    def _product(
        self,
        x: Tensor,
        structs: Sequence[c.MatrixStruct],
        *,
        norm: nn.Module | None = None,
        act: int = 0,
        gate: Tensor | None = None,
    ) -> c.OpStruct:
        matrices = (c.MatrixStruct * len(structs))(*structs)
        self._kept.append(matrices)
        struct = c.ProductsStruct(
            c.ABI, 0, 0, x.shape[1], c.TYPES[x.dtype], x.data_ptr(), x.stride(0), matrices, len(structs)
        )
        if norm is not None:
            assert isinstance(norm, RMSNorm | LayerNorm)
            struct.norm = c.NORMS["rms" if isinstance(norm, RMSNorm) else "layer"]
            struct.gain, struct.shift = (_address(self._floats(t)) for t in (norm.weight, norm.bias))
            struct.eps = norm.eps
        struct.act, struct.gate = act, _address(gate)
        self._counted.append(struct)
        return self._op(c.PRODUCTS, struct)

    def _heads(self, number: int, layer: AttentionLayer) -> c.HeadsStruct:
        heads = layer.heads
        struct = c.HeadsStruct(
            0, 1, heads.query_heads, heads.kv_heads, layer.head_dim, layer.value_dim, c.TYPES[self.x.dtype],
            *(t.data_ptr() for t in (self.q, self.k, self.v)), *(t.stride(0) for t in (self.q, self.k, self.v)),
        )  # fmt: skip
        if layer.q_norm is not None:
            struct.q_gain, struct.eps = _address(self._floats(layer.q_norm.weight)), layer.q_norm.eps
        if layer.k_norm is not None:
            struct.k_gain = _address(self._floats(layer.k_norm.weight))
        shared = self.model.model.shared_rotation[number]
        if shared is not None:
            self._rotations.setdefault(shared, Rotated(layer.rotary, MOST_ROWS, self.x.dtype)).into(struct)
        self._counted.append(struct)
        return struct

    def _floats(self, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = t.detach().float().contiguous()
        self._kept.append(wide)
        return wide


def _exact(part: LowRank) -> torch.dtype:
    """A dtype that holds s B: that of B where s is a power of two."""
    return part.lora_B.dtype if math.frexp(part.lora.scale)[0] in (0.5, -0.5) else torch.float32


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
