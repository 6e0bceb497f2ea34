"""Operations, KV cache bytes, and the receptive field of a stack of patterns, computed from the spec.

A multiply-add is 2 operations, and only matrix products are counted: norms, activations, softmax and rotations are of
a lower order. The (query, key) pairs that a pattern allows are counted exactly.

Legend: M width, L layers, H query heads, K kv heads, D per head, V vocab, n tokens of a row, e bytes per number, W
`matrix_weights`.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from operator import or_

import torch

from headway.cache import PAGE, PageClass
from headway.errors import ConfigError
from headway.models.cost.weights import (
    fed_outputs,
    matrix_weights,
    memory_weights,
    must_decode,
    on_meta,
    output_weights,
    stacks,
    stream_products,
)
from headway.models.mixers import kind_of, parts_of, states_of
from headway.models.spec import ModelSpec
from headway.patterns import Pattern, pairs
from headway.patterns.count import span
from headway.quantization import row_bytes


def attention_pairs(spec: ModelSpec, n: int) -> int:
    """Returns the number of (query, key) pairs that all heads of all softmax-attention layers score in a row of n
    tokens."""
    return sum(_layer_pairs(spec, n))


def _layer_pairs(spec: ModelSpec, n: int, last: int | None = None) -> list[int]:
    """Returns `attention_pairs` of each softmax-attention layer; for the model's last layer only those of its `last`
    queries, if given."""
    top = spec.layers - 1
    each = ((i, spec.patterns[i]) for i in spec.softmax_layers)
    return [_pairs(pattern, n, spec.heads, last if i == top else None) for i, pattern in each]


def _score_flops(spec: ModelSpec, pairs: Sequence[int]) -> float:
    """Returns the operations of `pairs`, the number of (query, key) pairs in each softmax-attention layer: 4 D each."""
    each = zip(spec.softmax_layers, pairs, strict=True)
    return sum(4.0 * spec.key_sizes[i][1] * n for i, n in each)


def prefill_flops(spec: ModelSpec, n: int, logits: int = 1, source: int | None = None) -> float:
    """Returns the operations of a forward pass over a row of n tokens.

        2 n W  +  4 D (pairs of all heads and layers)  +  P logits  -  (what a decoder's last layer skips)

    with W = `matrix_weights` and P = `head_flops`, 2 M V for a language model. A pair costs 2 D for the score and 2 D
    for the value; a layer with another mixer costs `MixerKind.flops` instead. An encoder-decoder with S source tokens
    adds the encoder's own operations, 2 S `memory_weights`, and 4 D H L n S. A decoder's last layer computes keys and
    values of all tokens, but queries and the feed-forward only for the last `logits` tokens.

    Args:
        n: number of tokens; for an encoder-decoder, of the target.
        logits: slots that the head is computed for: 1 before decoding, n in training and in an encoder with an output
            per token; 1 if the head gives one output per row.
        source: number of source tokens of an encoder-decoder; n if None.
    Raises ConfigError if logits is not 1 for a head with one output per row, and if `source` is given without an
    encoder.
    """
    if logits != 1 and spec.head.task in ("classify", "embed"):
        raise ConfigError(
            f"prefill_flops: Head({spec.head.task!r}) gives one output per row, so logits must be 1, got {logits}"
        )
    last = min(logits, n) if spec.kind == "decoder" else n
    fed = fed_outputs(spec, spec.layers - 1) + 2 * spec.per_layer_embedding
    behind = output_weights(spec) + fed * spec.width + stream_products(spec)[1]
    spared = (n - last) * behind
    flops = (
        2.0 * (n * matrix_weights(spec) - spared)
        + _score_flops(spec, _layer_pairs(spec, n, last))
        + _state_flops(spec, n)
        + head_flops(spec) * logits
    )
    for encoder, tokens in stacks(spec, n, source)[1:]:
        across = 4.0 * spec.head_dim * spec.heads * spec.layers * n * tokens
        flops += prefill_flops(encoder, tokens) + 2.0 * tokens * memory_weights(spec) + across
    return flops


def head_flops(spec: ModelSpec) -> float:
    """Returns the operations of the head for one slot or row: its dense layer and its output matrix."""
    head, inner = spec.head, spec.head.inputs(spec.width, spec.columns)
    outputs = spec.vocab if head.needs_vocab else head.outputs
    return 2.0 * (spec.width * inner * (head.dense is not None) + inner * outputs)


def train_flops(spec: ModelSpec, context: int, source: int | None = None) -> float:
    """Returns the training operations per token in rows of `context` tokens: 3 prefill_flops(context, context) /
    context.

    The backward pass of a product is two products. Recomputation (checkpointed blocks, scores that are not stored) is
    not counted: these are the model FLOPs.
    """
    logits = 1 if spec.head.task in ("classify", "embed") else context
    return 3.0 * prefill_flops(spec, context, logits, source) / context


def decode_flops(spec: ModelSpec, context: int, source: int | None = None) -> float:
    """Returns the operations for one more token of a row that then has `context` tokens.

        2 (W + M V)  +  4 D (keys that the last query sees, over all heads and layers)

    Other mixers and S source tokens are counted as in `prefill_flops`. Raises ConfigError for an encoder.
    """
    must_decode(spec, "decode_flops")
    sources = sum(tokens for _, tokens in stacks(spec, context, source)[1:])
    across = 4.0 * spec.head_dim * spec.heads * spec.layers * sources
    keys = [keys_read(spec.patterns[i], context, spec.heads) for i in spec.softmax_layers]
    mixing = _score_flops(spec, keys) + _state_flops(spec, 1)
    return 2.0 * matrix_weights(spec) + head_flops(spec) + mixing + across


def _state_flops(spec: ModelSpec, n: int) -> float:
    """Returns the operations of the layers' other mixers (all but softmax attention) on n tokens of a row."""
    each = zip(spec.mixers, spec.patterns, strict=True)
    parts = ((part, pattern) for mixer, pattern in each for part in parts_of(mixer))
    return sum(kind_of(part).flops(spec, part, pattern, n) for part, pattern in parts)


@lru_cache(maxsize=512)
def _pairs(pattern: Pattern, n: int, heads: int, last: int | None = None) -> int:
    return pairs(pattern, n, heads=heads, last=last)


@lru_cache(maxsize=512)
def keys_read(pattern: Pattern, n: int, heads: int) -> int:
    """Returns the number of keys that the last of n tokens sees, summed over `heads` heads. If these are kv heads, a
    key counts once for all query heads of its group that see it."""
    by_head = pattern.heads
    if len(by_head) == 1:
        return pairs(pattern, n, heads=heads, last=1)
    group = len(by_head) // heads
    return sum(pairs(reduce(or_, by_head[i : i + group]), n, last=1) for i in range(0, len(by_head), group))


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the KV cache bytes of one token in all layers: 2 L K (D e), with e bytes per number; in int8, whose rows
    have a float32 scale, 2 L K (D + 4). L counts the softmax-attention layers that have keys of their own: others
    store states, or nothing."""
    return sum(token_bytes(spec, i, dtype) for i in spec.softmax_layers if spec.key_layers[i] == i)


def token_bytes(spec: ModelSpec, layer: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the bytes of the keys and values of one token that a softmax-attention layer attends to."""
    kv_heads, head_dim = spec.key_sizes[layer]
    return 2 * kv_heads * row_bytes(head_dim, dtype)


def memory_bytes(spec: ModelSpec, source: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Returns the bytes of the cross-attention keys and values of `source` encoder states in all layers: 2 L K (D e)
    for each."""
    return spec.layers * token_bytes(spec, 0, dtype) * source * batch


def state_bytes(spec: ModelSpec, layer: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Returns the bytes of the recurrent state that a layer stores per sequence, beside its keys and values or instead
    of them; 0 for a layer with keys and values only."""
    if not states_of([spec.mixers[layer]]):
        return 0
    mixing = on_meta(spec).stack.blocks[layer].self_attn
    state = getattr(mixing, "beside", mixing).state(dtype)
    return 0 if state is None else int(state.nbytes)


def cache_slots(spec: ModelSpec, context: int) -> tuple[int, ...]:
    """Returns the number of cache slots that each layer's pages hold for a row of `context` tokens: all tokens, or
    those that a window still sees; 1 for a layer without softmax attention. Raises ConfigError for an encoder."""
    must_decode(spec, "cache_slots")
    slots = [1] * spec.layers
    for i in spec.softmax_layers:
        slots[i] = PAGE * PageClass(spec.patterns[i].retention, 0).held(context)
    return tuple(slots)


def kv_bytes_stored(
    spec: ModelSpec,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    layers: Sequence[int] | None = None,
) -> int:
    """Returns the bytes that the caches hold for `batch` rows of `context` tokens, over all layers or over `layers`.

    2 K (D e) bytes, in int8 2 K (D + 4), times the slots of each layer; nothing for layers that use another layer's
    keys; for other mixers the states of the rows (`state_bytes`). Cross-attention keys are not included
    (`memory_bytes`). Raises ConfigError for an encoder.
    """
    must_decode(spec, "kv_bytes_stored")
    slots = cache_slots(spec, context)
    each = range(spec.layers) if layers is None else layers
    return batch * sum(
        (token_bytes(spec, i, dtype) * slots[i] if i in spec.softmax_layers else 0)
        + state_bytes(spec, i, dtype)
        for i in each
        if spec.key_layers[i] == i
    )


def kv_bytes_read(
    spec: ModelSpec,
    context: int,
    dtype: torch.dtype = torch.bfloat16,
    batch: int = 1,
    layers: Sequence[int] | None = None,
) -> int:
    """Returns the cache bytes that decoding one more token of `batch` rows of `context` tokens reads, over all layers
    or over `layers`.

    2 (D e) bytes, in int8 2 (D + 4), times the keys that the last query sees, per kv head and layer: a kv head is read
    once for its whole group, and (`PerHead`) at every key that a head of the group sees. Other mixers read their
    states. Raises ConfigError for an encoder.
    """
    must_decode(spec, "kv_bytes_read")
    softmax = {
        i: 2 * row_bytes(head_dim, dtype) * keys_read(spec.patterns[i], context, kv_heads)
        for i, (kv_heads, head_dim) in enumerate(spec.key_sizes)
        if i in spec.softmax_layers
    }
    each = range(spec.layers) if layers is None else layers
    return batch * sum(softmax.get(i, 0) + state_bytes(spec, i, dtype) for i in each)


def reach(spec: ModelSpec) -> tuple[int | None, int | None]:
    """Returns (before, after): how far to either side the last layer's output at a token depends on inputs, the sum of
    the layers' reaches; None means unbounded (global tokens are unbounded, whether or not any are marked).

    Exact for windows, their unions and `PerHead`; an upper bound for windows joined by `&`.
    """
    before, after = (
        None if None in side else sum(side) for side in zip(*(p.reach for p in spec.patterns), strict=True)
    )
    return before, after


def receptive_field(spec: ModelSpec) -> int | None:
    """Returns the number of positions that the last layer's output at a token spans: its own, and both sides of
    `reach`; None if unbounded. Dilated layers see only some tokens of the span (`headway.patterns.count.span`).

    (Beltagy et al. 2020, section 3.1: l layers of window w, w / 2 on either side, see l w.)
    """
    return span(spec.patterns)
