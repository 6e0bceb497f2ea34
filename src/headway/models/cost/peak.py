"""Peak memory of training and of a first forward pass, computed from the spec.

Legend: M width, F width of the feed-forward, V vocab, n tokens of all rows; N parameters; e bytes per number in the
dtype of computation, w = max(e, 4) bytes per number of the trained weights.
"""

from typing import Unpack

import torch

from headway.models.cost.activations import TrainingOptions, activation_bytes
from headway.models.cost.weights import block_numbers, hidden_units, parameter_count, stacks
from headway.models.mixers import kind_of, parts_of
from headway.models.spec import ModelSpec
from headway.nn import Experts
from headway.nn.cross_entropy import chunk_rows
from headway.nn.feedforward import CHUNK

CHUNKS = 3
"""Chunks of logits that the loss holds at once: the previous one, and two copies of the current one."""
OUTSIDE_BLOCKS = ("inputs", "head", "logits", "scores")
"""Causes whose activations are saved before the first recomputation if blocks are checkpointed."""


def training_bytes(
    spec: ModelSpec,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    passes: int = 1,
    workers: int = 1,
    adapter: int | None = None,
    parts: int = 1,
    elsewhere: int = 0,
    **options: Unpack[TrainingOptions],
) -> dict[str, int]:
    """Returns the bytes that a training step holds at its peak, by cause: `passes` micro-batches of `batch` rows each,
    AdamW, and master weights in float32 (or wider) beside those of a narrower dtype
    (`headway.train.microbatch_pool.MasterWeights`).

        parameters   w N, and e N more if the model computes in a narrower dtype
        optimizer    2 w N

    and the largest of what the step holds besides, at these moments:

        the loss     what is saved for the backward pass (`activation_bytes`), and `CHUNKS` chunks of logits
        a block      what is saved for it and the blocks below it, and the two largest tensors of its feed-forward,
                     2 n (F + M) e: for the last block there are no gradients yet but the output layer's, for the first
                     block all but the embedding's
        the end      the gradients, w N; and e V E more for a matrix that is embedding and output, which has two to add
                     up

    With several `passes` the sum of their gradients, w N, is held from the second one on; `workers` concurrent passes
    each have their own activations and gradients. For an adapter, N counts its numbers only, and the frozen weights
    come on top (`kept_bytes`). Fragmentation of the C library's heap, up to a fifth, is not included either.

    One of several processes that each hold a part of every weight (`headway.parallel.sharded`) has, for blocks of B
    numbers and R numbers outside of blocks,

        parameters, optimizer     w N / parts, 2 w N / parts
        gathered                  e R, from the first forward to the last backward
        a block                   2 (e + w) B besides, for itself, its gradient and the block that is gathered next;
                                  for the last block also e R of gradients, for the first block also its parts of all
                                  gradients
        the end                   the parts of all gradients, e R of others, and w R that are sent

    Args:
        context, batch, dtype: as in `activation_bytes`, of one pass.
        passes: micro-batches per step. workers: how many of them run concurrently.
        adapter: number of trained parameters beside frozen weights; None trains the whole model.
        parts: processes that each weight is sharded over; each runs one pass, without an adapter.
        elsewhere: number of weights that other processes hold (`headway.parallel.ExpertParallel`).
        options: those of `activation_bytes`; recomputation under `gradient_checkpointing` is one layer at a time.
    """
    e, w = dtype.itemsize, max(dtype.itemsize, 4)
    n = parameter_count(spec) - elsewhere if adapter is None else adapter
    redone = options.get("gradient_checkpointing") == "block"
    saved_bytes = activation_bytes(spec, context, batch, dtype, **options)
    again: TrainingOptions = {**options, "gradient_checkpointing": "block"}
    one_block = activation_bytes(spec, context, batch, dtype, **again)
    one_block = {name: size for name, size in one_block.items() if name not in ("inputs", "logits")}
    rows = stacks(spec, context, options.get("source"))
    block = max(2 * batch * tokens * _fed(stack) * e for stack, tokens in rows)
    if parts == 1:
        held = {"parameters": w * n + (e * n if w > e else 0), "optimizer": 2 * w * n}
        table = e * spec.vocab * spec.columns if adapter is None else 0
        added = w * n if passes > workers else 0
        # gradients besides their sum: in float32 the first gradients become the sum
        beside = workers - (w == e and added > 0)
        first = added + beside * (e * n - (0 if spec.tied else table))
        end = w * n + (workers - (added == 0)) * e * n if w > e else workers * e * n + spec.tied * table
        gradients = [added, added, first, end]
        above = {name: one_block[name] if name == "head" else 0 for name in one_block}
    else:
        part, blocks = w * n // parts, block_numbers(spec).values()
        outside = n - sum(blocks)
        held = {"parameters": part, "optimizer": 2 * part, "gathered": e * outside}
        block += 2 * (e + w) * max(blocks)
        gradients = [0, e * outside, e * outside + part, (e + w) * outside + part]
        above = {}
    before_blocks = {name: size for name, size in saved_bytes.items() if not redone or name in OUTSIDE_BLOCKS}
    moments = [
        (gradients[0], before_blocks, _loss_bytes(spec, context * batch, w)),
        (gradients[1], saved_bytes, block),
        (gradients[2], one_block, block),
        (gradients[3], above, 0),
    ]
    most, saved, working = max(
        moments, key=lambda moment: moment[0] + workers * (sum(moment[1].values()) + moment[2])
    )
    return {
        **held,
        "gradients": most,
        **{name: workers * size for name, size in saved.items() if size or name == "scores"},
        "working": workers * working,
    }


