"""Pairs of queries and keys that are removed from attention: those of a head, an edge from one token to another, or
a span of the text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from headway.errors import ConfigError
from headway.nn.attention_layer import AttentionLayer
from headway.nn.mixers import MixingLayer
from headway.patterns import Extent, Pattern, PerHead, Sink
from headway.patterns.leaves import FARTHEST
from headway.tokens import Tokens

Span = tuple[int, int]
"""The tokens first..end - 1."""
ALL: Span = (-1, FARTHEST)


class Cut(NamedTuple):
    """Pairs of a query and a key that are removed from a query head of a layer; None stands for all layers, heads,
    queries or keys.

    layer, head: numbers of the layer and the head.   queries, keys: (first, end) of the tokens, numbered from 0.

    >>> Cut(layer=3, head=1)                               # a head, which then adds nothing
    >>> Cut(layer=3, head=1, queries=(9, 10), keys=(4, 5)) # an edge
    >>> Cut(keys=(4, 9))                                   # a span, which no later token reads
    """

    layer: int | None = None
    head: int | None = None
    queries: Span | None = None
    keys: Span | None = None


@dataclass(frozen=True, repr=False)
class Outside(Pattern):
    """Every pair except those of these queries with these keys; None stands for all of them."""

    queries: Span | None = None
    keys: Span | None = None

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return ~(_within(q.index, self.queries).unsqueeze(-1) & _within(k.index, self.keys).unsqueeze(-2))

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        meets, holds = (_any(q, self.queries, every) & _any(k, self.keys, every) for every in (False, True))
        return ~holds, ~meets


def _within(index: Tensor, span: Span | None) -> Tensor:
    first, end = span or ALL
    return (index >= first) & (index < end)


def _any(tile: Extent, span: Span | None, every: bool) -> Tensor:
    """Returns whether some token of a tile may be in the span or, with `every`, whether all of them are."""
    first, end = span or ALL
    return (tile.lo >= first) & (tile.hi < end) if every else (tile.hi >= first) & (tile.lo < end)


def _left(cut: Cut) -> Pattern:
    """Returns the pattern that remains after a cut; compiled kernels have a primitive for the empty pattern, but
    none for rectangles."""
    return Sink(0) if cut.queries is cut.keys is None else Outside(cut.queries, cut.keys)


def patterns_without(layers: Sequence[MixingLayer], cuts: Sequence[Cut]) -> Mapping[MixingLayer, Pattern]:
    """Returns the new patterns of the layers that lose pairs. Raises ConfigError for a layer, head or span that does
    not exist and for layers without pairs, PatternError for layers that support no pattern but their own (linear
    attention)."""
    patterns: dict[MixingLayer, Pattern] = {}
    for cut in cuts:
        for span in (cut.queries, cut.keys):
            if span is not None and not 0 <= span[0] < span[1] <= FARTHEST:
                raise ConfigError(
                    f"{cut}: a span must be (first, end) with 0 <= first < end <= {FARTHEST}, got {span}"
                )
        if cut.layer is not None and not 0 <= cut.layer < len(layers):
            raise ConfigError(f"{cut}: there is no layer {cut.layer} among 0..{len(layers) - 1}")
        for layer in layers if cut.layer is None else [layers[cut.layer]]:
            if not isinstance(layer, AttentionLayer):
                raise ConfigError(
                    f"{cut}: a {type(layer).__name__} has no attention weights to cut; choose an attention layer"
                )
            heads, kept = layer.heads.query_heads, _left(cut)
            if cut.head is not None and not 0 <= cut.head < heads:
                raise ConfigError(f"{cut}: there is no head {cut.head} among 0..{heads - 1}")
            pattern = patterns.get(layer, layer.pattern)
            if cut.head is not None:
                each = pattern.heads if len(pattern.heads) > 1 else pattern.heads * heads
                patterns[layer] = PerHead(*(p & kept if i == cut.head else p for i, p in enumerate(each)))
            else:
                patterns[layer] = pattern & kept
    return patterns
