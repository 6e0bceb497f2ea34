"""Bytes of activations that a forward pass saves for the backward pass, computed from the spec.

Legend: M width, E columns of the embedding, L layers, H query heads, K kv heads, D per head, F width of the
feed-forward, V vocab, n tokens of a row; e bytes per number, w = max(e, 4), the bytes per number after widening to
float32.
"""

from collections import Counter
from typing import Literal, TypedDict

import torch

from headway.models.cost.kept_parts import (
    norm_bytes,
    per_layer_bytes,
    qk_norm_bytes,
    routing_bytes,
    spared_bytes,
    stream_bytes,
)
from headway.models.cost.weights import gates, hidden_units, stacks
from headway.models.mixers import Softmax, beside_layers, kind_of, parts_of
from headway.models.spec import ModelSpec
from headway.nn.block import Checkpointing
from headway.nn.cross_entropy import chunk_rows

Scores = Literal["recomputed", "stored"]
ExpertRows = Literal["in one pass", "sorted"]


class TrainingOptions(TypedDict, total=False):
    """The keyword options of `activation_bytes` that `training_bytes` passes on."""

    source: int | None
    scores: Scores
    expert_rows: ExpertRows
    gradient_checkpointing: Checkpointing


def activation_bytes(
    spec: ModelSpec,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    *,
    source: int | None = None,
    scores: Scores = "recomputed",
    expert_rows: ExpertRows = "in one pass",
    gradient_checkpointing: Checkpointing = "none",
) -> dict[str, int]:
    """Returns the bytes that a forward pass saves for the backward pass, by cause.

    Per token:

        norms          each saves its input and its result, which the next product uses (`norm_bytes`): 2 L + 1 in
                       order "pre", the last one included; L + 1 in "joint"; L more with cross-attention; 1 after an
                       embedding; 2 (H + K) L of width D with qk_norm. In "parallel" both norms of a layer share one
                       saved input; in "post" the first layer's input is saved as well. A norm of a sub-layer's output
                       saves its input only: 2 L more in "sandwich"; 2 L in "output", besides the inputs of the
                       sub-layers
        attention      L (e D (2 H + 2 K) + 4 H)     q, k, v, the output and the logsumexp; for cross-attention
                                                     L (2 e D H + 4 H), and L 2 e D K per source token;
                                                     L e D (2 K + H) more with global projections; keys and values that
                                                     layers share count once
          sink         L H (e D + 5)                 its result, its factor, and a mask of the rows that see no key
          gate         L e H (D + 1), or L 2 e H D   its result, and one number per head, or per channel
          others       `MixerKind.saved`             layers with another mixer
        feed-forward   L 3 e F                       gate, up, and act(gate) up
          not gated    L 2 e F                       up and its activation; e F less with ReLU, whose gradient needs
                                                     only the result, unless dropout follows
          dropout      L e F                         more with activation_dropout
          xielu        L (3 e + 1) F                 more: its terms, and the sign of each number
          experts      2 e K M + 3 w E + ...         for K experts chosen of E: rows sorted by expert, and their
                       outputs; F is the sum over all experts of a token. See `routing_bytes`; in float32 less in one
                       pass, see `spared_bytes`
        streams        `stream_bytes`                several residual streams, LAuReL's low rank, sparse gates
        dropout        e M per sub-layer, e E for the embedding; e M more with final_dropout
        positions      what trained rotations save, and stored scores: `PositionScheme.saved_bytes`
        head           its dense layer and norm
        per layer      `per_layer_bytes`             per-layer embeddings, counted under "norms"
        logits         4 C                           the log-probabilities of C labels, in float32; over a vocab the
                                                     loss (`model(..., targets=)`) saves instead, in total, w V E: the
                                                     gradient of the output matrix; in an encoder-decoder, and with
                                                     capped logits, the log-probabilities of one chunk, w V for each of
                                                     its tokens, and e V for the capped logits

    and, per row of n tokens, only if `scores` are "stored" (backend "dense"):

        scores         L (8 H n^2)  + L n^2          exp(scores) and weights, in float32; one mask; 4 H n^2 L more with
                       attention_dropout, and with a score cap; q, k, v are then in float32 whatever e is

    All activations of an encoder beside a decoder are under "encoder". What `gradient_checkpointing` names is
    recomputed one layer at a time, so one of L layers counts. A checkpointed "block" saves its input, L e M per token
    ("inputs"); the input of a checkpointed "attention" or "feed_forward" is the result of a norm, which is saved
    anyway. Parameters, gradients and optimizer states come on top (`training_bytes`). The backend "banded" saves one
    more copy of the output, e H D.

    Args:
        context, batch: tokens per row, and rows; for an encoder-decoder, of the target.
        source: tokens per source row of an encoder-decoder; `context` if None.
        scores: as above. Every token counts as a target of a masked-lm head.
        expert_rows: how a layer applies its experts: in one pass on a CPU (`headway.nn.expert_rows`), or on rows
            sorted by expert, as on a GPU and with expert or tensor parallelism.
    Raises ConfigError if `source` is given and the model has no encoder.
    """
    e, tokens = dtype.itemsize, context * batch
    rows = stacks(spec, context, source)
    counts, *below = (
        _stack_bytes(*each, batch, e, scores, expert_rows, gradient_checkpointing) for each in rows
    )
    for encoder in below:
        counts["encoder"], sources = sum(encoder.values()), rows[1][1]
        attended = 1 if gradient_checkpointing in ("block", "attention") else spec.layers
        keys = 2 * e * spec.head_dim * spec.kv_heads + qk_norm_bytes(spec, (spec.kv_heads,), spec.head_dim, e)
        counts["attention"] += spec.layers * batch * sources * keys
        if scores == "stored":
            counts["scores"] += attended * _score_bytes(spec, context, sources, batch)
    counts["head"], counts["logits"] = _head_bytes(spec, tokens, e)
    return {name: n for name, n in counts.items() if n or name == "scores"}


