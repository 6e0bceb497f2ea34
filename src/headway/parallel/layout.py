"""Which slots of a row each rank has, and the choice of a layout for the patterns of a model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.choice import Choice
from headway.errors import ConfigError
from headway.parallel.plan import ContextPlan
from headway.patterns import Pattern
from headway.tokens import Tokens

GAIN = 1.1
"""Factor by which the zig-zag layout, which sends more keys under windows, must reduce the busiest rank's work to be
chosen."""


@dataclass(frozen=True)
class ShardLayout:
    """`runs[r]`: the slots (begin, end) of a row of `count` slots that rank r has, in its order. Every slot belongs to
    one rank."""

    count: int
    runs: tuple[tuple[tuple[int, int], ...], ...]

    @staticmethod
    def contiguous(count: int, ranks: int) -> "ShardLayout":
        """Gives rank r chunk r of R. Windows then reach into neighbouring ranks only."""
        return _of_chunks(count, [[r] for r in range(ranks)])

    @staticmethod
    def zigzag(count: int, ranks: int) -> "ShardLayout":
        """Gives rank r chunks r and 2 R - 1 - r of 2 R. Under Causal() every rank then computes equally many pairs.
        (Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2.)"""
        return _of_chunks(count, [[r, 2 * ranks - 1 - r] for r in range(ranks)])

    @property
    def ranks(self) -> int:
        return len(self.runs)

    def take(self, t: Tensor, rank: int, dim: int = 1) -> Tensor:
        """Returns the slots of a rank, of a tensor that has all of them along `dim`."""
        return torch.cat([t.narrow(dim, begin, end - begin) for begin, end in self.runs[rank]], dim)

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """Joins the parts that `take` returns, given in the order of ranks, in the order of slots."""
        pieces = [
            (begin, piece)
            for part, runs in zip(parts, self.runs, strict=True)
            for (begin, _), piece in zip(runs, part.split([e - b for b, e in runs], dim), strict=True)
        ]
        return torch.cat([piece for _, piece in sorted(pieces, key=lambda pair: pair[0])], dim)

    def shards(self, tokens: Tokens) -> tuple[Tokens, ...]:
        """Returns the tokens of each rank."""
        if tokens.count != self.count:
            raise ConfigError(
                f"ShardLayout: the layout is for rows of {self.count} slots, but tokens describe {tokens.count}; "
                "make a layout for these rows"
            )
        return tuple(Tokens.cat([tokens.slice(*run) for run in runs]) for runs in self.runs)


def _of_chunks(count: int, owned: Sequence[Sequence[int]]) -> ShardLayout:
    chunks = sum(map(len, owned))
    if not 0 < chunks <= count:
        raise ConfigError(
            f"ShardLayout: a row of {count} slots cannot be cut into {chunks} chunks for {len(owned)} ranks; "
            "use fewer ranks, or longer rows"
        )
    edges = [count * chunk // chunks for chunk in range(chunks + 1)]
    return ShardLayout(count, tuple(tuple((edges[c], edges[c + 1]) for c in part) for part in owned))


def choose_layout(patterns: Sequence[Pattern], tokens: Tokens, ranks: int) -> tuple[ShardLayout, Choice]:
    """Returns the layout of these rows for layers of these patterns, and why: contiguous, unless the zig-zag reduces
    the busiest rank's work."""
    contiguous_layout = ShardLayout.contiguous(tokens.count, ranks)
    zigzag_layout = (
        ShardLayout.zigzag(tokens.count, ranks) if tokens.count >= 2 * ranks else contiguous_layout
    )
    (pairs, keys), (zigzag_pairs, zigzag_keys) = (
        _cost(layout, patterns, tokens) for layout in (contiguous_layout, zigzag_layout)
    )
    contiguous, zigzag = _sentence(pairs, keys), _sentence(zigzag_pairs, zigzag_keys)
    if max(zigzag_pairs) * GAIN < max(pairs):
        return zigzag_layout, Choice("zigzag", zigzag, rejected=(("contiguous", contiguous),))
    return contiguous_layout, Choice("contiguous", contiguous, rejected=(("zigzag", zigzag),))


def _cost(layout: ShardLayout, patterns: Sequence[Pattern], tokens: Tokens) -> tuple[list[float], int]:
    """Returns the pairs that each rank computes, over all layers for a mean head, and the keys that are read from other
    ranks."""
    plans, ranks = head_plans(patterns, layout.shards(tokens)), range(layout.ranks)
    pairs = [sum(plan.pairs(rank) * layers / heads for plan, layers, heads in plans) for rank in ranks]
    read = sum(layers / heads * sum(map(plan.keys_read, ranks)) for plan, layers, heads in plans)
    return pairs, round(read)


def head_plans(patterns: Sequence[Pattern], shards: Sequence[Tokens]) -> list[tuple[ContextPlan, int, int]]:
    """Returns the plan of every head's pattern, the number of layers that have it, and the number of head patterns
    there."""
    return [
        (ContextPlan.of(head, shards), layers, len(pattern.heads))
        for pattern, layers in Counter(patterns).items()
        for head in pattern.heads
    ]


def _sentence(work: Sequence[float], read: int) -> str:
    busy = max(work) * len(work) / max(1.0, sum(work))
    return f"its busiest rank computes {busy:.2f} times the mean, and {read} keys are read from other ranks"
