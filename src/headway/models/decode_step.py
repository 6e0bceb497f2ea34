"""One step of decoding as one call of the native kernels: what `Decoder` computes of one token of each row.

The blocks are described once: where their weights lie, what is done to rows between products. A step is given ids, adds
their keys and values to the cache, and returns logits; between its first product and its last no thread waits for
Python.

Legend: B rows, M width, H query heads, K kv heads, D per head, V vocab.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headway.attention import KeyValues
from headway.attention.backends.native import kernels
from headway.attention.backends.native.backend import NATIVE
from headway.attention.call import validate
from headway.attention.select import AUTO
from headway.cache import DecoderCache, KVCache
from headway.cache.table import Placement
from headway.errors import BackendError
from headway.models.decoder import Decoder
from headway.native import interface as c
from headway.native.linear import MOST_ROWS, Matrix, matrix_struct
from headway.native.loader import library, threads, why_missing
from headway.nn.attention import Attention, AttentionLayer
from headway.nn.block import Block
from headway.nn.feedforward import ACTIVATIONS, FeedForward
from headway.nn.linear import Linear, OutputLayer
from headway.nn.mixers import Mixer, SoftmaxMixer
from headway.nn.norms import LayerNorm, RMSNorm
from headway.nn.positions import RotaryEmbedding
from headway.nn.quantized import QuantizedLinear
from headway.positions import Rotary, RotaryTable
from headway.tokens import Tokens


def unsupported_reason(model: Decoder, cache: DecoderCache) -> str | None:
    """Why steps of this model cannot be native calls; None if they can."""
    if library() is None:
        return why_missing() or "the native kernels are not loaded"
    weights = {(p.dtype, p.device.type) for p in model.parameters()}
    if weights not in ({(torch.float32, "cpu")}, {(torch.bfloat16, "cpu")}):
        return "its kernels take weights of one type, float32 or bf16, on the CPU"
    if cache.batch > MOST_ROWS:
        return f"its kernels take up to {MOST_ROWS} rows"
    if any(
        not isinstance(layer, KVCache) or layer.dtype != model.model.embedding.dtype for layer in cache.layers
    ):
        return "its kernels write caches of keys and values in the type of the weights"
    if model.spec.logit_scale != 1.0 or model.model.scores.steps or model.model.norm is None:
        return "its kernels know no scores that layers share, no scaled logits, and want a last norm"
    if any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()):
        return "its modules have hooks, which the kernels would not call"
    if type(model.lm_head) not in (OutputLayer, QuantizedLinear):
        return f"its kernels know no layer {type(model.lm_head).__name__}"
    return next((reason for block in model.model.blocks if (reason := _odd_block(block))), None)


def _odd_block(block: Block) -> str | None:
    layer = block.self_attn
    if type(layer) is not Attention or type(layer.mixer) is not SoftmaxMixer or block.cross_attn is not None:
        return "its kernels know softmax attention to a decoder's own past"
    if block.order == "post":
        return "its kernels know norms in front of layers, not behind them"
    if layer.score.steps or len(layer.pattern.heads) > 1 or layer.mixer.backend not in (AUTO, NATIVE.name):
        return "its kernels know no scores, no pattern of each head, and no other backend"
    if layer.rotary.rotates and (
        type(layer.positions) is not Rotary or layer.rotary.frequency_offset is not None
    ):
        return "its kernels know rotary positions that are not trained"
    if layer.positions.length_dependent:
        return "its kernels know no rotation that depends on the length"
    mlp = block.mlp
    if not isinstance(mlp, FeedForward) or mlp.act not in _ACTS:
        return "its kernels do not know this activation"
    layers = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    kinds = {type(one) for one in layers if one is not None} - {Linear, QuantizedLinear}
    return f"its kernels know no layer {kinds.pop().__name__}" if kinds else None


_ACTS = {function: c.ACTIVATIONS[name] for name, function in ACTIVATIONS.items()}


class DecodeStep:
    """Steps of one model with one cache.

    Raises BackendError for a model that the kernels cannot run (`unsupported_reason`)."""

    def __init__(self, model: Decoder, cache: DecoderCache) -> None:
        if reason := unsupported_reason(model, cache):
            raise BackendError(f"DecodeStep: {reason}")
        self.model, self.cache = model, cache
        spec, stack = model.spec, model.model
        self.rows, dtype = cache.batch, stack.embedding.dtype
        self._kept: list[object] = []  # what the structures point to
        one = stack.blocks[0].self_attn

        def room(columns: int) -> Tensor:
            return torch.zeros(self.rows, columns, dtype=dtype)

        self.x, self.logits = room(spec.width), room(spec.vocab)
        self.q, self.k, self.v = (room(layer.out_features) for layer in (one.q_proj, one.k_proj, one.v_proj))
        self.attended, self.lse = (
            room(one.o_proj.in_features),
            torch.zeros(self.rows, one.heads.query_heads, 1),
        )
        self.hidden = room(spec.hidden), room(spec.hidden)
        self._rotations: dict[int, Rotated] = {}
        self._pasts: dict[tuple[int, Mixer], Past] = {}
        ops: list[c.OpStruct] = []
        for i, (block, layer) in enumerate(zip(stack.blocks, cache.layers, strict=True)):
            assert isinstance(layer, KVCache)
            ops += self._block(i, block, layer, len(ops))
        ops.append(self._products(self.x, [(model.lm_head, self.logits)], norm=stack.norm))
        self.ops = (c.OpStruct * len(ops))(*ops)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Ids [B] of the next tokens; logits [B, V] of those after them, valid until the next step."""
        tokens = self.cache.next_tokens(1)
        self.x.copy_(self.model.model.embed(ids.unsqueeze(1), tokens)[:, 0])
        for rotated in self._rotations.values():
            rotated.turn(tokens)
        for past in self._pasts.values():
            self._place(past, tokens)
        found = library()
        assert found is not None
        if code := found.dll.headway_step(self.ops, ctypes.c_int64(len(self.ops)), ctypes.c_int64(threads())):
            raise BackendError(f"a native step of decoding failed: {c.ERRORS.get(code, code)}")
        return self.logits

    # -- what is described once ----------------------------------------------------------------------------

    def _block(self, number: int, block: Block, past: KVCache, at: int) -> list[c.OpStruct]:
        """The operations of a block, the first of which is operation `at`."""
        layer, mlp = block.self_attn, block.mlp
        first, last = block.input_layernorm, block.post_attention_layernorm
        assert isinstance(mlp, FeedForward)
        qkv = [(layer.q_proj, self.q), (layer.k_proj, self.k), (layer.v_proj, self.v)]
        gate, up = self.hidden
        wide = [(mlp.up_proj, up)] if mlp.gate_proj is None else [(mlp.gate_proj, gate), (mlp.up_proj, up)]
        inner, times = (up, None) if mlp.gate_proj is None else (gate, up)
        heads = self._heads(number, layer)
        shared = self._pasts.setdefault((id(past.table), layer.mixer), Past(layer, self.rows))
        heads.slots = shared.slots.data_ptr()
        shared.layers.append(PastOf(past, heads, at + 2))
        attend = [
            self._products(self.x, qkv, norm=first),
            self._op(c.HEADS, heads),
            self._op(c.ATTENTION, shared.call),
        ]
        mixed = self._products(self.attended, [(layer.o_proj, self.x)], add=True)
        widen = self._products(self.x, wide, norm=first if last is None else last)
        narrow = self._products(inner, [(mlp.down_proj, self.x)], add=True, act=_ACTS[mlp.act], gate=times)
        if block.order == "pre":
            return [*attend, mixed, widen, narrow]
        return [*attend, widen, mixed, narrow]

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
    ) -> c.OpStruct:
        matrices = (c.MatrixStruct * len(layers))(
            *(matrix_struct(_weights(layer), out, self._floats(layer.bias), add=add) for layer, out in layers)
        )
        self._kept.append(matrices)
        inputs = layers[0][0].in_features
        struct = c.ProductsStruct(
            c.ABI, 0, self.rows, inputs, c.TYPES[x.dtype], x.data_ptr(), x.stride(0), matrices, len(layers)
        )
        if norm is not None:
            assert isinstance(norm, RMSNorm | LayerNorm)
            struct.norm = c.NORMS["rms" if isinstance(norm, RMSNorm) else "layer"]
            struct.gain, struct.shift = (_address(self._floats(t)) for t in (norm.weight, norm.bias))
            struct.eps = norm.eps
        struct.act, struct.gate = act, _address(gate)
        return self._op(c.PRODUCTS, struct)

    def _heads(self, number: int, layer: AttentionLayer) -> c.HeadsStruct:
        heads = layer.heads
        struct = c.HeadsStruct(
            self.rows, heads.query_heads, heads.kv_heads, layer.head_dim, layer.value_dim, c.TYPES[self.x.dtype],
            *(t.data_ptr() for t in (self.q, self.k, self.v)), *(t.stride(0) for t in (self.q, self.k, self.v)),
        )  # fmt: skip
        if layer.q_norm is not None:
            struct.q_gain, struct.eps = _address(self._floats(layer.q_norm.weight)), layer.q_norm.eps
        if layer.k_norm is not None:
            struct.k_gain = _address(self._floats(layer.k_norm.weight))
        shared = self.model.model.shared_rotation[number]
        if shared is not None:
            self._rotations.setdefault(shared, Rotated(layer.rotary, self.rows, self.x.dtype)).into(struct)
        return struct

    def _floats(self, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = t.detach().float().contiguous()
        self._kept.append(wide)
        return wide

    # -- what every step changes ---------------------------------------------------------------------------

    def _place(self, past: Past, tokens: Tokens) -> None:
        """Numbers the slots of the new tokens, and describes what their queries see."""
        placements = [cache.place(tokens) for cache, _, _ in past.layers]
        placement = placements[0]
        (((_, slots), taken),) = placement.writes
        assert placement.past is None  # of a step of one token, nothing that it sees is forgotten
        assert taken is None
        past.slots.copy_(slots.reshape(-1)) if isinstance(slots, Tensor) else past.slots.fill_(slots.start)
        for cache, heads, at in past.layers:
            k, v = cache.tensors
            if self.ops[at].k != k.data_ptr() or heads.k_cache.head != k.stride(1):
                heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
                self.ops[at].k, self.ops[at].v = k.data_ptr(), v.data_ptr()
        past.arguments = self._arguments(past.layer, placement, k, v)
        ctypes.memmove(
            ctypes.addressof(past.call), ctypes.addressof(past.arguments.struct), ctypes.sizeof(past.call)
        )

    def _arguments(
        self, layer: AttentionLayer, placement: Placement, k: Tensor, v: Tensor
    ) -> kernels.Arguments:
        heads, count, mixer = layer.heads.query_heads, placement.tokens.count, layer.mixer
        assert isinstance(mixer, SoftmaxMixer)
        q = self.q.view(self.rows, 1, heads, layer.head_dim).transpose(1, 2)
        out = self.attended.view(self.rows, 1, heads, layer.value_dim).transpose(1, 2)
        keys = KeyValues(k.narrow(2, 0, count), v.narrow(2, 0, count), placement.tokens)
        call = validate(q, placement.chunk.tokens, [keys], mixer.pattern, None, (), mixer.scale, 0.0, None)
        found = kernels.Arguments(call, 0)
        found.struct.out, found.struct.lse = c.TensorStruct.of(out), self.lse.data_ptr()
        return found


class PastOf(NamedTuple):
    """A layer's cache, where its heads are described, and which operation attends to it."""

    cache: KVCache
    heads: c.HeadsStruct
    at: int


class Past:
    """What layers of one pattern and one table of slots share: the slots of the new tokens, int64 [B], and the call."""

    def __init__(self, layer: AttentionLayer, rows: int) -> None:
        self.layer, self.layers = layer, list[PastOf]()
        self.slots = torch.zeros(rows, dtype=torch.int64)
        self.call = c.CallStruct()
        self.arguments: kernels.Arguments | None = None  # what the call points to


class Rotated:
    """Cosines and sines of the new tokens, which layers of equal positions share: float32 [B, d]."""

    def __init__(self, rotary: RotaryEmbedding, rows: int, dtype: torch.dtype) -> None:
        self.rotary, self.dtype = rotary, dtype
        table = self._table(Tokens.range(1))
        dims, at = table.dims, torch.arange(table.dims)
        partner = at ^ 1 if table.pairing == "adjacent" else (at + dims // 2) % dims
        self.partner = (partner if table.partner is None else table.partner).int()
        self.cos, self.sin = torch.zeros(rows, dims), torch.zeros(rows, dims)
        self.rotates_values = table.rotates_values

    def turn(self, tokens: Tokens) -> None:
        """The numbers of these tokens."""
        table = self._table(tokens)
        self.cos.copy_(table.cos.view(-1, table.dims))
        self.sin.copy_(table.sin.view(-1, table.dims))

    def into(self, struct: c.HeadsStruct) -> None:
        """Has heads turned by them."""
        struct.cos, struct.sin, struct.partner = (t.data_ptr() for t in (self.cos, self.sin, self.partner))
        struct.rotated = struct.rotation_row = self.cos.shape[1]
        struct.rotates_values = int(self.rotates_values)

    def _table(self, tokens: Tokens) -> RotaryTable:
        table = self.rotary(tokens, self.dtype)
        assert isinstance(table, RotaryTable)
        return table


def _weights(layer: Linear) -> Matrix:
    return layer.panels if isinstance(layer, QuantizedLinear) else layer.matrix.detach()


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
