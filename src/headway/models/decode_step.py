"""One step of decoding as one call of the native kernels: what `Decoder` computes of one token of each row.

The blocks are described once: where their weights lie, what is done to rows between products. A step is given ids, adds
their keys and values to the cache, and returns logits; between its first product and its last no thread waits for
Python.

Legend: B rows, M width, H query heads, K kv heads, D per head, V vocab.
"""

from __future__ import annotations

import ctypes
from typing import Any

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
from headway.native.linear import MOST_ROWS, matrix_struct
from headway.native.loader import library, threads, why_missing
from headway.nn.attention import Attention, AttentionLayer
from headway.nn.block import Block
from headway.nn.feedforward import ACTIVATIONS, FeedForward
from headway.nn.linear import Linear, OutputLayer
from headway.nn.mixers import SoftmaxMixer
from headway.nn.norms import LayerNorm, RMSNorm
from headway.positions import RotaryTable
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
    if type(model.lm_head) is not OutputLayer:
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
    if layer.rotary.frequency_offset is not None or layer.positions.length_dependent:
        return "its kernels know no rotation that is trained or depends on the length"
    mlp = block.mlp
    if not isinstance(mlp, FeedForward) or mlp.act not in _ACTS:
        return "its kernels do not know this activation"
    layers = layer.q_proj, layer.k_proj, layer.v_proj, layer.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj
    odd = (type(one).__name__ for one in layers if one is not None and type(one) is not Linear)
    return next((f"its kernels know no layer {name}" for name in odd), None)


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
        self.heads: list[c.HeadsStruct] = []
        self.calls: list[c.CallStruct] = []
        ops: list[c.OpStruct] = []
        for block in stack.blocks:
            ops += self._block(block)
        ops.append(self._products(self.x, [(model.lm_head, self.logits)], norm=stack.norm))
        self.ops = (c.OpStruct * len(ops))(*ops)

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Ids [B] of the next tokens; logits [B, V] of those after them, valid until the next step."""
        tokens = self.cache.next_tokens(1)
        stack = self.model.model
        self.x.copy_(stack.embed(ids.unsqueeze(1), tokens)[:, 0])
        self._rotations(tokens)
        self._attention(tokens)
        found = library()
        assert found is not None
        if code := found.dll.headway_step(self.ops, ctypes.c_int64(len(self.ops)), ctypes.c_int64(threads())):
            raise BackendError(f"a native step of decoding failed: {c.ERRORS.get(code, code)}")
        return self.logits

    # -- what is described once ----------------------------------------------------------------------------

    def _block(self, block: Block) -> list[c.OpStruct]:
        layer, mlp = block.self_attn, block.mlp
        first, last = block.input_layernorm, block.post_attention_layernorm
        assert isinstance(mlp, FeedForward)
        qkv = [(layer.q_proj, self.q), (layer.k_proj, self.k), (layer.v_proj, self.v)]
        gate, up = self.hidden
        wide = [(mlp.up_proj, up)] if mlp.gate_proj is None else [(mlp.gate_proj, gate), (mlp.up_proj, up)]
        inner, times = (up, None) if mlp.gate_proj is None else (gate, up)
        attend = [
            self._products(self.x, qkv, norm=first),
            self._op(c.HEADS, self._heads(block)),
            self._op(c.ATTENTION, c.CallStruct(), self.calls),
        ]
        mixed = self._products(self.attended, [(layer.o_proj, self.x)], add=True)
        widen = self._products(self.x, wide, norm=first if last is None else last)
        narrow = self._products(inner, [(mlp.down_proj, self.x)], add=True, act=_ACTS[mlp.act], gate=times)
        if block.order == "pre":
            return [*attend, mixed, widen, narrow]
        return [*attend, widen, mixed, narrow]

    def _op(self, kind: int, struct: Any, into: list[Any] | None = None) -> c.OpStruct:
        self._kept.append(struct)
        if into is not None:
            into.append(struct)
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
            *(
                matrix_struct(layer.matrix.detach(), out, self._floats(layer.bias), add=add)
                for layer, out in layers
            )
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

    def _heads(self, block: Block) -> c.HeadsStruct:
        layer = block.self_attn
        heads = layer.heads
        struct = c.HeadsStruct(
            self.rows, heads.query_heads, heads.kv_heads, layer.head_dim, layer.value_dim, c.TYPES[self.x.dtype],
            *(t.data_ptr() for t in (self.q, self.k, self.v)), *(t.stride(0) for t in (self.q, self.k, self.v)),
        )  # fmt: skip
        if layer.q_norm is not None:
            struct.q_gain, struct.eps = _address(self._floats(layer.q_norm.weight)), layer.q_norm.eps
        if layer.k_norm is not None:
            struct.k_gain = _address(self._floats(layer.k_norm.weight))
        self.heads.append(struct)
        return struct

    def _floats(self, t: Tensor | None) -> Tensor | None:
        if t is None:
            return None
        wide = t.detach().float().contiguous()
        self._kept.append(wide)
        return wide

    # -- what every step changes ---------------------------------------------------------------------------

    def _rotations(self, tokens: Tokens) -> None:
        stack, made = self.model.model, dict[int, tuple[Tensor, ...]]()
        for i, (block, struct) in enumerate(zip(stack.blocks, self.heads, strict=True)):
            shared = stack.shared_rotation[i]
            if shared is None:
                continue
            if shared not in made:
                table = block.self_attn.rotary(tokens, self.x.dtype)
                assert isinstance(table, RotaryTable)
                made[shared] = self._table(table)
                struct.rotates_values = int(table.rotates_values)
            cos, sin, partner = made[shared]
            struct.cos, struct.sin, struct.partner = cos.data_ptr(), sin.data_ptr(), partner.data_ptr()
            struct.rotated, struct.rotates_values = cos.shape[-1], self.heads[shared].rotates_values
            struct.rotation_row = cos.stride(0) if cos.dim() == 3 and cos.shape[0] > 1 else 0
        self._tables = made

    def _table(self, table: RotaryTable) -> tuple[Tensor, Tensor, Tensor]:
        dims = table.dims
        if table.partner is not None:
            partner = table.partner
        elif table.pairing == "adjacent":
            partner = torch.arange(dims) ^ 1
        else:
            partner = (torch.arange(dims) + dims // 2) % dims
        return table.cos.float().contiguous(), table.sin.float().contiguous(), partner.int().contiguous()

    def _attention(self, tokens: Tokens) -> None:
        templates: dict[tuple[object, ...], kernels.Arguments] = {}
        slots: dict[int, Tensor] = {}
        self._step_kept = templates, slots
        for block, cache, heads, call in zip(
            self.model.model.blocks, self.cache.layers, self.heads, self.calls, strict=True
        ):
            assert isinstance(cache, KVCache)
            layer, placement = block.self_attn, cache.place(tokens)
            if placement.past is not None:
                raise BackendError("DecodeStep: a cache forgets what this step sees; give it slack")
            table = id(cache.table)
            if table not in slots:
                slots[table] = self._slots(placement)
            k, v = cache.tensors
            heads.k_cache, heads.v_cache = c.TensorStruct.of(k), c.TensorStruct.of(v)
            heads.slots = slots[table].data_ptr()
            key = table, layer.mixer
            if key not in templates:
                templates[key] = self._arguments(layer, placement, k, v)
            ctypes.memmove(
                ctypes.addressof(call), ctypes.addressof(templates[key].struct), ctypes.sizeof(call)
            )
            call.k.data, call.v.data = k.data_ptr(), v.data_ptr()

    def _slots(self, placement: Placement) -> Tensor:
        (((_, slots), taken),) = placement.writes
        assert taken is None
        if isinstance(slots, slice):
            return torch.full((self.rows,), slots.start, dtype=torch.int64)
        return slots.reshape(-1).contiguous()

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


def _address(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()
