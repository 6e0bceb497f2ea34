"""`ModelSpec`: one frozen value that describes a model completely, except for its weights."""

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

    A decoder is causal, an encoder bidirectional; a spec with an `encoder` describes the decoder of an
    encoder-decoder.

    Attributes:
        family: name of the architecture in `FAMILIES`.
        vocab: rows of the embedding.
        width: M.
        layers: L.
        heads, kv_heads: H and K; K divides H.
        head_dim: D; need not be M / H.
        hidden: F; 0: attention-only layers, with neither a feed-forward nor its norm (order "pre" or "post").
        layer_hidden: F of each layer, given like `patterns`; 0 means `hidden`, None no feed-forward (Nemotron-H).
        patterns: the keys that each layer's queries may see, one pattern per layer; if `causal`, none may look ahead.
            One pattern applies to all layers; a shorter list is repeated if its length divides L.
        positions: how positions are encoded.
        causal: False for an encoder.
        encoder: the encoder's spec; the layers cross-attend to its last states (`Full`, without positions).
        shared_embedding: whether the encoder uses the decoder's embedding.
        head: what is computed from the last states.
        order: where the norms are: `headway.nn.Block`.
        first_norm: False omits the first norm of the first layer (order "pre" or "sandwich").
        residual_scale: factor on what each sub-layer adds to the residual stream.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm); norm_bias: with trained biases; norm_weight: with trained weights.
        norm_offset: added to the weights of every norm: 1.0 if weights w multiply as 1 + w.
        norm_eps: added to the mean square, or to the variance, in every norm.
        final_norm: whether there is a norm after the last layer.
        embedding_norm: whether there is a norm after the embedding.
        embedding_width: columns of the embedding, which are projected to M if they differ; None is M.
        embedding_scale: factor on embedded ids, before positions are added (sqrt(M): Vaswani et al. 2017, 3.4).
        per_layer_embedding: columns of a further embedding per layer, added after its feed-forward, 0 for none
            (`headway.nn.PerLayerInput`; Gemma 4 E2B); per_layer_vocab: its rows, if fewer than vocab.
        altup: several residual streams, of which a layer computes one (`headway.nn.altup`, Gemma 3n).
        laurel: rank of a low-rank product beside attention, in order "pre" or "sandwich"; 0 for none.
        layer_scalar: whether each layer's output is multiplied by a scalar, which is not trained here (Gemma 4).
        logit_scale: factor on the states before the output layer (M^-0.5 in T5 if tied).
        logit_cap: c in c tanh(logits / c), which is applied to the logits; None for no cap.
        token_types: rows of a second table, added to the embedding (BERT's segments); 0 for none.
        qkv_bias, out_bias, mlp_bias, output_bias: whether the projections and the output layer have biases.
        qk_norm: norm of queries and keys: per head ("head"), over all heads together ("all"), or per head after the
            rotation ("rotated").
        attention_scale: factor on scores; D^-0.5 if None.
        sink_logit: whether each query head has a trained logit beside those of the keys, with a value of 0 (gpt-oss).
        gate: factor on attention's output per "head" or "channel"; gate_act: its activation, "sigmoid" or "softplus".
        score_cap: c in c tanh(scores / c), which is applied to the scaled scores; None for no cap.
        global_projections: whether global tokens have their own projections (`headway.nn.GlobalAttention`).
        mixers: the token mixer of each layer, given like `patterns`: `Softmax(...)`, which the fields from `qkv_bias`
            on describe, and whose own fields are settings of that layer; or another value of `MIXERS`, whose layers
            have the pattern of everything that they may see.
        activation: of the feed-forward; a name in `headway.nn.ACTIVATIONS`, or "xielu".
        gated: mlp_scale down(act(mlp_gate_scale gate x) * up x) instead of mlp_scale down(act(up x)).
        mlp_sparsity: share of hidden units that each layer cuts, given like `patterns` (`headway.nn.FeedForward`).
        experts: the experts of each layer instead of its feed-forward, or None; given like `patterns`. Their hidden
            width is F if they state none.
        tied: whether the output layer is the embedding.
        trained_context: tokens per row in training. Longer rows run, but without any guarantee.
        max_context: longer rows are refused; None for no limit.
        dropout: probability for embeddings and the output of every sub-layer, in training mode.
        final_dropout: whether `dropout` is also applied to the last states, after the last norm (T5).
        pooled_dropout: whether `dropout` is also applied before, not only after, a classifier's dense layer (RoBERTa).
        attention_dropout: probability for attention weights in training mode.
        activation_dropout: probability for the hidden layer of the feed-forward, in training mode.
        init_std: standard deviation of initial weights.
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
        """The module that the spec is built as: "decoder", "encoder" or "encoder-decoder"."""
        if not self.causal:
            return "encoder"
        return "decoder" if self.encoder is None else "encoder-decoder"

    @property
    def task(self) -> str:
        """The task, as `headway.load` and training name it: "causal-lm", "translation", or that of the head."""
        return {"decoder": "causal-lm", "encoder-decoder": "translation"}.get(self.kind, self.head.task)

    @property
    def layout(self) -> Heads:
        """How query heads share kv heads."""
        return Heads.of(self.heads, self.kv_heads)

    @property
    def layer_positions(self) -> tuple[PositionScheme, ...]:
        """The position scheme of each layer."""
        return tuple(self.positions.at(i) for i in range(self.layers))

    @property
    def softmax_layers(self) -> tuple[int, ...]:
        """The numbers of the layers with softmax attention."""
        return tuple(i for i, mixer in enumerate(self.mixers) if isinstance(mixer, Softmax))

    @property
    def key_layers(self) -> tuple[int, ...]:
        """The layer whose keys and values each layer attends to: its own number, unless `Softmax.kv_from` is given."""
        each = (getattr(mixer, "kv_from", None) for mixer in self.mixers)
        return tuple(i if source is None else source for i, source in enumerate(each))

    @property
    def key_sizes(self) -> tuple[tuple[int, int], ...]:
        """(K, D) of the keys that each layer attends to."""
        sources = (self.mixers[source] for source in self.key_layers)
        each = (mixer if isinstance(mixer, Softmax) else Softmax() for mixer in sources)
        return tuple((m.kv_heads or self.kv_heads, m.head_dim or self.head_dim) for m in each)

    def hidden_of(self, layer: int) -> int:
        """Returns F of a layer without experts; 0 if it has no feed-forward."""
        hidden = self.layer_hidden[layer]
        return 0 if hidden is None else hidden or self.hidden

    @property
    def score(self) -> tuple[Score, ...]:
        """The score steps of every layer, besides those of positions."""
        return () if self.score_cap is None else (SoftCap(self.score_cap),)

    @property
    def columns(self) -> int:
        """The number of columns of the embedding."""
        return self.embedding_width or self.width

    @property
    def context_limit(self) -> int | None:
        """The longest row that can run at all; None for no limit."""
        return min((n for n in (self.max_context, self.positions.limit) if n is not None), default=None)

    @property
    def usual_context(self) -> int:
        """The longest row that was trained and can run."""
        return min(self.trained_context, self.context_limit or self.trained_context)

    @staticmethod
    def of(family: str, *, patterns: Pattern | Sequence[Pattern] | None = None, **fields: Any) -> ModelSpec:
        """Returns a spec with the defaults of `family` for all fields that are not given.

        kv_heads = heads, head_dim = width / heads, patterns = Causal(), positions = Rotary(the family's theta,
        pairing="halves"), unless the family's own defaults say otherwise. Raises ConfigError for an unknown family or
        field."""
        for name in fields:
            check_known(name, ModelSpec.__dataclass_fields__, "ModelSpec has no field")
        fields |= {} if patterns is None else {"patterns": patterns}
        return ModelSpec(
            family=family, **find_family(family).fields(fields, f"ModelSpec.of({family!r}, ...)")
        )

    @staticmethod
    def of_pair(family: str, *, encoder: Mapping[str, Any] | None = None, **fields: Any) -> ModelSpec:
        """Returns an encoder-decoder of `family`: `of` for both stacks, with one vocab and one shared embedding.

        `fields` apply to both stacks, as in `of`; `encoder` overrides them in the encoder, where another vocab implies
        an embedding of its own (as does shared_embedding=False). (Vaswani et al. 2017, sections 3.1 and 3.4.)"""
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
        """Returns a spec of `depth` layers of width 64 depth, from which all other sizes follow (`Family.sizes`). The
        number of parameters grows with depth^3 (besides the embedding).

        Args:
            vocab: rows of the embedding.
            context: trained context, in tokens.
            patterns: as in `ModelSpec`; None for the family's own.
            group: query heads per kv head; if None the family's: 1, or with grouped heads 2 if depth is even.
            family: the architecture ("ministral", "qwen2" and "qwen3" can be saved with windows by layer).
            fields: other fields of `ModelSpec`, which take precedence."""
        usual = find_family(family).sizes(depth, context, group)
        return ModelSpec.of(family, patterns=patterns, vocab=vocab, **{**usual, **fields})

    def with_patterns(self, patterns: Pattern | Sequence[Pattern]) -> ModelSpec:
        """Returns the same model with other patterns; its weights fit unchanged."""
        return replace(self, patterns=expand_patterns(patterns, self.layers, self.causal))

    def with_mixer(self, mixers: object) -> ModelSpec:
        """Returns the same model with other mixers; layers that are not softmax get the patterns of what they see,
        and fields that affect no layer their defaults. Weights fit unchanged from softmax to linear attention."""
        return replace(self, **mixed_fields(self, mixers))

    def with_head(self, head: Head) -> ModelSpec:
        """Returns the same encoder with another head, or a decoder as an encoder with its patterns. Without a matrix
        over the vocab nothing is tied, and there is no output bias; "masked-lm" ties, as in BERT."""
        vocab = head.needs_vocab
        causal, cap = self.causal and head.task == "lm", self.logit_cap if vocab else None
        return replace(self, head=head, causal=causal, tied=vocab, output_bias=vocab, logit_cap=cap)
