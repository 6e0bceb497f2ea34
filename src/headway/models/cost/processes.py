"""What each process of a training step holds, computes and sends, before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from headway.errors import ConfigError
from headway.models.cost.activations import TrainingOptions
from headway.models.cost.peak import sharded_training_bytes, training_bytes
from headway.models.cost.weights import block_parameters, parameter_count
from headway.models.spec import ModelSpec
from headway.parallel import ContextPlan, Mesh, choose_layout
from headway.tokens import Tokens


@dataclass(frozen=True)
class ProcessShare:
    """Of one process, in a step.

    Attributes:
        rank: its number. rows, tokens: that it computes: rows, and tokens of each.
        memory: bytes that it holds at its peak: `training_bytes`, with weights and moments in each process; or
            `sharded_training_bytes`, with a part of them.
        gradients_sent: bytes that a ring sends to add up gradients over R processes: 2 (R - 1) / R of them; over S
            processes that have a part of them each (S - 1) / S, and over R that have the same part 2 (R - 1) / R of it.
        weights_sent: bytes of weights that a ring sends to S such processes: (S - 1) / S of them, of blocks twice.
        keys_sent: bytes of keys, values and their gradients, over all layers, forward and backward.
        hops: that are made at most in a layer, of cp - 1.
        pairs: its (query, key) pairs over the mean.
    """

    rank: int
    rows: int
    tokens: int
    memory: int
    gradients_sent: int
    weights_sent: int
    keys_sent: int
    hops: int
    pairs: float


def process_shares(
    spec: ModelSpec,
    mesh: Mesh,
    context: int,
    batch: int,
    dtype: torch.dtype = torch.float32,
    **options: Unpack[TrainingOptions],
) -> list[ProcessShare]:
    """The share of each process in a step of `batch` rows of `context` tokens, computed in `dtype`.

    Raises ConfigError for fewer rows than dp fsdp, and for an encoder-decoder whose rows would be sharded."""
    if batch < mesh.batches:
        raise ConfigError(
            f"mesh {mesh}: {mesh.batches} processes share the rows of a step, and it has {batch}; take more rows, or "
            "fewer processes"
        )
    if mesh.cp > 1 and spec.encoder is not None:
        raise ConfigError(f"mesh {mesh}: the rows of an encoder-decoder cannot be sharded; leave cp out")
    layout, _ = choose_layout(spec.patterns, Tokens.range(context), mesh.cp)
    shards = layout.shards(Tokens.range(context))
    plans = [
        (ContextPlan.of(head, shards), layers, len(pattern.heads))
        for pattern, layers in Counter(spec.patterns).items()
        for head in pattern.heads
    ]
    work = [sum(plan.pairs(cp) * layers / heads for plan, layers, heads in plans) for cp in range(mesh.cp)]
    n, alike, parts = parameter_count(spec), mesh.dp * mesh.cp, mesh.fsdp
    gradients = (parts - 1) * 4 * n // parts + 2 * (alike - 1) * 4 * n // (alike * parts)
    blocks = sum(s.layers * block_parameters(s) for s in (spec, spec.encoder) if s is not None)
    weights = (parts - 1) * dtype.itemsize * (n + blocks) // parts
    found = []
    for rank in range(mesh.ranks):
        place = mesh.place(rank)
        first, cp = place.dp * mesh.fsdp + place.fsdp, place.cp
        rows, tokens = len(range(first, batch, mesh.batches)), shards[cp].count
        size: dict[str, Any] = {"rows": rows, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
        sent = sum(
            plan.bytes_sent(cp, dtype=dtype, **size) * layers // heads for plan, layers, heads in plans
        )
        held = (
            training_bytes(spec, tokens, rows, dtype, **options)
            if parts == 1
            else sharded_training_bytes(spec, tokens, rows, dtype, parts, **options)
        )
        hops = max(len(plan.hops) for plan, _, _ in plans)
        even = work[cp] * mesh.cp / sum(work)
        found.append(
            ProcessShare(rank, rows, tokens, sum(held.values()), gradients, weights, sent, hops, even)
        )
    return found
