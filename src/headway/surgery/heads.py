"""Fewer key/value heads: MHA to GQA to MQA, and three ways to pool them side by side. (Ainslie et al. 2023, "GQA",
section 2.1 and figure 4.)

Legend: M width, H query heads, K kv heads before and g after, n = K / g heads that become one, D per head.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from headway.checkpoints.heads import check_uniform, counts_heads
from headway.checkpoints.restore import fill
from headway.errors import CheckpointError, ConfigError, check_known
from headway.models import ModelSpec
from headway.surgery.operation import Text

Pool = Literal["mean", "first", "random"]
POOLS: Mapping[Pool, str] = MappingProxyType(
    {
        "mean": "keeps what the heads of a group have in common",
        "first": "keeps one head of each group as it is and drops the others",
        "random": "drops all heads for fresh weights: the baseline that knows nothing",
    }
)
_PROJECTION = re.compile(r"\.[kv]_proj\.(weight|bias)$")


def pool_heads(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    kv_heads: int,
    pool: Pool = "mean",
    *,
    seed: int | None = None,
) -> tuple[ModelSpec, dict[str, Tensor]]:
    """The model with g = `kv_heads` heads of keys and values, one for each group of n = K / g that it had.

        mean     W'_j = (W_(jn) + ... + W_(jn+n-1)) / n        [D, M], the same for biases [D]
        first    W'_j = W_(jn)
        random   W'_j normal with the spec's init_std, biases 0: as a model begins

    An encoder beside a decoder is left as it is: it reads all tokens at once, and its keys are not what decoding reads
    (section 2.2). Groups are neighbours, so query head h, which read head h // (H / K), reads the one that this head
    went into. Where the heads of a group are equal, mean and first leave the function as it is.

    The mean of keys is the key of the mean: every head is turned by the same rotation R_p, which is linear, so
    R_p W_1 x + R_p W_2 x = R_p (W_1 + W_2) x, whatever the pairing. A gain of normed keys [D] serves all heads, and
    is kept; keys are then normed after pooling, so a mean that is short is brought back to length, in values not.

    Sums are float32 (float64 for float64 weights), rounded once to the weights' dtype.

    Raises:
        ConfigError: g does not divide K; an unknown pool; a seed where nothing is drawn.
        CheckpointError: a projection without K heads, or layers with kv heads of their own.
    """
    check_uniform(spec, "pool_heads")
    before = spec.kv_heads
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int) or kv_heads < 1 or before % kv_heads:
        fit = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0)
        raise ConfigError(
            f"pool_heads: {before} key/value heads cannot become {kv_heads!r}: groups have equal sizes, so the number "
            f"must be one of {fit}"
        )
    check_known(pool, POOLS, "pool_heads: there is no pool")
    if seed is not None and pool != "random":
        raise ConfigError(f"pool_heads: a seed is for pool 'random'; {pool!r} draws nothing")
    noise = torch.Generator().manual_seed(0 if seed is None else seed)
    changed = dict(state)
    for name, heads in _projections(spec, state).items():
        grouped = heads.unflatten(0, (kv_heads, before // kv_heads))
        if pool == "mean":
            new = grouped.mean(1)
        elif pool == "first":
            new = grouped[:, 0]
        else:
            std = 0.0 if name.endswith(".bias") else spec.init_std
            new = torch.zeros(grouped[:, 0].shape).normal_(0.0, std, generator=noise)
        changed[name] = new.flatten(0, 1).to(state[name].dtype, copy=True)
    return replace(spec, kv_heads=kv_heads), changed


def kept_by_mean(spec: ModelSpec, state: Mapping[str, Tensor], kv_heads: int) -> float:
    """The share of the squared key and value weights that the groups' means keep: n |mean|^2 / sum |W_j|^2.

    1 where the heads of every group are equal, 1 / n where they have nothing in common (orthogonal, of one size), less
    where they oppose each other."""
    kept = total = 0.0
    for heads in _projections(spec, state).values():
        grouped = heads.unflatten(0, (kv_heads, spec.kv_heads // kv_heads)).double()
        kept += float(grouped.mean(1).square().sum()) * grouped.shape[1]
        total += float(grouped.square().sum())
    return kept / total if total else 1.0


def _projections(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights [K, D, M] and biases [K, D] of keys and values, head by head, in float32 or float64."""
    heads = {}
    for name in state:
        if not (_PROJECTION.search(name) and counts_heads(spec, name)):
            continue
        rows = state[name].shape[0]
        if rows != spec.kv_heads * spec.head_dim:
            raise CheckpointError(
                f"pool_heads: {name} has {rows} rows, but {spec.kv_heads} heads of {spec.head_dim} are "
                f"{spec.kv_heads * spec.head_dim}: these are not the weights of the spec"
            )
        wide = torch.promote_types(state[name].dtype, torch.float32)
        heads[name] = state[name].to(wide).unflatten(0, (spec.kv_heads, spec.head_dim))
    return heads


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
    rows = []
    for pool in POOLS:
        for seed in seeds if pool == "random" else (None,):
            new, weights = pool_heads(spec, state, kv_heads, pool, seed=seed)
            seen = text.evaluate(fill(new, weights), context)
            rows.append(Pooled(pool, seed, seen.loss, seen.bits_per_byte))
    return tuple(rows)


def verdict(rows: Sequence[Pooled]) -> str:
    """Whether mean < first < random in loss, for every seed; if not, the order in the table."""
    spans = {pool: [r.loss for r in rows if r.pool == pool] for pool in POOLS}
    if all(max(spans[a]) < min(spans[b]) for a, b in pairwise(POOLS)):
        return "mean < first < random, for every seed"
    order = sorted(POOLS, key=lambda pool: sum(spans[pool]) / len(spans[pool]))
    apart = all(max(spans[a]) < min(spans[b]) for a, b in pairwise(order))
    ranks = " < ".join(order)
    return f"the table says otherwise: {ranks}" + ("" if apart else ", with losses that overlap or are equal")