def _fed(spec: ModelSpec) -> int:
    """Returns F + M of the widest feed-forward; with experts K (F + M), over all experts of a token together."""
    each = zip(hidden_units(spec), spec.experts, strict=True)
    rows = {(units, 1 if experts is None else experts.top) for units, experts in each}
    return max(units + top * spec.width for units, top in rows)


def _fed_first(spec: ModelSpec, units: int, experts: Experts | None, n: int) -> int:
    """Returns how many numbers one layer's feed-forward holds if nothing is saved for a backward pass: a chunk of
    hidden units; with experts, also three copies of the rows sorted by expert, and one in their original order."""
    if experts is None:
        return min(n, CHUNK) * (2 + spec.gated) * units
    widest = max(experts.hidden, experts.shared)
    return min(n * experts.top, CHUNK) * (2 + spec.gated) * widest + 4 * n * experts.top * spec.width


def _loss_bytes(spec: ModelSpec, tokens: int, w: int) -> int:
    """Returns the bytes of the chunks of logits; beside an encoder, where the backward pass recomputes them, also of
    two gradients of the output matrix."""
    if not spec.head.needs_vocab:
        return 0
    chunks = CHUNKS * min(tokens, chunk_rows(spec.vocab)) * w * spec.vocab
    return chunks + 2 * w * spec.vocab * spec.width * (spec.encoder is not None)


def first_pass_bytes(
    spec: ModelSpec, context: int, batch: int, dtype: torch.dtype, chunk: int | None = None
) -> int:
    """Returns the bytes that the first forward pass over the rows holds at its peak, besides weights and caches. It is
    the maximum of

        a block      five tensors of width M (the residual stream before and after attention, two norms, the attention
                     output) and those of one chunk of its feed-forward, two or with a gate three; with K experts per
                     row four of K M more; for another mixer two tensors of width M and what the mixer holds
                     (`MixerKind.first`)
        the output   the last states, and the logits of the last tokens, or of every token for an encoder that returns
                     them

    If the prompt is read in chunks of `chunk` tokens, n counts the tokens of the chunks, and attention packs the keys
    and values of one head of all earlier tokens again for each chunk; in a single pass these are small beside the
    block.
    """
    n, e = batch * context, dtype.itemsize
    packed = 0
    if chunk is not None and chunk < context:
        n = batch * chunk
        packed = 2 * context * max(head_dim for _, head_dim in spec.key_sizes) * e
    each = {*zip(hidden_units(spec), spec.experts, strict=True)}
    fed = n * 5 * spec.width + max(_fed_first(spec, *layer, n) for layer in each)
    firsts = (sum(kind_of(part).first(spec, part) for part in parts_of(mixer)) for mixer in {*spec.mixers})
    mixed = n * (2 * spec.width + max(firsts))
    streams = 0 if spec.altup is None else 3 * spec.altup.streams * spec.width
    block = (n * (spec.layers * spec.per_layer_embedding + streams) + max(fed, mixed)) * e + packed
    outputs = spec.vocab if spec.head.needs_vocab else spec.head.outputs
    whole = spec.kind == "encoder" and spec.head.task not in ("classify", "embed")
    return max(block, (n if whole else batch) * outputs * e + 2 * n * spec.width * e)
