"""What a model is made of, checked: the fields of `ModelSpec`.

Legend: M width, L layers, H query heads, K kv heads, D per head, F width of the feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway.errors import ConfigError, HeadwayError, did_you_mean
from headway.heads import Heads
from headway.models.families import FAMILIES
from headway.models.head import Head
from headway.nn import ACTIVATIONS, NORMS, ORDERS, Norm, Order
from headway.patterns import Causal, Full, Pattern
from headway.positions import Learned, PositionScheme, Rotary

if TYPE_CHECKING:
    from headway.attention.linear_attention import LinearAttentionSpec
    from headway.models.spec import ModelSpec

SIZES = ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "trained_context")


@dataclass(frozen=True, kw_only=True)
class Shape:
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
        hidden: F.
        patterns: what each layer's queries may see, one per layer; where `causal`, none may look ahead. One
            pattern stands for all layers, a shorter list is repeated when its length divides L.
        positions: how positions are marked.
        causal: False is an encoder.
        encoder: the encoder's spec, whose last states the layers attend to (`Full`, without positions).
        shared_embedding: the encoder looks its ids up in the decoder's embedding.
        head: what is computed from the last states.
        order: where the norms stand: `headway.nn.Block`.
        norm: "rms" (RMSNorm) or "layer" (LayerNorm); norm_bias: with a trained bias.
        norm_eps: added to the mean square, or to the variance, in every norm.
        final_norm: a norm after the last layer.
        embedding_norm: a norm after the embedding.
        embedding_width: columns of the embedding, projected to M where they are others; None is M.
        embedding_scale: factor on embedded ids, before positions are added (sqrt(M): Vaswani et al. 2017, 3.4).
        logit_scale: factor on the states that the output layer is given (M^-0.5 in T5 when tied).
        token_types: rows of a second table, added to the embedding (BERT's segments); 0 is none.
        qkv_bias, out_bias, mlp_bias, output_bias: biases of the projections and of the output layer.
        qk_norm: RMSNorm on every query and key.
        attention_scale: factor on scores; D^-0.5 unless given.
        global_projections: global tokens have projections of their own (`headway.nn.GlobalAttention`).
        linear: linear attention instead of softmax, in every layer.
        activation: of the feed-forward; a name in `headway.nn.ACTIVATIONS`.
        gated: down(act(gate x) * up x) instead of down(act(up x)).
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
    head: Head = Head()  # noqa: RUF009  (a frozen value)
    order: Order = "pre"
    norm: Norm = "rms"
    norm_bias: bool = False
    norm_eps: float = 1e-6
    final_norm: bool = True
    embedding_norm: bool = False
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    token_types: int = 0
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    attention_scale: float | None = None
    global_projections: bool = False
    linear: LinearAttentionSpec | None = None
    activation: str = "silu"
    gated: bool = True
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
        if self.family not in FAMILIES:
            raise ConfigError(
                f"ModelSpec: there is no family {self.family!r}{did_you_mean(self.family, FAMILIES)}; "
                f"there are {', '.join(FAMILIES)}"
            )
        optional = [n for n in ("max_context", "embedding_width") if getattr(self, n) is not None]
        for name in (*SIZES, *optional):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"ModelSpec: {name} must be a whole number of at least 1, got {value!r}")
        self.layout  # noqa: B018  (raises when kv_heads does not divide heads)
        object.__setattr__(self, "patterns", expand_patterns(self.patterns, self.layers, self.causal))
        for i, pattern in enumerate(self.patterns):
            if len(pattern.heads) not in (1, self.heads):
                raise ConfigError(
                    f"ModelSpec: the pattern of layer {i} names {len(pattern.heads)} heads, "
                    f"but there are {self.heads}"
                )
        self._check_numbers()
        self._check_choices()
        self._check_positions()
        self._check_roles()

    def _check_numbers(self) -> None:
        for name, low, high in (("norm_eps", 0.0, 1.0), ("init_std", 0.0, math.inf)):
            if not low < getattr(self, name) < high:
                raise ConfigError(
                    f"ModelSpec: {name} must lie between {low} and {high}, got {getattr(self, name)!r}"
                )
        for name in ("embedding_scale", "logit_scale", "attention_scale"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"ModelSpec: {name} must be a number above 0, got {value!r}")
        if type(self.token_types) is not int or self.token_types < 0:
            raise ConfigError(
                f"ModelSpec: token_types counts rows of a table, 0 or more, got {self.token_types!r}"
            )
        for name in ("dropout", "attention_dropout", "activation_dropout"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ConfigError(
                    f"ModelSpec: {name} is a probability from 0 to below 1, got {getattr(self, name)!r}"
                )

    def _check_choices(self) -> None:
        known: dict[str, Sequence[str]] = {"activation": [*ACTIVATIONS], "order": ORDERS, "norm": NORMS}
        for name, choices in known.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"ModelSpec: there is no {name} {value!r}{did_you_mean(str(value), choices)}; "
                    f"there are {', '.join(choices)}"
                )

    def _check_roles(self) -> None:
        task, columns = self.head.task, self.columns
        if self.causal != (task == "lm"):
            role = (
                "decoder predicts what follows (Head('lm'))" if self.causal else "encoder has no Head('lm')"
            )
            raise ConfigError(f"ModelSpec: {'a' if self.causal else 'an'} {role}, got Head({task!r})")
        if self.tied and not self.head.needs_vocab:
            raise ConfigError(
                f"ModelSpec: tied joins output layer and embedding, and Head({task!r}) has none"
            )
        if columns != self.width and task == "lm":
            raise ConfigError(
                f"ModelSpec: an embedding of {columns} columns is for encoders; a decoder's has {self.width}"
            )
        if self.global_projections and (self.causal or self.linear is not None):
            raise ConfigError(
                "ModelSpec: global_projections are for encoders with softmax attention: a decoder's cache keeps "
                "one key per token, and global queries need another"
            )
        if self.linear is not None and any(p != (Causal() if self.causal else Full()) for p in self.patterns):
            raise ConfigError(
                "ModelSpec: linear attention sums over all that is seen, so its patterns are Causal() in a "
                f"decoder and Full() in an encoder, got {', '.join(dict.fromkeys(map(str, self.patterns)))}"
            )
        if self.linear is not None and (self.attention_dropout or self.attention_scale is not None):
            raise ConfigError(
                "ModelSpec: linear attention has no weights to drop and no scores to scale; set attention_dropout=0.0 "
                "and attention_scale=None (`with_linear` does)"
            )
        other = self.encoder
        if other is None:
            if self.shared_embedding:
                raise ConfigError("ModelSpec: shared_embedding is the encoder's, and there is no encoder")
            return
        if not self.causal or other.causal or other.encoder is not None or other.head.task != "states":
            raise ConfigError(
                "ModelSpec: encoder= joins an encoder (causal=False, Head('states'), no encoder of its own) to a "
                "decoder"
            )
        if other.width != self.width:
            raise ConfigError(
                f"ModelSpec: the encoder's width {other.width} must be the decoder's, {self.width}"
            )
        if self.shared_embedding and (other.vocab, other.columns) != (self.vocab, columns):
            raise ConfigError(
                f"ModelSpec: a shared embedding has one size, got {other.vocab} x {other.columns} and "
                f"{self.vocab} x {columns}"
            )

    def _check_positions(self) -> None:
        if not isinstance(self.positions, PositionScheme):
            raise ConfigError(
                "ModelSpec: positions must be a scheme such as Rotary(10000.0, pairing='halves'), "
                f"got {self.positions!r}"
            )
        for positions in self.layer_positions:
            if isinstance(positions, Rotary):
                positions.frequencies(self.head_dim)
        if isinstance(self.positions, Learned) and self.positions.size < self.trained_context:
            raise ConfigError(
                f"ModelSpec: a table of {self.positions.size} positions cannot have been trained on rows of "
                f"{self.trained_context}; lengthen the table, or lower trained_context"
            )

    @property
    def layout(self) -> Heads:
        """How query heads share keys and values."""
        try:
            return Heads.of(self.heads, self.kv_heads)
        except HeadwayError as error:
            raise ConfigError(f"ModelSpec: {error}") from None

    @property
    def layer_positions(self) -> tuple[PositionScheme, ...]:
        """The scheme that acts in each layer."""
        return tuple(self.positions.at(i) for i in range(self.layers))

    @property
    def columns(self) -> int:
        """Columns of the embedding."""
        return self.width if self.embedding_width is None else self.embedding_width

    @property
    def context_limit(self) -> int | None:
        """The longest row that can run at all; None is no limit."""
        table = self.positions.size if isinstance(self.positions, Learned) else None
        known = [n for n in (self.max_context, table) if n is not None]
        return min(known, default=None)


def expand_patterns(
    patterns: Pattern | Sequence[Pattern], layers: int, causal: bool = True
) -> tuple[Pattern, ...]:
    """One pattern per layer: one for all, or a list that is repeated a whole number of times.

    Raises ConfigError when the length does not divide `layers`, or an entry is no pattern, or looks ahead where
    that is not allowed (`causal`)."""
    given = (patterns,) if isinstance(patterns, Pattern) else patterns
    if isinstance(given, str) or not all(isinstance(p, Pattern) for p in given):
        raise ConfigError(
            f"ModelSpec: patterns must be Pattern values such as Causal() or Window.last(512), got {patterns!r}; "
            "text becomes a pattern by headway.patterns.parse"
        )
    if not given or layers % len(given):
        raise ConfigError(
            f"ModelSpec: {len(given)} patterns do not fit {layers} layers; give one for all, one per layer, or "
            f"a list that is repeated (its length must divide {layers})"
        )
    for i, pattern in enumerate(given):
        if causal and not pattern.is_causal:
            raise ConfigError(
                f"ModelSpec: the pattern of layer {i}, {pattern}, lets a token see later ones, which a decoder "
                "must predict; restrict it: Causal() & ..."
            )
    return tuple(given) * (layers // len(given))
