"""Validates a `ModelSpec` before anything is built."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from headway.attention.delta.spec import ORDERS as BESIDE_OTHERS
from headway.errors import ConfigError, as_error, check_known, check_whole
from headway.heads import Heads
from headway.models.families import find_family
from headway.models.layer_checks import by_layer, check_layers, own_sizes
from headway.models.mixers import Softmax, kind_of, order_of, silent_fields
from headway.nn import ACTIVATIONS
from headway.nn.block import BESIDE, CROSSED, ORDERS
from headway.nn.experts import Experts
from headway.nn.feedforward import TRAINED
from headway.nn.gates import check_gate
from headway.nn.norms import NORMS, QK_NORMS
from headway.patterns import Causal, Full, Pattern
from headway.positions import NoPositions, PositionScheme

MOST_EXPERTS = 65_536
"""Maximum over all layers: three times as many as the largest published model has."""
SIZES = ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "trained_context")
NUMBERS: Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "must be above 0 and below 1": (("norm_eps",), lambda n: 0 < n < 1),
    "must be a finite number above 0": (
        (
            *("init_std", "embedding_scale", "logit_scale", "attention_scale"),
            *("residual_scale", "logit_cap", "score_cap", "mlp_scale", "mlp_gate_scale"),
        ),
        lambda n: 0 < n < math.inf,
    ),
    "must be a number from 0 to 1": (("norm_offset",), lambda n: 0 <= n <= 1),
    "must be a whole number of at least 0": (
        ("token_types", "per_layer_embedding", "per_layer_vocab", "laurel"),
        lambda n: type(n) is int and n >= 0,
    ),
    "must be a probability from 0 to below 1": (
        ("dropout", "attention_dropout", "activation_dropout"),
        lambda n: 0 <= n < 1,
    ),
}
"""Conditions on numeric fields that are not None."""
CHOICES: Mapping[str, Sequence[str]] = {
    "activation": [*ACTIVATIONS, *TRAINED],
    "order": ORDERS,
    "norm": NORMS,
    "qk_norm": QK_NORMS,
}


def check_sizes(spec: Any) -> None:
    """Raises ConfigError unless `spec`, a `ModelSpec` (it imports this module), has a known family and valid sizes."""
    find_family(spec.family)
    optional = [n for n in ("max_context", "embedding_width") if getattr(spec, n) is not None]
    for name in (*SIZES, *optional):
        check_whole(f"ModelSpec: {name}", getattr(spec, name), 0 if name == "hidden" else 1)
    with as_error(ConfigError, "ModelSpec"):
        Heads.of(spec.heads, spec.kv_heads)


def check(spec: Any) -> None:
    """Raises ConfigError unless a `ModelSpec` with valid sizes and one pattern per layer can be built."""
    for i, pattern in enumerate(spec.patterns):
        if len(pattern.heads) not in (1, spec.heads):
            raise ConfigError(
                f"ModelSpec: the pattern of layer {i} names {len(pattern.heads)} heads, "
                f"but there are {spec.heads}"
            )
    for what, (names, holds) in NUMBERS.items():
        for name in names:
            value = getattr(spec, name)
            if value is not None and not (isinstance(value, Real) and holds(value)):
                raise ConfigError(f"ModelSpec: {name} {what}, got {value!r}")
    for name, choices in CHOICES.items():
        value = getattr(spec, name)
        check_known(value, choices, f"ModelSpec: there is no {name}")
    check_gate("ModelSpec", spec.gate, spec.gate_act)
    _check_positions(spec)
    _check_mixers(spec)
    for what, is_so in {**_wrong(spec), **_wrong_beside_encoder(spec)}.items():
        if is_so:
            raise ConfigError(f"ModelSpec: {what}")


def _wrong(spec: Any) -> dict[str, bool]:
    """Returns the invalid combinations of fields, as messages, and whether the spec has them."""
    task, all_softmax = spec.head.task, len(spec.softmax_layers) == spec.layers
    orders = {order_of(spec, mixer) for mixer in spec.mixers}
    scaled = (spec.mlp_scale, spec.mlp_gate_scale) != (1, 1)
    fed = [spec.hidden_of(i) if e is None else e.hidden for i, e in enumerate(spec.experts)]
    return {
        f'order {spec.order!r} needs a feed-forward in every layer; use order="pre" for layers without one': (
            spec.order in BESIDE and not all(fed)
        ),
        f'first_norm=False needs order "pre" or "sandwich", got {spec.order!r}': (
            not spec.first_norm and spec.order not in ("pre", "sandwich")
        ),
        f"layers have the orders of norms {', '.join(sorted(orders))}; only pre and output can be mixed": (
            len(orders) > 1 and not orders <= {*BESIDE_OTHERS}
        ),
        "norm_weight=False excludes norm_offset and norm_bias": (
            not spec.norm_weight and bool(spec.norm_offset or spec.norm_bias)
        ),
        "mlp_scale and mlp_gate_scale are not supported with experts": any(spec.experts) and scaled,
        "mlp_sparsity above 0 needs layers with a gated feed-forward without experts": any(
            share > 0 and not (spec.gated and experts is None and spec.hidden_of(i))
            for i, (share, experts) in enumerate(zip(spec.mlp_sparsity, spec.experts, strict=True))
        ),
        f"per_layer_vocab={spec.per_layer_vocab} needs a per_layer_embedding, and must be below vocab={spec.vocab}": (
            bool(spec.per_layer_vocab)
            and not (spec.per_layer_embedding and spec.per_layer_vocab < spec.vocab)
        ),
        'laurel needs a decoder with order "pre" or "sandwich" and first_norm=True': (
            spec.laurel > 0
            and not (orders <= {"pre", "sandwich"} and spec.first_norm and spec.kind == "decoder")
        ),
        "altup needs a decoder without layer_scalar": (
            spec.altup is not None and (spec.layer_scalar or spec.kind != "decoder")
        ),
        "mlp_gate_scale needs gated=True": spec.mlp_gate_scale != 1 and not spec.gated,
        'qk_norm="all" needs norm="rms"': spec.qk_norm == "all" and spec.norm != "rms",
        'qk_norm="rotated" needs rotations that do not depend on the length': (
            spec.qk_norm == "rotated" and spec.positions.length_dependent
        ),
        'qk_norm="rotated" and query_growth need softmax attention in all layers, without global_projections': (
            (spec.qk_norm == "rotated" or spec.positions.grows)
            and bool(not all_softmax or spec.global_projections)
        ),
        "layer_hidden is for layers without experts; give the width of experts as Experts(hidden=...)": any(
            size != 0 and experts is not None
            for size, experts in zip(spec.layer_hidden, spec.experts, strict=True)
        ),
        f"hidden={spec.hidden} is the width of no layer; set it to that of the experts": any(fed)
        and spec.hidden not in fed,
        "positions with one table of scores for all layers need one head_dim in all layers": (
            spec.positions.marks == "scores"
            and spec.positions.shared
            and any(head_dim != spec.head_dim for _, head_dim in spec.key_sizes)
        ),
        f"per_layer_embedding does not support activation={spec.activation!r}, which has parameters": (
            spec.per_layer_embedding > 0 and spec.activation in TRAINED
        ),
        f"logit_cap needs logits over the vocab, but Head({task!r}) has none": (
            spec.logit_cap is not None and not spec.head.needs_vocab
        ),
        f"a decoder needs Head('lm'), got Head({task!r})": spec.causal and task != "lm",
        "an encoder cannot have Head('lm'); give another head": not spec.causal and task == "lm",
        f"tied=True needs an output layer over the vocab, but Head({task!r}) has none": (
            spec.tied and not spec.head.needs_vocab
        ),
        f"embedding_width={spec.columns} needs a dense layer before the output, Head(dense=...), or must be the width, "
        f"{spec.width}": spec.columns != spec.width and task == "lm" and spec.head.dense is None,
        "global_projections needs an encoder with softmax attention in all layers": spec.global_projections
        and (spec.causal or not all_softmax),
    }


def _wrong_beside_encoder(spec: Any) -> dict[str, bool]:
    other = spec.encoder
    if other is None:
        return {"shared_embedding=True needs encoder=": spec.shared_embedding}
    sizes, others = (spec.vocab, spec.columns), (other.vocab, other.columns)
    return {
        "Head(dense=...) is not supported in a decoder with an encoder": spec.head.dense is not None,
        "encoder= needs a decoder, and an encoder with causal=False, Head('states') and no encoder of its own": (
            not spec.causal or other.causal or other.encoder is not None or other.head.task != "states"
        ),
        f'an encoder needs a decoder of order "pre" or "post", got {spec.order!r}': spec.order not in CROSSED,
        f"the encoder's width {other.width} must equal the decoder's, {spec.width}": other.width
        != spec.width,
        f"shared_embedding=True needs equal sizes, got {others[0]} x {others[1]} and {sizes[0]} x {sizes[1]}": (
            spec.shared_embedding and others != sizes
        ),
    }


def _check_positions(spec: Any) -> None:
    if not isinstance(spec.positions, PositionScheme):
        raise ConfigError(
            "ModelSpec: positions must be a scheme such as Rotary(10000.0, pairing='halves'), "
            f"got {spec.positions!r}"
        )
    check_layers(spec)
    for positions, (_, head_dim) in zip(spec.layer_positions, spec.key_sizes, strict=True):
        positions.check_head_dim(head_dim)
    limit = spec.positions.limit
    if limit is not None and limit < spec.trained_context:
        raise ConfigError(
            f"ModelSpec: trained_context={spec.trained_context} is longer than the table of {limit} positions; "
            "lengthen the table, or lower trained_context"
        )


def _seen(spec: Any, mixer: object) -> Pattern:
    """Returns the pattern of a layer that is not softmax attention."""
    return Causal() if spec.causal or not kind_of(mixer).both_sides else Full()


def _check_mixers(spec: Any) -> None:
    for i, (mixer, pattern) in enumerate(zip(spec.mixers, spec.patterns, strict=True)):
        if not isinstance(mixer, Softmax) and pattern != _seen(spec, mixer):
            raise ConfigError(
                f"ModelSpec: layer {i} is {kind_of(mixer).name}, whose pattern must be {_seen(spec, mixer)}, got "
                f"{pattern}; give one pattern per layer"
            )
    for name, kind in silent_fields(spec.mixers).items():
        if getattr(spec, name) != getattr(type(spec), name):
            raise ConfigError(
                f"ModelSpec: {name}={getattr(spec, name)!r} has no effect on {kind.name}: {kind.why}; leave it out "
                "(`with_mixer` does)"
            )
    marks = spec.positions.marks
    if marks in ("queries and keys", "scores") and not any(kind_of(m).positions for m in spec.mixers):
        raise ConfigError(
            f"ModelSpec: positions act on {marks}, but no layer has any; give NoPositions() (`with_mixer` does)"
        )


def expand_mixers(mixers: Any, layers: int, spec: Any) -> tuple[object, ...]:
    """Returns one mixer per layer, without sizes equal to the spec's; equal mixers fit any number of layers. Raises
    ConfigError for a value that is no mixer, and for a list whose length does not divide `layers`."""
    each = tuple(mixers) if isinstance(mixers, list | tuple) else (mixers,)
    for mixer in each:
        kind_of(mixer)
    each = tuple(own_sizes(mixer, spec) if isinstance(mixer, Softmax) else mixer for mixer in each)
    return by_layer("mixers", each[:1] if len(set(each)) == 1 else each, layers)


def mixed_fields(spec: Any, mixers: Any) -> dict[str, Any]:
    """Returns the fields that change in the same model with these mixers: see `ModelSpec.with_mixer`."""
    each = expand_mixers(mixers, spec.layers, spec)
    pairs = zip(each, spec.patterns, strict=True)
    patterns = tuple(
        pattern if isinstance(mixer, Softmax) else _seen(spec, mixer) for mixer, pattern in pairs
    )
    silent: dict[str, Any] = {name: getattr(type(spec), name) for name in silent_fields(each)}
    if not any(kind_of(mixer).positions for mixer in each) and spec.positions.marks != "embeddings":
        silent["positions"] = NoPositions()
    return {"mixers": each, "patterns": patterns, **silent}


def expand_patterns(
    patterns: Pattern | Sequence[Pattern], layers: int, causal: bool = True
) -> tuple[Pattern, ...]:
    """Returns one pattern per layer, from one for all layers or a list that is repeated a whole number of times.

    Raises ConfigError if its length does not divide `layers`, or an entry is no pattern, or not causal if it must be.
    """
    values = (patterns,) if isinstance(patterns, Pattern) else patterns
    if isinstance(values, str) or not all(isinstance(p, Pattern) for p in values):
        raise ConfigError(
            f"ModelSpec: patterns must be Pattern values such as Causal() or Window.last(512), got {patterns!r}; "
            "convert text by headway.patterns.parse"
        )
    repeated = by_layer("patterns", values, layers)
    for i, pattern in enumerate(values):
        if causal and not pattern.is_causal:
            raise ConfigError(
                f"ModelSpec: the pattern of layer {i}, {pattern}, lets a token see later ones, which a decoder "
                "must predict; restrict it: Causal() & ..."
            )
    return repeated


def expand_experts(
    experts: Experts | Sequence[Experts | None] | None, layers: int, hidden: int
) -> tuple[Experts | None, ...]:
    """Returns the experts of each layer, from one value for all or a list that is repeated; their width is `hidden` if
    they state none, and experts of width 0 become None.

    Raises ConfigError for other values, if the length does not divide `layers`, and if no layer is `hidden` wide.
    """
    values = (experts,) if experts is None or isinstance(experts, Experts) else experts
    if isinstance(values, str) or not all(e is None or isinstance(e, Experts) for e in values):
        raise ConfigError(
            f"ModelSpec: experts must be values such as Experts(count=8, top=2), or None, got {experts!r}"
        )
    each = [e if e is None or e.hidden else replace(e, hidden=hidden) for e in values]
    each = [e if e is not None and e.hidden else None for e in each]
    if not any(each):
        return (None,) * layers
    widths = [hidden if e is None else e.hidden for e in each]
    if hidden not in widths:
        raise ConfigError(
            f"ModelSpec: hidden={hidden} is the width of no layer: all have experts of {widths[0]}; give hidden="
            f"{widths[0]}"
        )
    if not all(widths):
        raise ConfigError(
            "ModelSpec: hidden=0 means no feed-forward in any layer, so experts are not possible"
        )
    repeated = by_layer("experts", each, layers)
    if (total := sum(e.count for e in repeated if e is not None)) > MOST_EXPERTS:
        raise ConfigError(f"ModelSpec: {total:,} experts in all layers exceed the limit of {MOST_EXPERTS:,}")
    return repeated
