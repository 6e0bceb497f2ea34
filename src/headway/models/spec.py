"""`ModelSpec`: one frozen value that says all of a model but its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import check_known
from headway.heads import Heads
from headway.models.families import find_family
from headway.models.family import encoder_fields
from headway.models.head import Head
from headway.models.layer_checks import expand_hidden, expand_sparsity
from headway.models.mixers import Softmax
from headway.models.spec_checks import (
    check,
    check_sizes,
    expand_experts,
    expand_mixers,
    expand_patterns,
    mixed_fields,
)
from headway.nn.altup import AltUp
from headway.nn.block import Order
from headway.nn.experts import Experts
from headway.nn.fused import Norm
from headway.nn.gates import Gate
from headway.nn.norms import QKNorm
from headway.patterns import Causal, Pattern
from headway.positions import PositionScheme
from headway.scores import Score, SoftCap


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Every fact about a model but its weights.

    A decoder sees what came before (`causal`), an encoder both sides; a spec with an `encoder` is an
    encoder-decoder, and describes the decoder of the two.

    Attributes:
        family: the architecture that the facts are a case of: a name in `FAMILIES`.
        vocab: rows of the embedding.
        width: M.
        layers: L.
        heads, kv_heads: H and K; K divides H.
        head_dim: D; need not be M / H.
        hidden: F; 0 is layers of attention alone, with neither a feed-forward nor its norm (order "pre" or "post").
        layer_hidden: F of each layer, given as `patterns` are; 0 is `hidden`, None no feed-forward (Nemotron-H).
        patterns: what each layer's queries may see, one per layer; where `causal`, none may look ahead. One
            pattern stands for all layers, a shorter list is repeated when its length divides L.
        positions: how positions are marked.
        causal: False is an encoder.
        encoder: the encoder's spec, whose last states the layers attend to (`Full`, without positions).
        shared_embedding: the encoder looks its ids up in the decoder's embedding.
        head: what is computed from the last states.
        order: where the norms stand: `headway.nn.Block`.
        first_norm: False leaves out the first norm of the first layer (order "pre" or "sandwich").
        residual_scale: factor on what each sub-layer adds to the stream.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm); norm_bias: with a trained bias; norm_weight: with trained weights.
        norm_offset: added to the weights of every norm: 1.0 where weights w multiply as 1 + w.
        norm_eps: added to the mean square, or to the variance, in every norm.
        final_norm: a norm after the last layer.
        embedding_norm: a norm after the embedding.
        embedding_width: columns of the embedding, projected to M where they are others; None is M.
        embedding_scale: factor on embedded ids, before positions are added (sqrt(M): Vaswani et al. 2017, 3.4).
        per_layer_embedding: columns of a further embedding for each layer, added behind its feed-forward
            (`headway.nn.PerLayerInput`; Gemma 4 E2B), 0 is none; per_layer_vocab: its rows, where they are fewer.
        altup: several residual streams, of which a layer computes one (`headway.nn.altup`, Gemma 3n).
        laurel: rank of a product beside attention, in order "pre" or "sandwich"; 0 is none.
        layer_scalar: the output of each layer is times a number of its own, which is not trained here (Gemma 4).
        logit_scale: factor on the states that the output layer is given (M^-0.5 in T5 when tied).
        logit_cap: c of c tanh(logits / c), what logits become; None is no cap.
        token_types: rows of a second table, added to the embedding (BERT's segments); 0 is none.
        qkv_bias, out_bias, mlp_bias, output_bias: biases of the projections and of the output layer.
        qk_norm: a norm on every query and key ("head"), on all heads' together ("all"), or on every one behind its
            rotation ("rotated").
        attention_scale: factor on scores; D^-0.5 unless given.
        sink_logit: a trained logit of each query head stands beside those of the keys, with a value of 0 (gpt-oss).
        gate: attention's output is times a gate of each "head" or "channel", of gate_act "sigmoid" or "softplus".
        score_cap: c of c tanh(scores / c), what scaled scores become; None is no cap.
        global_projections: global tokens have projections of their own (`headway.nn.GlobalAttention`).
        mixers: what each layer mixes tokens with, given as `patterns` are: `Softmax(...)`, which fields from `qkv_bias`
            on describe, and which has sizes of its own, or keys of another layer, where it says so; or another value of
            `MIXERS`, whose layers have the pattern of all that they may see.
        activation: of the feed-forward; a name in `headway.nn.ACTIVATIONS`, or "xielu".
        gated: mlp_scale down(act(mlp_gate_scale gate x) * up x) instead of mlp_scale down(act(up x)).
        mlp_sparsity: share of hidden units that each layer cuts, given as `patterns` are (`headway.nn.FeedForward`).
        experts: those of each layer in place of its feed-forward, or None; one value or a shorter list as in
            `patterns`. Where they leave their hidden width out it is F.
        tied: the output layer is the embedding.
        trained_context: tokens per row in training. Longer rows run, but nothing vouches for them.
        max_context: rows longer than this are refused; None is no limit.
        dropout: probability for embeddings and the output of every sub-layer, in training mode.
        final_dropout: `dropout` falls on the last states, too, behind the last norm (T5).
        pooled_dropout: `dropout` falls in front of a classifier's dense layer, too, and not behind it alone (RoBERTa).
        attention_dropout: probability for attention weights in training mode.
        activation_dropout: probability for the hidden layer of the feed-forward, in training mode.
        init_std: standard deviation of fresh weights.
    """

    family: str
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    patterns: tuple[Pattern, ...]
    positions: PositionScheme
    causal: bool = True
    encoder: ModelSpec | None = None
    shared_embedding: bool = False
    layer_hidden: tuple[int | None, ...] = (0,)
    head: Head = Head()  # noqa: RUF009  (a frozen value)
    order: Order = "pre"
    first_norm: bool = True
    residual_scale: float = 1.0
    norm: Norm = "rms"
    norm_bias: bool = False
    norm_weight: bool = True
    norm_offset: float = 0.0
    norm_eps: float = 1e-6
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    per_layer_embedding: int = 0
    per_layer_vocab: int = 0
    altup: AltUp | None = None
    laurel: int = 0
    layer_scalar: bool = False
    logit_scale: float = 1.0
    logit_cap: float | None = None
    token_types: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    output_bias: bool = False
    qk_norm: QKNorm = "none"
    attention_scale: float | None = None
    sink_logit: bool = False
    gate: Gate | None = None
    gate_act: str = "sigmoid"
    score_cap: float | None = None
    global_projections: bool = False
    mixers: tuple[object, ...] = (Softmax(),)
    activation: str = "silu"
    gated: bool = True
    mlp_gate_scale: float = 1.0
    mlp_scale: float = 1.0
    mlp_sparsity: tuple[float, ...] = (0.0,)
    experts: tuple[Experts | None, ...] = (None,)
    tied: bool = False
    trained_context: int = 2048
    max_context: int | None = None
    dropout: float = 0.0
    final_dropout: bool = False
    pooled_dropout: bool = False
    attention_dropout: float = 0.0
    activation_dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        check_sizes(self)
        object.__setattr__(self, "patterns", expand_patterns(self.patterns, self.layers, self.causal))
        object.__setattr__(self, "experts", expand_experts(self.experts, self.layers, self.hidden))
        object.__setattr__(self, "layer_hidden", expand_hidden(self.layer_hidden, self.layers, self.hidden))
        object.__setattr__(self, "mlp_sparsity", expand_sparsity(self.mlp_sparsity, self.layers))
        object.__setattr__(self, "mixers", expand_mixers(self.mixers, self.layers, self))
        check(self)

    @property
    def kind(self) -> str:
        """The module it is built as: "decoder", "encoder" or "encoder-decoder"."""
        if not self.causal:
            return "encoder"
        return "decoder" if self.encoder is None else "encoder-decoder"

    @property
    def task(self) -> str:
        """The task, as `headway.load` and training name it: "causal-lm", "translation", or that of the head."""
        return {"decoder": "causal-lm", "encoder-decoder": "translation"}.get(self.kind, self.head.task)

    @property
    def layout(self) -> Heads:
        """How query heads share keys and values."""
        return Heads.of(self.heads, self.kv_heads)

    @property
    def layer_positions(self) -> tuple[PositionScheme, ...]:
        """The scheme that acts in each layer."""
        return tuple(self.positions.at(i) for i in range(self.layers))

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that attend by a softmax."""
        return tuple(i for i, mixer in enumerate(self.mixers) if isinstance(mixer, Softmax))

    @property
    def key_layers(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer attends to: its own number, unless `Softmax.kv_from` is given."""
        each = (getattr(mixer, "kv_from", None) for mixer in self.mixers)
        return tuple(i if source is None else source for i, source in enumerate(each))

    @property
    def key_sizes(self) -> tuple[tuple[int, int], ...]:
        """(K, D) of each layer."""
        sources = (self.mixers[source] for source in self.key_layers)
        each = (mixer if isinstance(mixer, Softmax) else Softmax() for mixer in sources)
        return tuple((m.kv_heads or self.kv_heads, m.head_dim or self.head_dim) for m in each)

    def hidden_of(self, layer: int) -> int:
        """F of a layer without experts; 0 where it has no feed-forward."""
        hidden = self.layer_hidden[layer]
        return 0 if hidden is None else hidden or self.hidden

    @property
    def score(self) -> tuple[Score, ...]:
        """Score steps of every layer, beside those that mark positions."""
        return () if self.score_cap is None else (SoftCap(self.score_cap),)

    @property
    def columns(self) -> int:
        """Columns of the embedding."""
        return self.width if self.embedding_width is None else self.embedding_width

    @property
    def context_limit(self) -> int | None:
        """The longest row that can run at all; None is no limit."""
        known = [n for n in (self.max_context, self.positions.limit) if n is not None]
        return min(known, default=None)

    @staticmethod
    def of(family: str, *, patterns: Pattern | Sequence[Pattern] | None = None, **fields: Any) -> ModelSpec:
        """A spec with the usual values of `family` for whatever is not given.

        kv_heads = heads, head_dim = width / heads, patterns = Causal(), positions = Rotary(the family's theta,
        pairing="halves"), unless the family's own defaults say otherwise. Raises ConfigError for an unknown family or
        field.
        """
        kind = find_family(family)
        for name in fields:
            check_known(name, ModelSpec.__dataclass_fields__, "ModelSpec has no field")
        seen = {} if patterns is None else {"patterns": patterns}
        return ModelSpec(family=family, **kind.fields({**fields, **seen}, f"ModelSpec.of({family!r}, ...)"))

    @staticmethod
    def of_pair(family: str, *, encoder: Mapping[str, Any] | None = None, **fields: Any) -> ModelSpec:
        """An encoder-decoder of `family` with one vocab: `of` for both stacks, and one embedding for both.

        `fields` are those of both, as in `of`; `encoder` those that are other in the encoder, whose own vocab means an
        embedding of its own (so does shared_embedding=False). (Vaswani et al. 2017, sections 3.1 and 3.4.)
        """
        first = ModelSpec.of(family, **encoder_fields(fields) | dict(encoder or {}))
        shared = fields.pop("shared_embedding", first.vocab == fields["vocab"])
        return ModelSpec.of(family, encoder=first, shared_embedding=shared, **fields)

    @staticmethod
    def of_depth(
        depth: int,
        vocab: int,
        *,
        context: int = 1024,
        patterns: Pattern | Sequence[Pattern] | None = Causal(),  # noqa: B008  (a frozen value)
        group: int | None = None,
        family: str = "llama",
        **fields: Any,
    ) -> ModelSpec:
        """One dial: a model of `depth` layers of width 64 depth whose other sizes follow (`Family.sizes`). Parameters
        grow with depth^3 (beside the embedding).

        Args:
            vocab: rows of the embedding.
            context: trained context, in tokens.
            patterns: as in `ModelSpec`; None for the family's own.
            group: query heads per kv head; the family's unless given, else 2 where depth is even and 1 elsewhere.
            family: what it is a case of ("ministral", "qwen2" and "qwen3" can be saved with windows by layer).
            fields: other fields of `ModelSpec`, which take precedence.
        """
        usual = find_family(family).sizes(depth, context, group)
        return ModelSpec.of(family, patterns=patterns, vocab=vocab, **{**usual, **fields})

    def with_patterns(self, patterns: Pattern | Sequence[Pattern]) -> ModelSpec:
        """The same model seeing through other patterns; its weights fit unchanged."""
        return replace(self, patterns=expand_patterns(patterns, self.layers, self.causal))

    def with_mixer(self, mixers: object) -> ModelSpec:
        """The same model with other mixers; patterns of layers that are not softmax become what these see, and fields
        that say nothing of any layer their defaults. Weights fit unchanged from softmax to linear attention."""
        return replace(self, **mixed_fields(self, mixers))

    def with_head(self, head: Head) -> ModelSpec:
        """The same encoder for another purpose, or a decoder as an encoder that sees what it did. Where the head has no
        matrix over the vocab there is nothing to tie, and no bias; "masked-lm" ties, as in BERT."""
        vocab = head.needs_vocab
        causal, cap = self.causal and head.task == "lm", self.logit_cap if vocab else None
        return replace(self, head=head, causal=causal, tied=vocab, output_bias=vocab, logit_cap=cap)
