"""Operations, bytes of keys and values, and how far a stack of patterns sees, counted from the spec.

A multiply-add is 2 operations, and only matrix products are counted: norms, activations, softmax and rotations are of a
lower order. The pairs that a pattern allows are counted one by one, not asserted.

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
    """(query, key) pairs that all heads of all layers of softmax attention score in a row of n tokens, counted."""
    return sum(_layer_pairs(spec, n))


def _layer_pairs(spec: ModelSpec, n: int, last: int | None = None) -> list[int]:
    """`attention_pairs` of each layer; of the last layer only those of its `last` queries, if given."""
    top = spec.layers - 1
    each = ((i, spec.patterns[i]) for i in spec.softmax_layers)
    return [_pairs(pattern, n, spec.heads, last if i == top else None) for i, pattern in each]


def _score_flops(spec: ModelSpec, pairs: Sequence[int]) -> float:
    """Operations of so many (query, key) pairs in each layer of softmax attention: 4 D each."""
    each = zip(spec.softmax_layers, pairs, strict=True)
    return sum(4.0 * spec.key_sizes[i][1] * n for i, n in each)


def prefill_flops(spec: ModelSpec, n: int, logits: int = 1, source: int | None = None) -> float:
    """Operations of a forward pass over a row of n tokens.

        2 n W  +  4 D (pairs of all heads and layers)  +  P logits  -  (what a decoder's last layer leaves out)

    with W = `matrix_weights` and P = `head_flops`, 2 M V of a language model; the pairs cost 2 D for the score and 2 D
    for the value; a layer with another mixer has instead what that costs (`MixerKind.flops`). An encoder-decoder adds,
    with S source tokens: the encoder's own, 2 S `memory_weights`, and 4 D H L n S. A decoder's last layer makes keys
    and values of all tokens, but attends and feeds forward for the last `logits` of them alone.

    Args:
        n: tokens; of an encoder-decoder: of the target.
        logits: slots that the head is computed for: 1 before decoding, n in training and in an encoder with an output
            per token; 1 where a head gives one output for a row.
        source: tokens of the source of an encoder-decoder; n unless given.
    Raises ConfigError for more slots than such a head has, and a source that there is no encoder for.
    """
    if logits != 1 and spec.head.task in ("classify", "embed"):
        raise ConfigError(
            f"prefill_flops: Head({spec.head.task!r}) is computed once for a row, got logits={logits}"
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
    """Operations of the head for one slot or row: of its dense layer and of its last matrix."""
    head, inner = spec.head, spec.head.inputs(spec.width, spec.columns)
    outputs = spec.vocab if head.needs_vocab else head.outputs
    return 2.0 * (spec.width * inner * (head.dense is not None) + inner * outputs)


def train_flops(spec: ModelSpec, context: int, source: int | None = None) -> float:
    """Operations per token in rows of `context` tokens: 3 prefill_flops(context, context) / context.

    The backward of a product is two products. What is computed a second time (checkpointed blocks, scores
    that are not stored) is not counted: this is the model's work, whoever does it.
    """
    logits = 1 if spec.head.task in ("classify", "embed") else context
    return 3.0 * prefill_flops(spec, context, logits, source) / context


def decode_flops(spec: ModelSpec, context: int, source: int | None = None) -> float:
    """Operations for one more token of a row that then has `context` tokens.

        2 (W + M V)  +  4 D (keys that the last query sees, over all heads and layers)

    Other mixers and S source tokens as in `prefill_flops`. Raises ConfigError for an encoder."""
    must_decode(spec, "decode_flops")
    sources = sum(tokens for _, tokens in stacks(spec, context, source)[1:])
    across = 4.0 * spec.head_dim * spec.heads * spec.layers * sources
    keys = [keys_read(spec.patterns[i], context, spec.heads) for i in spec.softmax_layers]
    mixing = _score_flops(spec, keys) + _state_flops(spec, 1)
    return 2.0 * matrix_weights(spec) + head_flops(spec) + mixing + across


def _state_flops(spec: ModelSpec, n: int) -> float:
    """Operations of the layers that are not softmax attention, on n tokens of a row."""
    each = zip(spec.mixers, spec.patterns, strict=True)
    parts = ((part, pattern) for mixer, pattern in each for part in parts_of(mixer))
    return sum(kind_of(part).flops(spec, part, pattern, n) for part, pattern in parts)


@lru_cache(maxsize=512)
def _pairs(pattern: Pattern, n: int, heads: int, last: int | None = None) -> int:
    return pairs(pattern, n, heads=heads, last=last)


@lru_cache(maxsize=512)
def keys_read(pattern: Pattern, n: int, heads: int) -> int:
    """Keys that the last of n tokens sees, all `heads` together; where they are kv heads, a key that one query head of
    the group or more sees counts once."""
    by_head = pattern.heads
    if len(by_head) == 1:
        return pairs(pattern, n, heads=heads, last=1)
    group = len(by_head) // heads
    return sum(pairs(reduce(or_, by_head[i : i + group]), n, last=1) for i in range(0, len(by_head), group))


def kv_bytes_per_token(spec: ModelSpec, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of keys and values that one token has in all layers: 2 L K (D e), with e bytes per number; in
    int8, whose rows have a float32 scale, 2 L K (D + 4). L counts those of softmax attention with keys of their own:
    others keep states, or nothing."""
    return sum(token_bytes(spec, i, dtype) for i in spec.softmax_layers if spec.key_layers[i] == i)


def token_bytes(spec: ModelSpec, layer: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the keys and values of one token that a layer of softmax attention attends to."""
    kv_heads, head_dim = spec.key_sizes[layer]
    return 2 * kv_heads * row_bytes(head_dim, dtype)


def memory_bytes(spec: ModelSpec, source: int, dtype: torch.dtype = torch.bfloat16, batch: int = 1) -> int:
    """Bytes of keys and values of so many last states of an encoder, in all layers: 2 L K (D e) for each."""
    return spec.layers * token_bytes(spec, 0, dtype) * source * batch


def state_bytes(spec: ModelSpec, layer: int, dtype: torch.dtype = torch.bfloat16) -> int:
    """Bytes of the state that a layer keeps of a text, beside keys and values or instead of them; 0 for keys and values
    alone."""
    if not states_of([spec.mixers[layer]]):
        return 0
    mixing = on_meta(spec).stack.blocks[layer].self_attn
    state = getattr(mixing, "beside", mixing).state(dtype)
    return 0 if state is None else int(state.nbytes)


def cache_slots(spec: ModelSpec, context: int) -> tuple[int, ...]:
    """Slots of the pages that each layer's cache holds of a row of `context` tokens: of all of them, or of those that a
    window still sees; 1 of a layer that keeps a state. Raises ConfigError for an encoder, as the other two do."""
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
    """Bytes of keys and values that the caches of `batch` rows of `context` tokens hold, of all layers or of some.

    2 K (D e) bytes, in int8 2 K (D + 4), times the slots of each layer; nothing for layers that attend to another
    layer's keys, and for other mixers the states of the rows (`state_bytes`). (Keys of an encoder's states:
    `memory_bytes`.)"""
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
    """Bytes of keys and values that one more token of `batch` rows of `context` tokens reads, in all layers or in some.

    2 (D e) bytes, in int8 2 (D + 4), times the keys that the last query sees, per kv head and layer: a kv
    head is read once for its whole group, and (`PerHead`) wherever one of the group looks. Other mixers read their
    states.
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
    """(before, after): how far to either side the last layer's output at a token depends on inputs: the layers'
    reaches added; None is no bound (global tokens have none, whether or not some are marked).

    Exact for windows, their unions and `PerHead`; of windows joined by `&`, an upper bound."""
    before, after = (
        None if None in side else sum(side) for side in zip(*(p.reach for p in spec.patterns), strict=True)
    )
    return before, after


def receptive_field(spec: ModelSpec) -> int | None:
    """Returns how many positions the last layer's output at a token spans: its own and both sides of `reach`. It is a
    span, in which dilated layers see only some tokens (`headway.patterns.count.span`).

    None is no bound. (Beltagy et al. 2020, section 3.1: l layers of window w, w / 2 on either side, see l w.)"""
    return span(spec.patterns)
