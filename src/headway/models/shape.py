"""What a decoder is made of, checked: the fields of `ModelSpec`.

Legend: M width, L layers, H query heads, K kv heads, D per head, F width of the feed-forward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headway.errors import ConfigError, HeadwayError, did_you_mean
from headway.heads import Heads
from headway.models.families import FAMILIES
from headway.nn import ACTIVATIONS
from headway.patterns import Pattern
from headway.positions import Learned, PositionScheme, Rotary


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Every fact about a decoder but its weights.

    Attributes:
        family: the architecture that the facts are a case of: a name in `FAMILIES`.
        vocab: rows of the embedding.
        width: M.
        layers: L.
        heads, kv_heads: H and K; K divides H.
        head_dim: D; need not be M / H.
        hidden: F.
        patterns: what each layer's queries may see, one per layer; all must be causal. One pattern stands
            for all layers, a shorter list is repeated when its length divides L.
        positions: how positions are marked.
        norm_eps: added to the mean square in every norm.
        qkv_bias, out_bias, mlp_bias: biases of the projections.
        qk_norm: RMSNorm on every query and key.
        activation: of the feed-forward's gate; a name in `headway.nn.ACTIVATIONS`.
        tied: the output layer is the embedding.
        trained_context: tokens per row in training. Longer rows run, but nothing vouches for them.
        max_context: rows longer than this are refused; None is no limit.
        attention_dropout: probability for attention weights in training mode.
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
    norm_eps: float = 1e-6
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    tied: bool = False
    trained_context: int = 2048
    max_context: int | None = None
    attention_dropout: float = 0.0
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ConfigError(
                f"ModelSpec: there is no family {self.family!r}{did_you_mean(self.family, FAMILIES)}; "
                f"there are {', '.join(FAMILIES)}"
            )
        sizes = ["vocab", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "trained_context"]
        for name in sizes + (["max_context"] if self.max_context is not None else []):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"ModelSpec: {name} must be a whole number of at least 1, got {value!r}")
        self.layout  # noqa: B018  (raises when kv_heads does not divide heads)
        object.__setattr__(self, "patterns", expand_patterns(self.patterns, self.layers))
        for i, pattern in enumerate(self.patterns):
            if len(pattern.heads) not in (1, self.heads):
                raise ConfigError(
                    f"ModelSpec: the pattern of layer {i} names {len(pattern.heads)} heads, "
                    f"but there are {self.heads}"
                )
        for name, low, high in (("norm_eps", 0.0, 1.0), ("init_std", 0.0, math.inf)):
            if not low < getattr(self, name) < high:
                raise ConfigError(
                    f"ModelSpec: {name} must lie between {low} and {high}, got {getattr(self, name)!r}"
                )
        if not 0.0 <= self.attention_dropout < 1.0:
            raise ConfigError(
                "ModelSpec: attention_dropout is a probability from 0 to below 1, "
                f"got {self.attention_dropout!r}"
            )
        if self.activation not in ACTIVATIONS:
            raise ConfigError(
                f"ModelSpec: there is no activation {self.activation!r}"
                f"{did_you_mean(self.activation, ACTIVATIONS)}; there are {', '.join(ACTIVATIONS)}"
            )
        self._check_positions()

    def _check_positions(self) -> None:
        if not isinstance(self.positions, PositionScheme):
            raise ConfigError(
                "ModelSpec: positions must be a scheme such as Rotary(10000.0, pairing='halves'), "
                f"got {self.positions!r}"
            )
        if isinstance(self.positions, Rotary):
            self.positions.frequencies(self.head_dim)
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
    def context_limit(self) -> int | None:
        """The longest row that can run at all; None is no limit."""
        table = self.positions.size if isinstance(self.positions, Learned) else None
        known = [n for n in (self.max_context, table) if n is not None]
        return min(known, default=None)


def expand_patterns(patterns: Pattern | Sequence[Pattern], layers: int) -> tuple[Pattern, ...]:
    """One pattern per layer: one for all, or a list that is repeated a whole number of times.

    Raises ConfigError when the length does not divide `layers`, or an entry is no pattern or looks ahead."""
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
        if not pattern.is_causal:
            raise ConfigError(
                f"ModelSpec: the pattern of layer {i}, {pattern}, lets a token see later ones, which a decoder "
                "must predict; restrict it: Causal() & ..."
            )
    return tuple(given) * (layers // len(given))
