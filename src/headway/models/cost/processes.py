"""The memory, work and messages of each process in a training step, before anything runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Unpack

import torch

from headway.errors import ConfigError
from headway.models.cost.activations import TrainingOptions
from headway.models.cost.peak import training_bytes
from headway.models.cost.weights import block_numbers, parameter_count, parameters, stacks
from headway.models.expert_parallel import check_experts
from headway.models.mixers import order_of, state_kinds
from headway.models.spec import ModelSpec
from headway.models.tensor_parallel import share_of, shares_vocab
from headway.parallel import Mesh
from headway.parallel.layout import choose_layout, head_plans
from headway.tokens import Tokens

MOST = 2**24
"""Tokens of a row whose shards are planned: which keys each rank reads is found tile by tile."""


@dataclass(frozen=True)
class ProcessShare:
    """The share of one process in a step.

    Attributes:
        rank: its number. rows, tokens: that it computes: rows, and tokens of each.
        memory: bytes that it holds at its peak: `training_bytes` of its heads, hidden units and part of the vocab, with
            all else in each process, or of a part of these.
        gradients_sent: bytes that a ring sends to add up the gradients of R processes that have the same weights,
            2 (R - 1) / R of their own; over S processes that have a part of all weights each (S - 1) / S, and over R
            that have the same part 2 (R - 1) / R of it.
        weights_sent: bytes of weights that a ring sends to S such processes: (S - 1) / S of them, of blocks twice.
        sums_sent: bytes that a ring sends for the sums of tensor parallel, forward and backward: `numbers_summed`
            and `softmax_bytes`; without the few of gradients of what heads share.
        rows_sent: bytes of rows that go to experts of other processes and back, forward and backward, over all layers:
            as many of a token's K as there are, where tokens choose evenly; without the few that say how many.
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
    sums_sent: int
    rows_sent: int
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

    Raises ConfigError for fewer rows than dp fsdp expert, for an encoder-decoder whose rows would be sharded, for
    heads, hidden units and experts that cannot be shared, and for rows of more than `MOST` tokens."""
    if context > MOST:
        raise ConfigError(
            f"mesh {mesh}: what each process reads of a row is found tile by tile, in rows of at most {MOST} tokens, "
            f"and these have {context}; lower the context, or leave --processes and --mesh out"
        )
    if batch < mesh.batches:
        raise ConfigError(
            f"mesh {mesh}: {mesh.batches} processes share the rows of a step, and it has {batch}; take more rows, or "
            "fewer processes"
        )
    if mesh.cp > 1 and spec.encoder is not None:
        raise ConfigError(f"mesh {mesh}: the rows of an encoder-decoder cannot be sharded; leave cp out")
    if mesh.cp > 1 and (names := state_kinds(spec)):
        raise ConfigError(f"mesh {mesh}: ranks do not pass on the states of {names}; leave cp out")
    if mesh.expert > 1:
        check_experts(spec, mesh.expert)
    layout, _ = choose_layout(spec.patterns, Tokens.range(context), mesh.cp)
    shards = layout.shards(Tokens.range(context))
    local_specs = [share_of(spec, mesh.tp, rank) for rank in range(mesh.tp)]
    plans = [head_plans(local.patterns, shards) for local in local_specs]
    work = [
        [sum(plan.pairs(cp) * layers / heads for plan, layers, heads in some) for cp in range(mesh.cp)]
        for some in plans
    ]
    alike, parts = mesh.dp * mesh.cp, mesh.fsdp
    if mesh.expert > 1 or mesh.tp > 1:
        options["expert_rows"] = "sorted"
    redo = options.get("gradient_checkpointing", "none")
    again = redo == "block"
    there_and_back = 2 * (2 + (redo in ("block", "feed_forward")))
    shares = []
    for rank in range(mesh.ranks):
        place = mesh.place(rank)
        cp, local, some, pairs = place.cp, local_specs[place.tp], plans[place.tp], work[place.tp]
        rows, tokens = len(mesh.share(rank, batch)), shards[cp].count
        size: dict[str, Any] = {"rows": rows, "kv_heads": local.kv_heads, "head_dim": local.head_dim}
        sent = sum(plan.bytes_sent(cp, dtype=dtype, **size) * layers // heads for plan, layers, heads in some)
        of_experts = parameters(local).get("experts", 0) if mesh.expert > 1 else 0
        elsewhere = of_experts - of_experts // mesh.expert
        held = training_bytes(local, tokens, rows, dtype, parts=parts, elsewhere=elsewhere, **options)
        n = parameter_count(local)
        blocks = sum(block_numbers(local).values())
        rings = ((n - of_experts, alike * mesh.expert), (of_experts // mesh.expert, alike))
        gradients = (parts - 1) * 4 * n // parts
        gradients += sum(2 * (ranks - 1) * 4 * numbers // (ranks * parts) for numbers, ranks in rings)
        each = stacks(spec, tokens, options.get("source"))
        chosen = sum(count * e.top for stack, count in each for e in stack.experts if e is not None)
        exchanged = there_and_back * rows * chosen * spec.width * dtype.itemsize
        numbers = numbers_summed(each, mesh.tp, again)
        sums = 2 * (mesh.tp - 1) * rows * numbers * dtype.itemsize // mesh.tp
        shares.append(
            ProcessShare(
                rank,
                rows,
                tokens,
                memory=sum(held.values()),
                gradients_sent=gradients,
                weights_sent=(parts - 1) * dtype.itemsize * (n + blocks) // parts,
                sums_sent=sums + softmax_bytes(spec, rows * tokens, mesh.tp, max(dtype.itemsize, 4)),
                rows_sent=(mesh.expert - 1) * exchanged // mesh.expert,
                keys_sent=sent,
                hops=max(len(plan.hops) for plan, _, _ in some),
                pairs=pairs[cp] * mesh.cp / sum(pairs),
            )
        )
    return shares


def numbers_summed(rows: Sequence[tuple[ModelSpec, int]], ranks: int, again: bool) -> int:
    """Numbers of a row of each stack that are summed over the ranks that share layers (`TensorParallel`).

    Of each token M numbers, twice in the forward of each layer and twice in the backward; beside an encoder three and
    three times, and once of each source token for the gradients of its states; once more in the backward where there
    are output gates. A block that is computed `again` makes one sum more, two in the orders "post", "sandwich" and
    "output", and one more beside an encoder. The second projections of global tokens are not counted. A norm of all
    heads sums one number of each token, in the forward and in the backward. Where the ranks share a vocab
    (`tensor_parallel.shares_vocab`), of each token what an embedding gives, forward, and the gradient of what the
    output layer is given, for which a masked-lm head counts all tokens."""
    total, sources = 0, rows[-1][1]
    for spec, tokens in rows:
        crosses = spec.encoder is not None
        normed = sum(order_of(spec, mixer) in ("post", "sandwich", "output") for mixer in spec.mixers)
        made_again = again * (1 + crosses)
        layer = (4 + 2 * crosses + made_again + (spec.gate is not None)) * tokens + crosses * sources
        total += (spec.layers * layer + again * normed * tokens) * spec.width
        if spec.qk_norm == "all":
            total += spec.layers * ((2 + crosses) * (2 + again) * tokens + crosses * 2 * sources)
        if shares_vocab(spec.vocab, ranks):
            total += tokens * (
                spec.columns + spec.head.inputs(spec.width, spec.columns) * spec.head.needs_vocab
            )
    return total


def softmax_bytes(spec: ModelSpec, targets: int, ranks: int, w: int) -> int:
    """Bytes that a rank sends to merge the softmax over a shared vocab, of numbers of w bytes: for a target, to each
    other one, the logarithm of its sum and the target's logit; for a masked-lm head the largest, too, and whose it is.
    Beside an encoder, where labels may be smoothed, and under a cap two of these, and two sums; those of all chunks but
    the last are made twice, and counted once."""
    if not spec.head.needs_vocab or not shares_vocab(spec.vocab, ranks):
        return 0
    chunked = spec.encoder is not None or spec.logit_cap is not None
    gathered, summed = 4 if spec.head.task == "masked-lm" and not chunked else 2, 2 * chunked
    return (ranks - 1) * targets * w * gathered + 2 * (ranks - 1) * targets * w * summed // ranks


def whole_vocabs(spec: ModelSpec, ranks: int) -> list[int]:
    """Sizes of the vocabs whose embedding and output layer each of the ranks has as a whole, since they do not divide
    them."""
    return sorted({stack.vocab for stack, _ in stacks(spec, 1) if not shares_vocab(stack.vocab, ranks)})