def _stack_bytes(
    spec: ModelSpec,
    context: int,
    batch: int,
    e: int,
    scores: Scores,
    expert_rows: ExpertRows,
    redo: Checkpointing,
) -> Counter[str]:
    """Returns the bytes that a stack saves by cause, including its last states, without the cross-attention keys."""
    m, h, tokens = spec.width, spec.heads, context * batch
    cross, w = spec.encoder is not None, max(e, 4)
    full, attended, fed = (
        1 if redo in ("block", part) else spec.layers for part in ("block", "attention", "feed_forward")
    )
    forwards = min(sum(units > 0 for units in hidden_units(spec)), full)
    sublayers = full * (1 + cross) + forwards
    norms = (full if spec.order == "joint" else sublayers) * norm_bytes(spec, m, e)
    if spec.order == "sandwich":
        norms += sublayers * (norm_bytes(spec, m, e) - e * m)
    if not spec.first_norm and full == spec.layers:
        norms -= norm_bytes(spec, m, e) - e * m
    if spec.order == "parallel":
        norms -= full * e * m
    if spec.order == "post":
        norms += e * m + spec.final_norm * (norm_bytes(spec, m, e) - e * m)
    else:
        norms += norm_bytes(spec, m, e) if spec.final_norm else e * m
    kinds = [kind_of(mixer) for mixer in spec.mixers]
    normed = [_head_norm_bytes(spec, i, e) if kind.positions else 0 for i, kind in enumerate(kinds)]
    norms += max(normed) if attended == 1 else sum(normed)
    norms += cross * attended * qk_norm_bytes(spec, (h,), spec.head_dim, e)
    if spec.per_layer_embedding:
        norms += per_layer_bytes(spec, full, e)
    if spec.embedding_norm:
        norms += norm_bytes(spec, spec.columns, e) - e * spec.columns
    norms += e * spec.columns * (spec.columns != m)
    counts = Counter(norms=tokens * norms)
    stored = scores == "stored"
    across = (w if stored else e) * spec.head_dim * h + e * spec.head_dim * h + 4 * h
    each = [
        sum(kind_of(part).saved(spec, part, e) for part in parts_of(mixer))
        + (_softmax_bytes(spec, i, e, stored) if isinstance(mixer, Softmax) else 0)
        + e * (h * d + gates(spec, d)) * bool(spec.gate) * kind.positions
        for i, (mixer, kind, (_, d)) in enumerate(zip(spec.mixers, kinds, spec.key_sizes, strict=True))
    ]
    mixed = max(each) if attended == 1 else sum(each)
    counts["attention"] = tokens * (mixed + cross * attended * across)
    scored = min(attended, len(spec.softmax_layers))
    counts["scores"] = scored * _score_bytes(spec, context, context, batch) if stored else 0
    relu, drops = spec.activation == "relu", bool(spec.activation_dropout)
    hidden = 3 + drops if spec.gated else 2 - relu + drops * (1 + relu)
    hidden += spec.gated and spec.activation == "relu2"
    hidden_bytes = e * hidden + (3 * e + 1) * (spec.activation == "xielu")
    layers = [
        hidden_bytes * units
        + routing_bytes(spec, experts, e)
        - spared_bytes(spec, experts, e) * (expert_rows == "in one pass")
        for units, experts in zip(hidden_units(spec), spec.experts, strict=True)
    ]
    counts["feed-forward"] = tokens * (sum(layers) if fed == spec.layers else max(layers))
    if streams := stream_bytes(spec, full, attended, fed, e):
        counts["streams"] = tokens * streams
    if spec.dropout:
        mixing = (1 + cross) * attended + min(len(beside_layers(spec.mixers)), attended)
        counts["dropout"] = (
            tokens * e * (m * (mixing + min(forwards, fed) + spec.final_dropout) + spec.columns)
        )
    with torch.device("meta"):
        number = torch.float64 if w == 8 else torch.float32
        rows = [torch.empty(batch, h, context, d, dtype=number) for _, d in spec.key_sizes]
    marked = [
        p.saved_bytes(q, q[:, :kv_heads], stored)
        for p, kind, q, (kv_heads, _) in zip(spec.layer_positions, kinds, rows, spec.key_sizes, strict=True)
        if kind.positions
    ]
    counts["positions"] = sum(marked[:attended])
    if redo == "block":
        counts["inputs"] = tokens * spec.layers * e * m
    return counts


