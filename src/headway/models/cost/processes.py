"""What each process of a training step holds, computes and sends, before anything runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from headway.errors import ConfigError
from headway.models.cost.activations import TrainingOptions
from headway.models.cost.peak import training_bytes
from headway.models.cost.weights import parameter_count
from headway.models.spec import ModelSpec
from headway.parallel import ContextPlan, Mesh, choose_layout
from headway.tokens import Tokens


@dataclass(frozen=True)
class ProcessShare:
    """Of one process, in a step.

    Attributes:
        rank: its number. rows, tokens: that it computes: rows, and tokens of each.
        memory: bytes that it holds at its peak (`training_bytes`: weights and moments are in each process).
        gradients_sent: bytes that a ring sends to add up gradients over R processes, 2 (R - 1) / R of their own.
        keys_sent: bytes of keys, values and their gradients, over all layers, forward and backward.
        hops: that are made at most in a layer, of cp - 1.
        pairs: its (query, key) pairs over the mean.
    """

    rank: int
    rows: int
    tokens: int
    memory: int
    gradients_sent: int
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

    Raises ConfigError for fewer rows than dp, and for an encoder-decoder whose rows would be sharded."""
    if batch < mesh.dp:
        raise ConfigError(
            f"mesh {mesh}: {mesh.dp} processes share the rows of a step, and it has {batch}; take more rows, or fewer "
            "processes"
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
    gradients = 2 * (mesh.ranks - 1) * 4 * parameter_count(spec) // mesh.ranks
    found = []
    for rank in range(mesh.ranks):
        place = mesh.place(rank)
        dp, cp = place.dp, place.cp
        rows, tokens = len(range(dp, batch, mesh.dp)), shards[cp].count
        size: dict[str, Any] = {"rows": rows, "kv_heads": spec.kv_heads, "head_dim": spec.head_dim}
        sent = sum(
            plan.bytes_sent(cp, dtype=dtype, **size) * layers // heads for plan, layers, heads in plans
        )
        held = sum(training_bytes(spec, tokens, rows, dtype, **options).values())
        hops = max(len(plan.hops) for plan, _, _ in plans)
        even = work[cp] * mesh.cp / sum(work)
        found.append(ProcessShare(rank, rows, tokens, held, gradients, sent, hops, even))
    return found
