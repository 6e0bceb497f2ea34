"""Lowers a decoder to operations of the native kernels; the only place that decides whether that is possible.

Each part of a model is lowered to operations on rows, and raises `NotLowered` with a reason if the kernels do not
support it. The locations of keys and values, and which of them each row attends to, are bound to the operations
afterwards (`headway.models.decode_step`).

Legend: R rows, M width, V vocab, H query heads.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.attention import KeyValues
from headway.attention.backends.native.backend import NATIVE
from headway.attention.call import Call, validate
from headway.attention.select import AUTO
from headway.models.decoder import Decoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.lowered_states import Stated, StateOperations
from headway.models.operations import NotLowered, address, kind_of
from headway.models.rotated import Rotated
from headway.models.stack import TransformerStack
from headway.native import interface as c
from headway.native.loader import library, why_missing
from headway.nn.adapters import named_adapter_parameters
from headway.nn.attention import Attention
from headway.nn.attention_layer import AttentionLayer
from headway.nn.block import Block
from headway.nn.experts import MixtureOfExperts
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear
from headway.nn.linear_attention import LinearAttention
from headway.nn.mixers import SoftmaxMixer
from headway.nn.mixing import StateLayer
from headway.nn.norms import RMSNorm
from headway.nn.positions import Scores
from headway.patterns import Causal
from headway.tokens import Tokens

ORDERS = {"pre": ("mix", "across", "widen", "narrow"), "parallel": ("widen", "mix", "narrow")}
ORDERS |= {"joint": ORDERS["parallel"], **dict.fromkeys(("post", "sandwich", "output"), ORDERS["pre"])}
"""The steps of a block from attention's output projection on, by its order: "mix" x += y Wo; "across" cross-attention;
"widen" hidden = norm(x) Wup; "narrow" x += act(hidden) Wdown. In order "post" a norm follows each sum: x = norm(x); in
"sandwich" and "output", and with a residual_scale, y = ... W first goes to its own buffer: x += factor * norm(y)."""


class Attends(NamedTuple):
    """The attention of one layer: its call for one token, its buffers, its struct of heads (slots not set yet), and
    the index of its operation (call not set yet). Layers with equal `kind` attend alike and share a call."""

    kind: tuple[object, ...]
    call: Call
    q: Tensor
    out: Tensor
    lse: Tensor
    heads: c.HeadsStruct
    op: int


class Lowered(StateOperations):
    """The blocks, last norm and output layer of a decoder or encoder-decoder as operations on up to 64 rows.

    Raises NotLowered with the reason if the kernels do not support the model.

    Attributes:
        ops: the operations in order; the last one computes logits.
        x, logits: the buffers [64, M] of the residual stream, and [64, V].
        attention: for each block, the attention to its own past.
        across: for each block of an encoder-decoder, its cross-attention.
        rotations: cosines and sines of the rows, by the number of the first layer that uses them.
    """

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        stack = model.stack
        _check_parts(model, stack)
        super().__init__(stack.like.dtype)
        self.attention: list[Attends | Stated] = []
        self.across: list[Attends] = []
        self.rotations: dict[int, Rotated] = {}
        self.shared_scores = stack.scores
        self.x, self.logits = self.room("x", model.spec.width), self.room("logits", model.spec.vocab)
        ops: list[c.OpStruct] = []
        for block, rotation in zip(stack.blocks, stack.shared_rotation, strict=True):
            ops += self._block(block, rotation, len(ops))
        if model.head is not None:
            raise NotLowered("the kernels do not support a dense layer before the output layer")
        out = [(model.lm_head, self.logits)]
        ops += self.products(self.x, out, norm=stack.norm, scale=model.spec.logit_scale)
        self.ops = (c.OpStruct * len(ops))(*ops)

    def _block(self, block: Block, rotation: int | None, at: int) -> list[c.OpStruct]:
        """Lowers a block to its operations, the first of which has index `at` in the list."""
        layer, mlp, across = block.self_attn, block.mlp, block.cross_attn
        if block.per_layer is not None or block.layer_scalar is not None:
            raise NotLowered("the kernels do not support per_layer_embedding and layer_scalar")
        if block.altup is not None or block.laurel is not None:
            raise NotLowered("the kernels do not support altup and laurel")
        first, last, scale = block.input_layernorm, block.before, block.residual_scale
        between, is_post = block.cross_attention_layernorm, block.order == "post"

        def added(y: Tensor, norm: nn.Module | None, of_added: nn.Module | None) -> list[c.OpStruct]:
            """Returns the operations of x += scale * of_added(y), followed by the norm in order "post"."""
            behind = [self.norm(norm, self.x)] if is_post and norm is not None else []
            return [self.added(self.x, y, of_added, scale), *behind]

        def joined(
            rows: Tensor, layer: Linear, norm: nn.Module | None, of_added: nn.Module | None = None, **act: Any
        ) -> list[c.OpStruct]:
            """Returns the operations of x += scale * of_added(f(rows) W), followed by the norm in order "post"."""
            if of_added is not None or scale != 1.0:
                y = self.room("added", layer.out_features)
                return [*self.products(rows, [(layer, y)], **act), *added(y, norm, of_added)]
            behind = [self.norm(norm, self.x)] if is_post and norm is not None else []
            return self.products(rows, [(layer, self.x)], True, **act) + behind

        norm, gate = None if is_post else first, dict[str, Any]()
        if isinstance(layer, StateLayer):
            ops, attended, stated = self.states(self.x, layer, norm)
            self.attention.append(stated)
        elif isinstance(layer, AttentionLayer):
            ops, attended, gate = self._attention(layer, norm, rotation, at)
        else:
            raise NotLowered(f"the kernels do not support {type(layer).__name__}")
        parts: dict[str, list[c.OpStruct]] = {"across": [], "widen": [], "narrow": []}
        parts["mix"] = joined(attended, layer.o_proj, first, block.behind[0], **gate)
        if across is not None:
            begin = at + len(ops) + len(parts["mix"])
            norm = None if is_post else between
            attend, attended, gate = self._attention(across, norm, None, begin, across=True)
            parts["across"] = attend + joined(attended, across.o_proj, between, **gate)
        if mlp is not None:
            norm = first if last is None else last
            if isinstance(mlp, MixtureOfExperts):
                parts["widen"], y = self.mixture(self.x, mlp, None if is_post else norm)
                parts["narrow"] = added(y, last, block.behind[1])
            elif isinstance(mlp, FeedForward):
                parts["widen"], rows, act = self.feed_forward(self.x, mlp, None if is_post else norm)
                parts["narrow"] = joined(rows, mlp.down_proj, last, block.behind[1], **act)
            else:
                raise NotLowered(f"the kernels do not support {type(mlp).__name__}")
        return [*ops, *(op for part in ORDERS[block.order] for op in parts[part])]

    def _attention(
        self,
        layer: AttentionLayer,
        norm: nn.Module | None,
        rotation: int | None,
        at: int,
        across: bool = False,
    ) -> tuple[list[c.OpStruct], Tensor, dict[str, Any]]:
        """Lowers a layer's attention to its own past, or with `across` to a source whose keys and values exist already.

        Returns the operations, the first of which has index `at`; the buffer that they write, heads side by side; and
        options of the output projection.
        """
        if layer.k_proj is None or layer.v_proj is None or layer.v_norm is not None:
            raise NotLowered("the kernels do not support kv_from, tied_values and v_norm")
        projections = [layer.q_proj] if across else [layer.q_proj, layer.k_proj, layer.v_proj]
        rows = [self.room(name, p.out_features) for name, p in zip("qkv", projections, strict=False)]
        rotated = None if across else self._rotated(layer, rotation)
        products = list(zip(projections, rows, strict=True))
        out = self.room("attended", layer.o_proj.in_features)
        behind, last, act = self._gated(layer, out, products)
        ops = self.products(self.x, products, norm=norm)
        if isinstance(layer, LinearAttention):
            op, summed = self.sums(layer, rotated, rows, out)
            self.attention.append(summed)
            return [*ops, op, *behind], last, act
        shared = None if across else self.shared_scores
        scores = [some for some in (shared, layer.score) if some is not None and some.steps]
        call, heads = _softmax_call(layer, scores, self.dtype, across=across), layer.heads
        struct = c.HeadsStruct(
            0, 1, heads.query_heads, 0 if across else heads.kv_heads, layer.head_dim, layer.value_dim,
            c.TYPES[self.dtype], *(t.data_ptr() for t in rows), *[None] * (3 - len(rows)),
            *(t.stride(0) for t in rows),
        )  # fmt: skip
        for name, of_heads, side in zip("qk", (layer.q_norm, layer.k_norm), rows, strict=False):
            if of_heads is None:
                continue
            if layer.qk_norm == "rotated":
                raise NotLowered("the kernels do not support qk_norm='rotated'")
            if layer.qk_norm == "all":
                ops.append(self.norm(of_heads, side))
                continue
            if not isinstance(known := self.known(of_heads), RMSNorm):
                raise NotLowered("the kernels support qk_norm by RMSNorm only")
            gain = torch.ones(known.width) if known.gain is None else known.gain
            setattr(struct, f"{name}_gain", address(self.floats(gain)))
            struct.norm, struct.eps = kind_of(known), known.eps
        if rotated is not None:
            rotated.into(struct)
            struct.rotates_values = int(rotated.rotates_values)
        if not across or layer.q_norm is not None:
            ops.append(self.op(c.HEADS, struct))
        lse = self.room("lse", heads.query_heads, torch.float32)
        kind = layer.mixer, rows[0].data_ptr(), *map(_alike, scores)
        attends = Attends(kind, call, rows[0], out, lse, struct, at + len(ops))
        if across:
            self.across.append(attends)
        else:
            self.attention.append(attends)
        if layer.sink_logit is not None:
            behind.insert(0, self.factors(out, heads.query_heads, lse=lse, sink=layer.sink_logit))
        return [*ops, c.OpStruct(c.ATTENTION), *behind], last, act

    def _gated(
        self, layer: AttentionLayer, out: Tensor, products: list[tuple[Linear, Tensor]]
    ) -> tuple[list[c.OpStruct], Tensor, dict[str, Any]]:
        """Lowers the output gate of attention results `out`: returns the operations after attention, the input rows of
        the output projection, and its options. The gate's own projection is appended to `products`, those of queries,
        keys and values.

        A gate per head multiplies the rows in place; a gate per channel is multiplied with the rows as in a
        feed-forward: sigmoid(gate) * out.
        """
        if layer.g_proj is None:
            return [], out, {}
        if layer.gate_act != "sigmoid":
            raise NotLowered(f"the kernels do not support gate_act={layer.gate_act!r}")
        gate = self.room("output gate", layer.g_proj.out_features)
        products.append((layer.g_proj, gate))
        if layer.gate == "head":
            return [self.factors(out, layer.heads.query_heads, gate=gate)], out, {}
        return [], gate, {"act": c.ACTIVATIONS["sigmoid"], "gate": out}

    def _rotated(self, layer: AttentionLayer, rotation: int | None) -> Rotated | None:
        """Returns the rotation of a layer, or None; layers with equal positions share it."""
        if not layer.rotary.rotates:
            return None
        key = len(self.attention) if rotation is None else rotation
        if key not in self.rotations:
            self.rotations[key] = Rotated(layer.rotary, self.dtype)
        return self.rotations[key]


def _check_parts(model: Decoder | EncoderDecoder, stack: TransformerStack) -> None:
    """Raises NotLowered for a missing library, and for weights and hooks that the kernels do not support."""
    if library() is None:
        raise NotLowered(why_missing() or "the native kernels are not loaded")
    adapters = {id(p) for part in (stack, model.lm_head) for _, p in named_adapter_parameters(part)}
    parameters = [p for part in (stack, model.lm_head) for p in part.parameters() if id(p) not in adapters]
    if {(p.dtype, p.device.type) for p in parameters} not in (
        {(torch.float32, "cpu")},
        {(torch.bfloat16, "cpu")},
    ):
        raise NotLowered("the kernels need all weights on the CPU, in one dtype, float32 or bfloat16")
    modules = [model, *stack.modules(), *model.lm_head.modules()]
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        raise NotLowered("the model has forward hooks, which the kernels would not call")


def _softmax_call(
    layer: AttentionLayer, scores: Sequence[Scores], dtype: torch.dtype, *, across: bool = False
) -> Call:
    """Returns the attention call of a layer for one token. It is causal even with `across`: the query is then
    placed at the last token of the source, which sees all of it. Raises NotLowered if the kernels do not support
    it.
    """
    mixer = layer.mixer
    if type(layer) is not Attention or type(mixer) is not SoftmaxMixer:
        odd = mixer if type(layer) is Attention else layer
        raise NotLowered(f"the kernels do not support {type(odd).__name__}")
    if len(layer.pattern.heads) > 1:
        raise NotLowered("the kernels do not support PerHead patterns")
    if mixer.backend not in (AUTO, NATIVE.name):
        raise NotLowered(f"backend={mixer.backend!r} is set for attention")
    q = torch.zeros(1, layer.heads.query_heads, 1, layer.head_dim, dtype=dtype)
    k, v = (q.new_zeros(1, layer.heads.kv_heads, 1, size) for size in (layer.head_dim, layer.value_dim))
    tokens, steps = Tokens.range(1), tuple(step for some in scores for step in some())
    pattern = Causal() if across else mixer.pattern
    call = validate(q, tokens, [KeyValues(k, v, tokens)], pattern, None, steps, mixer.scale, 0.0, None)
    if reason := NATIVE.unsupported_reason(call, False, "cpu"):
        raise NotLowered(f"native attention: {reason}")
    return call


def _alike(scores: Scores) -> object:
    """Returns a key that is equal for equal score steps: their values, or the module's identity if steps have
    tensors."""
    return tuple(scores.steps) if not any(step.parameters for step in scores.steps) else id(scores)