def _softmax_bytes(spec: ModelSpec, layer: int, e: int, stored: bool) -> int:
    """Returns the bytes of one token's queries, keys, values, outputs and logsumexp. Keys shared from another layer
    are not counted again, unless scores are stored, which copies them in each layer."""
    h, (k, d) = spec.heads, spec.key_sizes[layer]
    keys = 2 * k if spec.key_layers[layer] == layer or stored else 0
    in_scores = (max(e, 4) if stored else e) * d * (h + keys)
    of_global = spec.global_projections * e * d * (2 * k + h)
    return in_scores + e * d * h + 4 * h + of_global + spec.sink_logit * h * (e * d + 5)


def _head_norm_bytes(spec: ModelSpec, layer: int, e: int) -> int:
    """Returns the bytes that the norms of one token's queries, keys and values save in a layer."""
    (k, d), mixer = spec.key_sizes[layer], spec.mixers[layer]
    own_keys = spec.key_layers[layer] == layer
    of_values = 0
    if isinstance(mixer, Softmax) and mixer.v_norm:
        of_values = e * k * d * (not mixer.tied_values) + max(e, 4) * k
    return qk_norm_bytes(spec, (spec.heads, k) if own_keys else (spec.heads,), d, e) + of_values


def _score_bytes(spec: ModelSpec, queries: int, keys: int, batch: int) -> int:
    """Returns the bytes of one layer's stored scores."""
    numbers = 8 + 4 * bool(spec.attention_dropout) + 4 * (spec.score_cap is not None)
    return queries * keys * (numbers * spec.heads * batch + 1)


def _head_bytes(spec: ModelSpec, tokens: int, e: int) -> tuple[int, int]:
    """Returns the bytes of (the head, the logits). The last states are saved if a product with them follows; a loss
    over a vocab saves their gradient instead."""
    head, m, w, inner = spec.head, spec.width, max(e, 4), spec.head.inputs(spec.width, spec.columns)
    kept = 0
    if head.needs_vocab and head.dense is not None:
        kept = (head.dense != "relu") * e * inner + norm_bytes(spec, inner, e)
    elif head.task in ("states", "embed", "classify"):
        kept = -e * m
    elif head.task == "tag":
        kept = e * m * bool(spec.dropout)
    if not head.needs_vocab:
        return tokens * kept, tokens * 4 * head.outputs if head.task in ("tag", "answer") else 0
    if spec.encoder is not None or spec.logit_cap is not None:
        capped = e * (spec.logit_cap is not None)
        return tokens * kept, min(tokens, chunk_rows(spec.vocab)) * (w + capped) * spec.vocab
    return tokens * kept, w * spec.vocab * (inner + spec.output_bias)
