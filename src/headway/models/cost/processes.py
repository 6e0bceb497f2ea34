"""Memory, work and communication of each process in a training step, computed before anything runs."""

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
"""Maximum number of tokens of a row whose shards are planned: the keys that each rank reads are found tile by tile."""


@dataclass(frozen=True)
class ProcessShare:
    """The share of one process in a training step. Communication is counted in bytes that the process sends.

    Attributes:
        rank: the process's number. rows, tokens: rows that it computes, and tokens of each.
        memory: bytes held at the peak: `training_bytes` of its heads, hidden units and part of the vocab, with
            everything else replicated; or of its part of these, if weights are sharded (fsdp).
        gradients_sent: bytes sent by ring all-reduce of the gradients of R processes that hold the same weights, 2 (R
            - 1) / R of their size; with weights sharded over S processes, (S - 1) / S of them, and 2 (R - 1) / R of
            the part that R processes hold.
        weights_sent: bytes of weights that are all-gathered among S such processes: (S - 1) / S of them, for blocks
            twice.
        sums_sent: bytes sent by ring all-reduce for tensor parallelism, forward and backward: `numbers_summed` and
            `softmax_bytes`; the few gradients of what heads share are not counted.
        rows_sent: bytes of rows sent to the experts of other processes and back, forward and backward, over all
            layers, if tokens choose experts evenly; the messages with the row counts are not counted.
        keys_sent: bytes of keys, values and their gradients, over all layers, forward and backward.
        hops: the largest number of ring hops that a layer makes, of cp - 1.
        pairs: its (query, key) pairs divided by the mean over context-parallel ranks.
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
    """Returns the share of each process in a step of `batch` rows of `context` tokens, computed in `dtype`.

    Raises ConfigError if there are fewer rows than dp x fsdp x expert; if cp would shard the rows of an
    encoder-decoder or of a model with recurrent states; if heads, hidden units or experts cannot be divided; and for
    rows of more than `MOST` tokens.
    """
    if context > MOST:
        raise ConfigError(
            f"mesh {mesh}: shares of processes are planned for rows of at most {MOST} tokens, got {context}; lower the "
            "context, or leave --processes and --mesh out"
        )
    if batch < mesh.batches:
        raise ConfigError(
            f"mesh {mesh}: {mesh.batches} processes cannot share a batch of {batch} rows; use a larger batch or fewer "
            "processes"
        )
    if mesh.cp > 1 and spec.encoder is not None:
        raise ConfigError(f"mesh {mesh}: cp does not support encoder-decoders; leave cp out")
    if mesh.cp > 1 and (names := state_kinds(spec)):
        raise ConfigError(f"mesh {mesh}: cp does not support {names}; leave cp out")
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
        stack_rows = stacks(spec, tokens, options.get("source"))
        chosen = sum(count * e.top for stack, count in stack_rows for e in stack.experts if e is not None)
        exchanged = there_and_back * rows * chosen * spec.width * dtype.itemsize
        numbers = numbers_summed(stack_rows, mesh.tp, again)
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
    """Returns how many numbers of one row per stack are summed over the ranks of tensor parallelism (`TensorParallel`).

    For each token M numbers, twice in the forward of each layer and twice in the backward; with cross-attention three
    times each, and once for each source token for the gradients of its states; once more in the backward with output
    gates. A checkpointed block (`again`) repeats one sum, two in the orders "post", "sandwich" and "output", and one
    more with cross-attention. The second projections of global tokens are not counted. A norm over all heads sums one
    number per token, in the forward and in the backward. If the ranks share the vocab
    (`tensor_parallel.shares_vocab`): for each token the output of the embedding, in the forward, and the gradient of
    the output layer's input, for which a masked-lm head counts all tokens (not the rows of zeros that
    `nn.products.added_rows` appends to them on some CPUs).
    """
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
    """Returns the bytes that a rank sends to merge the softmax over a sharded vocab, with numbers of w bytes.

    For each target, to each other rank: the log of its sum and the target's logit; for a masked-lm head also the
    largest logit and its rank. In an encoder-decoder, where labels may be smoothed, and with capped logits: two of
    these, and two sums; the recomputation of all chunks but the last is not counted.
    """
    if not spec.head.needs_vocab or not shares_vocab(spec.vocab, ranks):
        return 0
    chunked = spec.encoder is not None or spec.logit_cap is not None
    gathered, summed = 4 if spec.head.task == "masked-lm" and not chunked else 2, 2 * chunked
    return (ranks - 1) * targets * w * gathered + 2 * (ranks - 1) * targets * w * summed // ranks


def whole_vocabs(spec: ModelSpec, ranks: int) -> list[int]:
    """Returns the sizes of the vocabs that the number of ranks does not divide: each rank has their embedding and
    output layer as a whole."""
    return sorted({stack.vocab for stack, _ in stacks(spec, 1) if not shares_vocab(stack.vocab, ranks)})
