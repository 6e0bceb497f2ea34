"""Three ways to pool heads, side by side on one text. (Ainslie et al. 2023, figure 4.)"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from headway.checkpoints.restore import fill
from headway.models import ModelSpec
from headway.surgery.heads import POOLS, Pool, pool_heads
from headway.surgery.operation import Text

EXPECTED: tuple[Pool, ...] = ("mean", "first", "random")


@dataclass(frozen=True)
class Pooled:
    """Loss right after pooling, without any training: nats per token; `seed` where weights were drawn."""

    pool: Pool
    seed: int | None
    loss: float
    bits_per_byte: float | None


def compare_pools(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    kv_heads: int,
    text: Text,
    context: int,
    *,
    seeds: Iterable[int] = (0, 1, 2),
) -> tuple[Pooled, ...]:
    """Every pool on the same text, in rows of `context` tokens: mean, first, and random once for each of `seeds`."""
    found = []
    for pool in POOLS:
        for seed in seeds if pool == "random" else (None,):
            new, weights = pool_heads(spec, state, kv_heads, pool, seed=seed)
            seen = text.evaluate(fill(new, weights), context)
            found.append(Pooled(pool, seed, seen.loss, seen.bits_per_byte))
    return tuple(found)


def verdict(rows: Sequence[Pooled]) -> str:
    """Whether mean < first < random in loss, for every seed; if not, the order in the table."""
    spans = {pool: [r.loss for r in rows if r.pool == pool] for pool in EXPECTED}
    if all(max(spans[a]) < min(spans[b]) for a, b in pairwise(EXPECTED)):
        return "mean < first < random, for every seed"
    order = sorted(EXPECTED, key=lambda pool: sum(spans[pool]) / len(spans[pool]))
    apart = all(max(spans[a]) < min(spans[b]) for a, b in pairwise(order))
    ranks = " < ".join(order)
    return f"the table says otherwise: {ranks}" + ("" if apart else ", with losses that overlap or are equal")
