"""The base class of all attention layers: projections around a mixer.

Legend: B rows, T queries, S keys, M width of the model, H query heads, K kv heads, D per query and key, E per value.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headway.attention import KeyValues
from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError, check_known
from headway.heads import Heads
from headway.nn.attention_options import check_keys
from headway.nn.gates import Gate, check_gate, gated_heads
from headway.nn.linear import Linear, products
from headway.nn.mixers import Call, Mixer, MixingLayer, SharedKeys
from headway.nn.norms import QK_NORMS, LayerNorm, QKNorm, RMSNorm, normed_heads, split_heads
from headway.nn.positions import RotaryEmbedding, Scores, rotated
from headway.nn.record import Record
from headway.parallel import ContextParallel
from headway.patterns import Pattern
from headway.positions import NoPositions, PositionScheme, Rotation
from headway.scores import Score
from headway.tokens import SlotSelection, Tokens


class AttentionLayer(MixingLayer):
    """Projections to queries, keys and values and back, around a mixer: MHA, GQA or MQA, depending on `kv_heads`.

        q, k, v = x Wq, x Wk, x Wv               per head; then, if configured:
        q, k    = norm(q), norm(k)               one gain of size D for all heads (Qwen3), or over all heads (OLMo 2)
        v       = norm(v)                        of each head, made by `v_norm` (Gemma 4)
        y       = mixer(q, k, v, positions)
        y       = y * act(x Wg)                  a gate for each head, or for each of its E channels
        y       = y Wo

    Parameters: q_proj [H D, M], k_proj [K D, M], v_proj [K E, M], o_proj [M, H E], by default without biases; with
    qk_norm, gains q_norm and k_norm [D], or [H D] and [K D]; with a gate, g_proj [H, M] or [H E, M], without bias; and
    the trained parameters of positions and scores. A mixer with projections for global tokens adds q_global_proj,
    k_global_proj and v_global_proj, of the same shapes as the first three and with biases if those have them. The
    pattern changes none of these parameters.

    Args:
        mixer: computes the result of a query from keys and values.
        width: M.
        heads, kv_heads: H and K; K must divide H, and is H by default.
        head_dim, value_dim: D (by default M / H) and E (by default D).
        positions: schemes that mark queries and keys, or scores, act here; the others act elsewhere.
        qkv_bias, out_bias: whether the projections have biases.
        qk_norm: norms on queries and keys, made by `norm` of a width: "head" on each head, "all" on all heads of a
            token together, "rotated" on each head after its rotation.
        v_norm: makes the norm of each head's values.
        tied_values: values are the keys, x Wk, before their norm and rotation; there is no v_proj (Gemma 4's "K = V").
        kv_from: an earlier layer whose keys and values this layer attends to instead of its own (`shared` of
            `forward`); this layer has no k_proj, no v_proj and no norms of them, and must have the same kv_heads,
            head_dim and value_dim (Sun et al. 2024, "You Only Cache Once"; Gemma 3n).
        score: as in `attend`. Tensors of a score are part of the module: trained if they are an `nn.Parameter`, moved
            and saved with it in any case.
        gate: "head" or "channel": attention's output is multiplied by a gate computed from the layer's input, one for
            each head or one for each channel of a head (Qiu et al. 2025, "Gated Attention for Large Language Models").
        gate_act: "sigmoid" (Qwen3-Next), or "softplus" (Laguna).
        dropout: probability for attention weights, after the softmax; only in training mode.
        output_dropout: probability for the output, after Wo; only in training mode.

    Raises:
        HeadwayError: for kv_from with other kv_heads, head_dim or value_dim, or with v_norm or tied_values; for
            tied_values if E differs from D; if K does not divide H; if D is odd and positions rotate; if M is not a
            multiple of H and head_dim is None; for anything the mixer does not support.
    """

    rotary: RotaryEmbedding
    kv_from: MixingLayer | None

    def __init__(
        self,
        mixer: Mixer,
        width: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        head_dim: int | None = None,
        value_dim: int | None = None,
        positions: PositionScheme = NoPositions(),  # noqa: B008  (a frozen value)
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: QKNorm = "none",
        norm: Callable[[int], RMSNorm | LayerNorm] = RMSNorm,
        v_norm: Callable[[int], RMSNorm | LayerNorm] | None = None,
        tied_values: bool = False,
        kv_from: MixingLayer | None = None,
        score: Score | Sequence[Score] = (),
        gate: Gate | None = None,
        gate_act: str = "sigmoid",
        dropout: float = 0.0,
        output_dropout: float = 0.0,
    ) -> None:
        super().__init__()
        name = type(self).__name__
        scores = (score,) if isinstance(score, Score) else tuple(score)
        mixer.check(positions, scores, dropout, qk_norm)
        self.mixer, self.heads = mixer, Heads.of(heads, kv_heads)
        if head_dim is None and width % heads:
            raise ConfigError(
                f"{name}: width {width} is not a multiple of {heads} heads; give head_dim, the size of one head"
            )
        for what, p in (("dropout", dropout), ("output_dropout", output_dropout)):
            if not 0.0 <= p < 1.0:
                raise ConfigError(f"{name}: {what} must be a probability from 0 to below 1, got {p}")
        self.width, self.dropout = width, dropout
        self.head_dim = width // heads if head_dim is None else head_dim
        self.value_dim = self.head_dim if value_dim is None else value_dim
        if self.head_dim < 1 or self.value_dim < 1:
            raise ConfigError(
                f"{name}: head_dim and value_dim must be at least 1, got {self.head_dim} and {self.value_dim}"
            )
        check_gate(name, gate, gate_act)
        d, e, shared = self.head_dim, self.value_dim, self.heads.kv_heads
        self.rotary = RotaryEmbedding(positions, d)
        self.q_proj = Linear(width, heads * d, bias=qkv_bias)
        check_keys(self, kv_from, tied_values, v_norm is not None)
        # Set past nn.Module, which would register the other layer as a child, and its parameters as this layer's.
        self.__dict__["kv_from"] = kv_from
        own_keys, own_values = kv_from is None, kv_from is None and not tied_values
        self.k_proj = Linear(width, shared * d, bias=qkv_bias) if own_keys else None
        self.v_proj = Linear(width, shared * e, bias=qkv_bias) if own_values else None
        self.gate, self.gate_act = gate, gate_act
        gates = heads * (1 if gate == "head" else e)
        self.g_proj = None if gate is None else Linear(width, gates, bias=False)
        self.o_proj = Linear(heads * e, width, bias=out_bias)
        check_known(qk_norm, QK_NORMS, f"{name}: there is no qk_norm")
        self.qk_norm = qk_norm
        sizes = [d * (n if qk_norm == "all" else 1) for n in (heads, shared)]
        self.q_norm, self.k_norm = (
            norm(size) if qk_norm != "none" and has_norm else None
            for size, has_norm in zip(sizes, (True, own_keys), strict=True)
        )
        self.v_norm = None if v_norm is None else v_norm(e)
        self.drop_output = nn.Dropout(output_dropout)
        self.score = Scores((*positions.scores(heads, d, not mixer.pattern.is_causal), *scores))
        second = mixer.global_projections
        self.q_global_proj = Linear(width, heads * d, bias=qkv_bias) if second else None
        self.k_global_proj = Linear(width, shared * d, bias=qkv_bias) if second else None
        self.v_global_proj = Linear(width, shared * e, bias=qkv_bias) if second else None
        self.sink_logit: nn.Parameter | None = None

    @property
    def pattern(self) -> Pattern:
        """The pattern of the mixer: which keys each query may see."""
        return self.mixer.pattern

    @property
    def positions(self) -> PositionScheme:
        return self.rotary.positions

    def forward(
        self,
        x_BTM: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: LayerCache | None = None,
        memory: Tensor | KeyValues | None = None,
        memory_tokens: Tokens | None = None,
        rotation: Rotation | None = None,
        score: Sequence[Score] = (),
        context: ContextParallel | None = None,
        selected: SlotSelection | None = None,
        record: Record | None = None,
        shared: SharedKeys | None = None,
    ) -> Tensor:
        """Computes the layer: [B, T, M] -> [B, T, M], or [B, N, M] for N selected slots.

        Args:
            x_BTM: the input of queries, and of keys and values unless `memory` is given.
            tokens: the tokens of x; with a cache, those of its `begin`; by default rows are numbered from 0.
            cache: the past, as one layer of a `PagedCache`; the tokens of the step are added to it, and queries see
                both.
            memory: [B, S, M], the input of keys and values: cross-attention (pattern `Full`, or global tokens; no
                positions, no cache). Or `keys(memory)`, which can be reused at every step.
            memory_tokens: the tokens of memory; by default every slot is one.
            rotation: `rotary(...)` of these tokens, computed once for several layers.
            score: steps that several layers share, applied before this layer's own.
            context: the rows that x is this rank's shard of, with their tokens; queries see the keys of all ranks.
            selected: the slots whose results are computed; keys and values are those of all slots. Not with memory.
            record: receives the inputs of attention, and may replace the pattern.
            shared: layers whose keys and values other layers attend to by `kv_from`; if this layer is one of them, it
                stores its keys and values here.
        Raises ConfigError if arguments do not fit together, and for anything the mixer does not support, with the
        reason.
        """
        name = type(self).__name__
        if x_BTM.dim() != 3 or x_BTM.shape[-1] != self.width:
            raise ConfigError(f"{name}: x must be [batch, tokens, {self.width}], got {list(x_BTM.shape)}")
        if rotation is not None and (memory is not None or not self.rotary.rotates):
            what = "memory is given" if memory is not None else f"positions are {self.positions}"
            raise ConfigError(f"{name}: rotation is given, but {what}, so nothing is rotated; drop rotation=")
        if memory is None and memory_tokens is not None:
            raise ConfigError(f"{name}: memory_tokens needs memory=")
        if memory is not None and cache is not None:
            raise ConfigError(
                f"{name}: cross-attention takes no cache, because memory is passed whole; drop cache="
            )
        if context is not None:
            tokens = context.own(tokens, cache, memory)
        if tokens is None:
            if cache is not None:
                raise ConfigError(f"{name}: cache= needs tokens=, which its begin() returns")
            tokens = Tokens.range(x_BTM.shape[1], device=x_BTM.device)
        if memory is not None:
            memory = self._memory_keys(memory, memory_tokens, x_BTM.shape[0])
        elif rotation is None and self.rotary.rotates:
            rotation = self.rotary(tokens, x_BTM.dtype, whole=None if context is None else context.whole)
        mixer: Any = self.mixer
        if record is not None and self in record.patterns:
            mixer = replace(mixer, pattern=record.patterns[self])
        out_BHTE = mixer.attend(
            self, x_BTM, Call(tokens, cache, memory, rotation, score, context, selected, record, shared)
        )
        out = out_BHTE.transpose(1, 2).flatten(2)
        if self.g_proj is not None:
            gate = self.g_proj(x_BTM if selected is None else selected.take(x_BTM))
            out = gated_heads(gate, out, self.gate_act)
        y_BTM: Tensor = self.o_proj(out)
        return self.drop_output(y_BTM) if self.training else y_BTM

    def projected(
        self, x: Tensor, names: str = "qkv", of_global: bool = False, rotation: Rotation | None = None
    ) -> list[Tensor]:
        """Returns the projections of x [B, T, M] named by `names`, sharing work between the products: q [B, H, T, D]
        and k [B, K, T, D], normed and rotated by `rotation`, and v [B, K, T, E]. With `of_global`, by the
        projections of global tokens."""
        layers = {n: getattr(self, f"{n}_global_proj" if of_global else f"{n}_proj") for n in names}
        norms = {"q": self.q_norm, "k": self.k_norm}
        late = norms if self.qk_norm == "rotated" else {}
        first = {"v": self.v_norm} if late else {**norms, "v": self.v_norm}
        present = {n: layer for n, layer in layers.items() if layer is not None}
        outputs = dict(zip(present, products(x, [*present.values()]), strict=True))
        outputs = {n: outputs[n if n in outputs else "k"] for n in names}  # tied values are keys
        heads = [
            split_heads(y, self.value_dim if n == "v" else self.head_dim, first.get(n))
            for n, y in outputs.items()
        ]
        heads = heads if rotation is None else rotated(rotation, *heads)
        return [normed_heads(y, late.get(n)) for n, y in zip(names, heads, strict=True)]

    def keys(self, memory: Tensor, memory_tokens: Tokens | None = None) -> KeyValues:
        """Returns keys and values of an encoder's states [B, S, M], to be computed once for all steps of a decoder."""
        if memory.dim() != 3 or memory.shape[-1] != self.width:
            raise ConfigError(
                f"{type(self).__name__}: memory must be [batch, keys, {self.width}], got {list(memory.shape)}"
            )
        k, v = self.projected(memory, "kv")
        return KeyValues(k, v, memory_tokens or Tokens.range(memory.shape[1], device=memory.device))

    def _memory_keys(self, memory: Tensor | KeyValues, tokens: Tokens | None, rows: int) -> KeyValues:
        name = type(self).__name__
        if self.pattern.reach != (None, None) or self.positions.marks in ("queries and keys", "scores"):
            raise ConfigError(
                f"{name}: positions of x and memory are not comparable, so cross-attention needs pattern=Full() (or "
                f"global tokens) and no rotary positions or marks on scores; got {self.pattern} and {self.positions}"
            )
        if self.kv_from is not None:
            raise ConfigError(f"{name}: keys and values come from another layer (kv_from); drop memory=")
        if isinstance(memory, Tensor):
            memory = self.keys(memory, tokens)
        elif tokens is not None:
            raise ConfigError(f"{name}: memory is KeyValues, which hold their tokens; drop memory_tokens=")
        if memory.k.shape[0] != rows:
            raise ConfigError(f"{name}: memory has {memory.k.shape[0]} rows, x has {rows}")
        return memory

    def extra_repr(self) -> str:
        return f"{self.heads.kind} {self.heads.query_heads}/{self.heads.kv_heads}, {self.mixer}"
