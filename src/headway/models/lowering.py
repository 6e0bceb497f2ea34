"""A decoder as operations of the native kernels, or the reason why it cannot be: the one place that says so.

Each part of a model is lowered here to operations on rows, and raises `NotLowered` where it is something that the
kernels do not compute. Where the rows' keys and values are kept, and which of them a row sees, is
bound to the operations afterwards (`headway.models.decode_step`).

Legend: R rows, M width, V vocab, H query heads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.attention.call import Call
from headway.models.decoder import Decoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.lowerable import check_parts, softmax_call
from headway.models.lowered_experts import experts_of
from headway.models.lowered_layers import LayerOperations
from headway.models.lowered_states import Stated, states_of, sums_of
from headway.models.operations import NotLowered, address, kind_of
from headway.models.rotated import Rotated
from headway.native import interface as c
from headway.nn.attention_layer import AttentionLayer
from headway.nn.block import Block
from headway.nn.experts import MixtureOfExperts
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear
from headway.nn.linear_attention import LinearAttention
from headway.nn.mixing import StateLayer
from headway.nn.norms import RMSNorm
from headway.nn.positions import Scores

ORDERS = {"pre": ("mix", "across", "widen", "narrow"), "parallel": ("widen", "mix", "narrow")}
ORDERS |= {"joint": ORDERS["parallel"], **dict.fromkeys(("post", "sandwich", "output"), ORDERS["pre"])}
"""What follows attention in a block, by its order: x += y Wo; attention to a source; hidden = norm(x) Wup;
x += act(hidden) Wdown. In order "post" the norms stand behind each sum: x = norm(x); in "sandwich" and "output", and
where what is added has a factor, y = ... W lies apart first: x += factor * norm(y)."""


class Attends(NamedTuple):
    """Where a layer attends: its call of one token, its rooms, its heads, whose slots are to be set, and the number of
    the operation, whose call is to be set. Layers of one `kind` attend alike."""

    kind: tuple[object, ...]
    call: Call
    q: Tensor
    out: Tensor
    lse: Tensor
    heads: c.HeadsStruct
    op: int


class Lowered(LayerOperations):
    """Blocks, last norm and output layer of a decoder, of an encoder-decoder too, as operations on up to 64 rows.

    Raises NotLowered with the reason where the kernels do not compute what the model does.

    Attributes:
        ops: in their order; the last one makes logits.
        x, logits: rows [64, M] that the blocks change, and [64, V].
        attention: where each block attends to its own past.
        across: where each block attends to a source, of an encoder-decoder.
        rotations: cosines and sines of the rows, by the layer that has them first.
    """

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        stack = model.stack
        check_parts(model, stack)
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
            raise NotLowered("the kernels know no dense layer in front of the output layer")
        out = [(model.lm_head, self.logits)]
        ops += self.products(self.x, out, norm=stack.norm, scale=model.spec.logit_scale)
        self.ops = (c.OpStruct * len(ops))(*ops)

    def _block(self, block: Block, rotation: int | None, at: int) -> list[c.OpStruct]:
        layer, mlp, across = block.self_attn, block.mlp, block.cross_attn
        if block.per_layer is not None or block.layer_scalar is not None:
            raise NotLowered("the kernels know no embeddings and no factors of a layer")
        first, last, scale = block.input_layernorm, block.before, block.residual_scale
        between, is_post = block.cross_attention_layernorm, block.order == "post"

        def added(y: Tensor, norm: nn.Module | None, of_added: nn.Module | None) -> list[c.OpStruct]:
            """x += scale * of_added(y), and the norm of that."""
            behind = [self.norm(norm, self.x)] if is_post and norm is not None else []
            return [self.added(self.x, y, of_added, scale), *behind]

        def joined(
            rows: Tensor, layer: Linear, norm: nn.Module | None, of_added: nn.Module | None = None, **act: Any
        ) -> list[c.OpStruct]:
            """x += scale * of_added(f(rows) W), and the norm of that."""
            if of_added is not None or scale != 1.0:
                y = self.room("added", layer.out_features)
                return [*self.products(rows, [(layer, y)], **act), *added(y, norm, of_added)]
            behind = [self.norm(norm, self.x)] if is_post and norm is not None else []
            return self.products(rows, [(layer, self.x)], True, **act) + behind

        norm, gate = None if is_post else first, dict[str, Any]()
        if isinstance(layer, StateLayer):
            ops, attended, stated = states_of(self, self.x, layer, norm)
            self.attention.append(stated)
        elif isinstance(layer, AttentionLayer):
            ops, attended, gate = self._attention(layer, norm, rotation, at)
        else:
            raise NotLowered(f"the kernels of a step know no {type(layer).__name__}")
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
                parts["widen"], y = experts_of(self, self.x, mlp, None if is_post else norm)
                parts["narrow"] = added(y, last, block.behind[1])
            elif isinstance(mlp, FeedForward):
                parts["widen"], rows, act = self.feed_forward(self.x, mlp, None if is_post else norm)
                parts["narrow"] = joined(rows, mlp.down_proj, last, block.behind[1], **act)
            else:
                raise NotLowered(f"the kernels know no {type(mlp).__name__}")
        return [*ops, *(op for part in ORDERS[block.order] for op in parts[part])]

    def _attention(
        self,
        layer: AttentionLayer,
        norm: nn.Module | None,
        rotation: int | None,
        at: int,
        across: bool = False,
    ) -> tuple[list[c.OpStruct], Tensor, dict[str, Any]]:
        """Attention of a layer to its own past, or `across` to a source, whose keys and values are there: the
        operations, of which the first is number `at`; the rows that they leave, heads side by side; and what is done
        to these before the last product."""
        if layer.k_proj is None or layer.v_proj is None or layer.v_norm is not None:
            raise NotLowered("the kernels know no keys and values of other layers, and no norms of values")
        projections = [layer.q_proj] if across else [layer.q_proj, layer.k_proj, layer.v_proj]
        rows = [self.room(name, p.out_features) for name, p in zip("qkv", projections, strict=False)]
        rotated = None if across else self._rotated(layer, rotation)
        products = list(zip(projections, rows, strict=True))
        out = self.room("attended", layer.o_proj.in_features)
        behind, last, act = self._gated(layer, out, products)
        ops = self.products(self.x, products, norm=norm)
        if isinstance(layer, LinearAttention):
            op, summed = sums_of(self, layer, rotated, rows, out)
            self.attention.append(summed)
            return [*ops, op, *behind], last, act
        shared = None if across else self.shared_scores
        scores = [some for some in (shared, layer.score) if some is not None and some.steps]
        call, heads = softmax_call(layer, scores, self.dtype, across=across), layer.heads
        struct = c.HeadsStruct(
            0, 1, heads.query_heads, 0 if across else heads.kv_heads, layer.head_dim, layer.value_dim,
            c.TYPES[self.dtype], *(t.data_ptr() for t in rows), *[None] * (3 - len(rows)),
            *(t.stride(0) for t in rows),
        )  # fmt: skip
        for name, of_heads, side in zip("qk", (layer.q_norm, layer.k_norm), rows, strict=False):
            if of_heads is None:
                continue
            if layer.qk_norm == "rotated":
                raise NotLowered("the kernels norm queries and keys before they rotate them")
            if layer.qk_norm == "all":
                ops.append(self.norm(of_heads, side))
                continue
            if not isinstance(known := self.known(of_heads), RMSNorm):
                raise NotLowered("the kernels norm queries and keys by their mean square alone")
            gain = torch.ones(known.width) if known.gain is None else known.gain
            setattr(struct, f"{name}_gain", address(self.floats(gain)))
            struct.norm, struct.eps = kind_of(known), known.eps
        if rotated is not None:
            rotated.into(struct)
            struct.rotates_values = int(rotated.rotates_values)
        if not across or layer.q_norm is not None:
            self.counted.append(struct)
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
        """What a gate makes of attended rows `out`: the operations behind attention, the rows of the last product, and
        what is done to them before it. Its own product is added to `products`, which are those of the queries.

        A gate for each head multiplies rows in their place; one for each channel is what is multiplied by the rows,
        sigmoid(gate) * out, as a feed-forward's is."""
        if layer.g_proj is None:
            return [], out, {}
        if layer.gate_act != "sigmoid":
            raise NotLowered(f"the kernels know no {layer.gate_act} of an output gate")
        gate = self.room("output gate", layer.g_proj.out_features)
        products.append((layer.g_proj, gate))
        if layer.gate == "head":
            return [self.factors(out, layer.heads.query_heads, gate=gate)], out, {}
        return [], gate, {"act": c.ACTIVATIONS["sigmoid"], "gate": out}

    def _rotated(self, layer: AttentionLayer, rotation: int | None) -> Rotated | None:
        """What a layer rotates by; layers of equal positions share it."""
        if not layer.rotary.rotates:
            return None
        key = len(self.attention) if rotation is None else rotation
        if key not in self.rotations:
            self.rotations[key] = Rotated(layer.rotary, self.dtype)
        return self.rotations[key]


def _alike(scores: Scores) -> object:
    """What steps on scores that are the same share: without tensors their values."""
    return tuple(scores.steps) if not any(step.parameters for step in scores.steps) else id(scores)
