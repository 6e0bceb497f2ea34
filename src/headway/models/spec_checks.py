"""What must hold for a `ModelSpec`: errors before anything is built."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.errors import ConfigError, as_error, check_known, check_whole
from headway.heads import Heads
from headway.models.families import find_family
from headway.nn import ACTIVATIONS
from headway.nn.attention import QK_NORMS
from headway.nn.block import BESIDE, ORDERS
from headway.nn.gates import check_gate
from headway.nn.norms import NORMS
from headway.patterns import Causal, Full, Pattern
from headway.positions import PositionScheme

SIZES = ("vocab", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "trained_context")
NUMBERS: Mapping[str, tuple[tuple[str, ...], Callable[[Any], bool]]] = {
    "must lie between 0.0 and 1.0": (("norm_eps",), lambda n: 0 < n < 1),
    "must be a number above 0": (
        (
            *("init_std", "embedding_scale", "logit_scale", "attention_scale"),
            *("residual_scale", "logit_cap", "score_cap"),
        ),
        lambda n: 0 < n < math.inf,
    ),
    "must be a number from 0 to 1": (("norm_offset",), lambda n: 0 <= n <= 1),
    "counts rows of a table, 0 or more": (("token_types",), lambda n: type(n) is int and n >= 0),
    "is a probability from 0 to below 1": (
        ("dropout", "attention_dropout", "activation_dropout"),
        lambda n: 0 <= n < 1,
    ),
}
"""What must hold for fields that are numbers, where they are not None."""
CHOICES: Mapping[str, Sequence[str]] = {
    "activation": [*ACTIVATIONS],
    "order": ORDERS,
    "norm": NORMS,
    "qk_norm": QK_NORMS,
}


def check_sizes(spec: Any) -> None:
    """Raises ConfigError unless `spec`, a `ModelSpec` (which imports this module), has a family and sizes that fit."""
    find_family(spec.family)
    optional = [n for n in ("max_context", "embedding_width") if getattr(spec, n) is not None]
    for name in (*SIZES, *optional):
        check_whole(f"ModelSpec: {name}", getattr(spec, name), 0 if name == "hidden" else 1)
    with as_error(ConfigError, "ModelSpec"):
        Heads.of(spec.heads, spec.kv_heads)


def check(spec: Any) -> None:
    """Raises ConfigError unless a `ModelSpec` whose sizes fit, and whose patterns are one per layer, can be built."""
    for i, pattern in enumerate(spec.patterns):
        if len(pattern.heads) not in (1, spec.heads):
            raise ConfigError(
                f"ModelSpec: the pattern of layer {i} names {len(pattern.heads)} heads, "
                f"but there are {spec.heads}"
            )
    for what, (names, holds) in NUMBERS.items():
        for name in names:
            value = getattr(spec, name)
            if value is not None and not holds(value):
                raise ConfigError(f"ModelSpec: {name} {what}, got {value!r}")
    for name, choices in CHOICES.items():
        value = getattr(spec, name)
        check_known(value, choices, f"ModelSpec: there is no {name}")
    check_gate("ModelSpec", spec.gate, spec.gate_act)
    _check_positions(spec)
    for what, is_so in {**_wrong(spec), **_wrong_beside_encoder(spec)}.items():
        if is_so:
            raise ConfigError(f"ModelSpec: {what}")


def _wrong(spec: Any) -> dict[str, bool]:
    """Fields that do not go together, and whether they are there."""
    task, linear = spec.head.task, spec.linear is not None
    seen = Causal() if spec.causal else Full()
    return {
        f'order {spec.order!r} has a feed-forward beside attention, hidden=0 is none; use order="pre"': (
            not spec.hidden and spec.order in BESIDE
        ),
        f"order {spec.order!r} has no norm in front of attention alone: first_norm=False leaves out none": (
            not spec.first_norm and spec.order not in ("pre", "sandwich")
        ),
        'norm_offset is for norm="rms"': bool(spec.norm_offset) and spec.norm != "rms",
        f"logit_cap is of logits over a vocab, and Head({task!r}) has none": (
            spec.logit_cap is not None and not spec.head.needs_vocab
        ),
        f"a decoder predicts what follows (Head('lm')), got Head({task!r})": spec.causal and task != "lm",
        f"an encoder has no Head('lm'), got Head({task!r})": not spec.causal and task == "lm",
        f"tied joins output layer and embedding, and Head({task!r}) has none": (
            spec.tied and not spec.head.needs_vocab
        ),
        f"an embedding of {spec.columns} columns is for encoders; a decoder's has {spec.width}": (
            spec.columns != spec.width and task == "lm"
        ),
        "global_projections are for encoders with softmax attention: a decoder's cache keeps one key per token, and "
        "global queries need another": spec.global_projections and (spec.causal or linear),
        "linear attention sums over all that is seen, so its patterns are Causal() in a decoder and Full() in an "
        f"encoder, got {next((p for p in spec.patterns if p != seen), seen)}": (
            linear and any(p != seen for p in spec.patterns)
        ),
        "linear attention has no weights to drop and no scores to scale or to cap; set attention_dropout=0.0, "
        "attention_scale=None, score_cap=None and sink_logit=False (`with_linear` does)": linear
        and bool(
            spec.attention_dropout
            or spec.attention_scale is not None
            or spec.score_cap is not None
            or spec.sink_logit
        ),
    }


def _wrong_beside_encoder(spec: Any) -> dict[str, bool]:
    other = spec.encoder
    if other is None:
        return {"shared_embedding is the encoder's, and there is no encoder": spec.shared_embedding}
    sizes, others = (spec.vocab, spec.columns), (other.vocab, other.columns)
    return {
        "encoder= joins an encoder (causal=False, Head('states'), no encoder of its own) to a decoder": (
            not spec.causal or other.causal or other.encoder is not None or other.head.task != "states"
        ),
        f"the encoder's width {other.width} must be the decoder's, {spec.width}": other.width != spec.width,
        f"a shared embedding has one size, got {others[0]} x {others[1]} and {sizes[0]} x {sizes[1]}": (
            spec.shared_embedding and others != sizes
        ),
    }


def _check_positions(spec: Any) -> None:
    if not isinstance(spec.positions, PositionScheme):
        raise ConfigError(
            "ModelSpec: positions must be a scheme such as Rotary(10000.0, pairing='halves'), "
            f"got {spec.positions!r}"
        )
    for positions in spec.layer_positions:
        positions.check_head_dim(spec.head_dim)
    limit = spec.positions.limit
    if limit is not None and limit < spec.trained_context:
        raise ConfigError(
            f"ModelSpec: a table of {limit} positions cannot have been trained on rows of "
            f"{spec.trained_context}; lengthen the table, or lower trained_context"
        )


def expand_patterns(
    patterns: Pattern | Sequence[Pattern], layers: int, causal: bool = True
) -> tuple[Pattern, ...]:
    """One pattern per layer: one for all, or a list that is repeated a whole number of times.

    Raises ConfigError when the length does not divide `layers`, or an entry is no pattern, or looks ahead where
    that is not allowed (`causal`)."""
    given = (patterns,) if isinstance(patterns, Pattern) else patterns
    if isinstance(given, str) or not all(isinstance(p, Pattern) for p in given):
        raise ConfigError(
            f"ModelSpec: patterns must be Pattern values such as Causal() or Window.last(512), got {patterns!r}; "
            "text becomes a pattern by headway.patterns.parse"
        )
    if not given or layers % len(given):
        raise ConfigError(
            f"ModelSpec: {len(given)} patterns do not fit {layers} layers; give one for all, one per layer, or "
            f"a list that is repeated (its length must divide {layers})"
        )
    for i, pattern in enumerate(given):
        if causal and not pattern.is_causal:
            raise ConfigError(
                f"ModelSpec: the pattern of layer {i}, {pattern}, lets a token see later ones, which a decoder "
                "must predict; restrict it: Causal() & ..."
            )
    return tuple(given) * (layers // len(given))
