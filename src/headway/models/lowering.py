"""A decoder as operations of the native kernels, or the reason why it cannot be: the one place that says so.

Each part of a model is lowered here to operations on rows, and raises `NotLowered` where it is something that the
kernels do not compute. Where the rows' keys and values are kept, and which of them a row sees, is
bound to the operations afterwards (`headway.models.decode_step`).

Legend: R rows, M width, V vocab, H query heads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.attention.call import Call
from headway.models.decoder import Decoder
from headway.models.encoder_decoder import EncoderDecoder
from headway.models.lowerable import check_parts, softmax_call
from headway.models.operations import NotLowered, Operations, address, kind_of
from headway.models.rotated import Rotated
from headway.models.summed import Summed, sums_of
from headway.native import interface as c
from headway.nn.attention import AttentionLayer
from headway.nn.block import Block
from headway.nn.feedforward import FeedForward
from headway.nn.linear import Linear
from headway.nn.linear_attention import LinearAttention
from headway.nn.lora import LowRank
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


class Lowered(Operations):
    """Blocks, last norm and output layer of a decoder, of an encoder-decoder too, as operations on up to 64 rows.

    Raises NotLowered with the reason where the kernels do not compute what the model does.

    Attributes:
        ops: in their order; the last one makes logits.
        x, logits: rows [64, M] that the blocks change, and [64, V].
        attention: where each block attends to its own past.
        across: where each block attends to a source, of an encoder-decoder.
        rotations: cosines and sines of the rows, by the layer that has them first.
        has_magnitudes: whether adapters multiply outputs, so that they cannot be added to some rows alone.
    """

    def __init__(self, model: Decoder | EncoderDecoder) -> None:
        stack = model.stack
        check_parts(model, stack)
        super().__init__(stack.like.dtype)
        self.attention: list[Attends | Summed] = []
        self.across: list[Attends] = []
        self.rotations: dict[int, Rotated] = {}
        self.has_magnitudes = False
        self._gates: dict[str, list[Tensor]] = {}
        self.shared_scores = stack.scores
        self.x, self.logits = self.room("x", model.spec.width), self.room("logits", model.spec.vocab)
        ops: list[c.OpStruct] = []
        for block, rotation in zip(stack.blocks, stack.shared_rotation, strict=True):
            ops += self._block(block, rotation, len(ops))
        if model.head is not None:
            raise NotLowered("the kernels know no dense layer in front of the output layer")
        out = [(model.lm_head, self.logits)]
        ops += self._products(self.x, out, norm=stack.norm, scale=model.spec.logit_scale)
        self.ops = (c.OpStruct * len(ops))(*ops)

    def add_adapters(self, rows: Mapping[str, Tensor]) -> None:
        """Which rows the adapters are added to (`headway.nn.lora.only_rows`): all unless given."""
        for name, gates in self._gates.items():
            for gate in gates:
                if name in rows:
                    gate[: len(rows[name])] = rows[name]
                else:
                    gate.fill_(1)

    def _block(self, block: Block, rotation: int | None, at: int) -> list[c.OpStruct]:
        layer, mlp, across = block.self_attn, block.mlp, block.cross_attn
        if not isinstance(layer, AttentionLayer):
            raise NotLowered(f"the kernels of a step know no {type(layer).__name__}")
        if mlp is not None and not isinstance(mlp, FeedForward):
            raise NotLowered(f"the kernels know no {type(mlp).__name__}")
        first, last, scale = block.input_layernorm, block.before, block.residual_scale
        between, is_post = block.cross_attention_layernorm, block.order == "post"

        def joined(
            rows: Tensor, layer: Linear, norm: nn.Module | None, of_added: nn.Module | None = None, **act: Any
        ) -> list[c.OpStruct]:
            """x += scale * of_added(f(rows) W), and the norm of that."""
            behind = [self.norm(norm, self.x)] if is_post and norm is not None else []
            if of_added is None and scale == 1.0:
                return self._products(rows, [(layer, self.x)], True, **act) + behind
            y = self.room("added", layer.out_features)
            return [
                *self._products(rows, [(layer, y)], **act),
                self.added(self.x, y, of_added, scale),
                *behind,
            ]

        ops, attended, gate = self._attention(layer, None if is_post else first, rotation, at)
        parts: dict[str, list[c.OpStruct]] = {"across": [], "widen": [], "narrow": []}
        parts["mix"] = joined(attended, layer.o_proj, first, block.behind[0], **gate)
        if across is not None:
            begin = at + len(ops) + len(parts["mix"])
            norm = None if is_post else between
            attend, attended, gate = self._attention(across, norm, None, begin, across=True)
            parts["across"] = attend + joined(attended, across.o_proj, between, **gate)
        if mlp is not None:
            norm = first if last is None else last
            parts["widen"], rows, act = self._feed_forward(mlp, None if is_post else norm)
            parts["narrow"] = joined(rows, mlp.down_proj, last, block.behind[1], **act)
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
        projections = [layer.q_proj] if across else [layer.q_proj, layer.k_proj, layer.v_proj]
        rows = [self.room(name, p.out_features) for name, p in zip("qkv", projections, strict=False)]
        rotated = None if across else self._rotated(layer, rotation)
        products = list(zip(projections, rows, strict=True))
        out = self.room("attended", layer.o_proj.in_features)
        behind, last, act = self._gated(layer, out, products)
        ops = self._products(self.x, products, norm=norm)
        if isinstance(layer, LinearAttention):
            q, k, v = rows
            self.attention.append(summed := sums_of(layer, rotated, q, k, v, out))
            self.counted.append(summed.struct)
            return [*ops, self.op(c.SUMS, summed.struct), *behind], last, act
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

    def _feed_forward(
        self, mlp: FeedForward, norm: nn.Module | None
    ) -> tuple[list[c.OpStruct], Tensor, dict[str, Any]]:
        """The operations into the hidden layer, its rows, and what is done to them before the last product."""
        if mlp.act not in c.ACTIVATIONS:
            raise NotLowered(f"the kernels do not know the activation {mlp.act!r}")
        layers = [mlp.up_proj] if mlp.gate_proj is None else [mlp.gate_proj, mlp.up_proj]
        wide = [(layer, self.room(f"hidden {i}", layer.out_features)) for i, layer in enumerate(layers)]
        rows, gate = wide[0][1], wide[1][1] if len(wide) > 1 else None
        act = {"act": c.ACTIVATIONS[mlp.act], "gate": gate}
        return self._products(self.x, wide, norm=norm), rows, act

    def _products(
        self,
        x: Tensor,
        layers: Sequence[tuple[Linear, Tensor]],
        add: bool = False,
        *,
        norm: nn.Module | None = None,
        act: int = 0,
        gate: Tensor | None = None,
        scale: float = 1.0,
    ) -> list[c.OpStruct]:
        """x W^T (+ b) of layers of one x, into their outputs or added to them; times `scale` for an output layer, which
        has no adapters. Adapters are two operations more:
        x A^T is one more matrix beside W, and what B makes of it, times 1 or 0 (`add_adapters`), is added to the
        output. Their magnitudes (DoRA), by which an output is multiplied, are numbers of the rows of W and B:

            x W^T + sum of g (x W^T + s (x A^T) B^T) - x W^T  =  (1 + sum of g - 1) x W^T + sum of g s (x A^T) B^T
        """
        structs: list[c.MatrixStruct] = []
        behind: list[c.OpStruct] = []
        gains = {
            id(part): part.gain(layer.kept).float() for layer, _ in layers for part in _magnitudes(layer)
        }
        self.has_magnitudes |= bool(gains)
        for layer, out in layers:
            if layer.share is not None:
                raise NotLowered("the kernels know no layers that processes share")
            matrix = layer.kept.native()
            if isinstance(matrix, str):
                raise NotLowered(matrix)
            changes = [gains[id(part)] - 1 for part in _magnitudes(layer)]
            factor = 1 + sum(changes[1:], start=changes[0]) if changes else None
            if scale != 1.0:
                factor = scale * (torch.ones(layer.out_features) if factor is None else factor)
            structs.append(self.matrix(matrix, out, layer.bias, factor, add))
        for layer, out in layers:
            for name, part in layer.beside.items():
                low = self.room(f"low {len(structs)}", len(part.lora_A))
                structs.append(self.matrix(part.lora_A.detach().contiguous(), low))
                b = _scaled(part, gains.get(id(part)))
                rows = self._gate(name, len(part.lora_A))
                behind.append(self.product(low, [self.matrix(b, out, add=True)], gate=rows))
        return [self.product(x, structs, norm=norm, act=act, gate=gate), *behind]

    def _gate(self, name: str, rank: int) -> Tensor:
        """1 or 0 for each row: whether an adapter is added to it."""
        gate, gates = self.room(f"rows of {name}", rank), self._gates.setdefault(name, [])
        if not any(known is gate for known in gates):
            gates.append(gate.fill_(1))
        return gate


def _alike(scores: Scores) -> object:
    """What steps on scores that are the same share: without tensors their values."""
    return tuple(scores.steps) if not any(step.parameters for step in scores.steps) else id(scores)


def _magnitudes(layer: Linear) -> list[LowRank]:
    return [part for part in layer.beside.values() if part.lora.magnitude]


def _scaled(part: LowRank, gain: Tensor | None) -> Tensor:
    """s B, or g s B, in a dtype that holds it: that of B where s is a power of two."""
    s = part.lora.scale
    b = s * part.lora_B.detach().float()
    if gain is not None:
        return gain[:, None] * b
    return b.to(part.lora_B.dtype) if math.frexp(s)[0] in (0.5, -0.5) else b
