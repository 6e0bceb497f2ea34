"""Reduces key/value heads, from MHA to GQA to MQA, and compares three ways to pool them (Ainslie et al. 2023, "GQA",
section 2.1 and figure 4).

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
    """Returns the model with g = `kv_heads` kv heads, one for each group of n = K / g former heads.

        mean     W'_j = (W_(jn) + ... + W_(jn+n-1)) / n        [D, M], the same for biases [D]
        first    W'_j = W_(jn)
        random   W'_j normal with the spec's init_std, biases 0, as in a fresh model

    The encoder of an encoder-decoder is left unchanged: it reads all tokens at once, and decoding does not read its
    keys (section 2.2). Groups are neighbouring heads, so query head h, which read head h // (H / K), reads the head
    that this one was pooled into. If the heads of a group are equal, mean and first do not change the function.

    The mean of keys is the key of the mean: every head is rotated by the same R_p, which is linear, so
    R_p W_1 x + R_p W_2 x = R_p (W_1 + W_2) x, whatever the pairing. The weights of a key norm [D] are shared by all
    heads and kept; keys are then normed after pooling, so a short mean is brought back to length; values are not.

    Sums are in float32 (float64 for float64 weights), rounded once to the weights' dtype.

    Raises:
        ConfigError: g does not divide K; an unknown pool; a seed for a pool without randomness.
        CheckpointError: a projection without K heads, or layers with kv heads of their own.
    """
    check_uniform(spec, "pool_heads")
    _check_groups(spec, kv_heads, "pool_heads")
    before = spec.kv_heads
    check_known(pool, POOLS, "pool_heads: there is no pool")
    if seed is not None and pool != "random":
        raise ConfigError(f"pool_heads: seed is only for pool 'random', got pool {pool!r}")
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


def _check_groups(spec: ModelSpec, kv_heads: object, caller: str) -> None:
    before = spec.kv_heads
    if isinstance(kv_heads, bool) or not isinstance(kv_heads, int) or kv_heads < 1 or before % kv_heads:
        fit = ", ".join(str(n) for n in range(1, before + 1) if before % n == 0)
        raise ConfigError(
            f"{caller}: {before} key/value heads cannot become {kv_heads!r}: groups have equal sizes, so the number "
            f"must be one of {fit}"
        )


def kept_by_mean(spec: ModelSpec, state: Mapping[str, Tensor], kv_heads: int) -> float:
    """Returns the share of the squared key and value weights that the groups' means retain: n |mean|^2 / sum |W_j|^2.

    It is 1 if the heads of every group are equal, 1 / n if they are orthogonal and of equal norm, and less if they
    oppose each other. Raises ConfigError if `kv_heads` does not divide K."""
    _check_groups(spec, kv_heads, "kept_by_mean")
    kept = total = 0.0
    for heads in _projections(spec, state).values():
        grouped = heads.unflatten(0, (kv_heads, spec.kv_heads // kv_heads)).double()
        kept += float(grouped.mean(1).square().sum()) * grouped.shape[1]
        total += float(grouped.square().sum())
    return kept / total if total else 1.0


def _projections(spec: ModelSpec, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns weights [K, D, M] and biases [K, D] of the key and value projections by head, in float32 or float64."""
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
    """The loss right after pooling, without training: in nats per token; `seed` is None for pools without
    randomness."""

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
    """Returns the loss of every pool on the same text, in rows of `context` tokens: mean, first, and random once
    per seed."""
    rows = []
    for pool in POOLS:
        for seed in seeds if pool == "random" else (None,):
            new, weights = pool_heads(spec, state, kv_heads, pool, seed=seed)
            evaluation = text.evaluate(fill(new, weights), context)
            rows.append(Pooled(pool, seed, evaluation.loss, evaluation.bits_per_byte))
    return tuple(rows)


def verdict(rows: Sequence[Pooled]) -> str:
    """Returns whether mean < first < random in loss for every seed; if not, the order by mean loss."""
    spans = {pool: [r.loss for r in rows if r.pool == pool] for pool in POOLS}
    if all(max(spans[a]) < min(spans[b]) for a, b in pairwise(POOLS)):
        return "mean < first < random, for every seed"
    order = sorted(POOLS, key=lambda pool: sum(spans[pool]) / len(spans[pool]))
    apart = all(max(spans[a]) < min(spans[b]) for a, b in pairwise(order))
    ranks = " < ".join(order)
    return f"the table says otherwise: {ranks}" + ("" if apart else ", with losses that overlap or are equal")
