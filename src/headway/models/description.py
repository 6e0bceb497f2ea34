"""A spec in words, aspect by aspect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import NamedTuple

from headway.models.spec import ModelSpec

ORDERS = {
    "pre": "x + f(norm(x))",
    "post": "norm(x + f(x))",
    "parallel": "x + attention(norm(x)) + feed-forward(norm'(x))",
    "joint": "x + attention(norm(x)) + feed-forward(norm(x))",
}
NORMS = {"rms": "RMSNorm: x / sqrt(mean x^2 + eps)", "layer": "LayerNorm: (x - mean x) / sqrt(var x + eps)"}


class Aspect(NamedTuple):
    """Fields of a spec that are described, and changed, together."""

    fields: tuple[str, ...]
    words: Callable[[ModelSpec], str]


def brief(value: object) -> str:
    """A dataclass as text, without the fields that are as usual: Rotary(pairing='halves')."""
    if not is_dataclass(value):
        return repr(value)
    told = [
        f"{f.name}={brief(getattr(value, f.name))}"
        for f in fields(value)
        if getattr(value, f.name) != f.default
    ]
    return f"{type(value).__name__}({', '.join(told)})"


def patterns_by_layer(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """(layers, pattern) for each pattern, as text."""
    where: dict[str, list[int]] = {}
    for number, pattern in enumerate(spec.patterns):
        where.setdefault(str(pattern), []).append(number)
    return tuple((layer_numbers(numbers), pattern) for pattern, numbers in where.items())


def layer_numbers(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5, 7 as "0-2, 5, 7"; an even stride of three or more as "0, 2 .. 10"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    steps = {b[0] - a[0] for a, b in pairwise(runs)}
    if len(runs) > 3 and len(steps) == 1 and all(len(run) == 1 for run in runs):
        return f"{runs[0][0]}, {runs[1][0]} .. {runs[-1][0]}"
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _order(spec: ModelSpec) -> str:
    more = ["the embedding"] * spec.embedding_norm + ["the last layer"] * spec.final_norm
    return f"{spec.order}: {ORDERS[spec.order]}" + (
        f", and a norm behind {' and '.join(more)}" if more else ""
    )


def _norm(spec: ModelSpec) -> str:
    return f"{NORMS[spec.norm]}{', with a bias' * spec.norm_bias}; eps {spec.norm_eps:g}"


def heads(spec: ModelSpec) -> str:
    """How many there are, and of what width."""
    return f"{spec.heads} query, {spec.kv_heads} key/value ({spec.layout.kind}), {spec.head_dim} dims each"


def _scores(spec: ModelSpec) -> str:
    if spec.linear is not None:
        return f"linear attention: {brief(spec.linear)}"
    scale = "q . k / sqrt(D)" if spec.attention_scale is None else f"q . k * {spec.attention_scale:g}"
    return (
        scale
        + ", q and k normed" * spec.qk_norm
        + ", own projections of global tokens" * spec.global_projections
    )


def _feed_forward(spec: ModelSpec) -> str:
    if not spec.hidden:
        return "none: layers of attention alone"
    inner = f"{spec.activation}(gate x) * up x" if spec.gated else f"{spec.activation}(up x)"
    return f"down({inner}), {spec.hidden:,} wide"


def _positions(spec: ModelSpec) -> str:
    return f"on {spec.positions.marks}: {brief(spec.positions)}"


def _patterns(spec: ModelSpec) -> str:
    found = patterns_by_layer(spec)
    return found[0][1] if len(found) == 1 else "; ".join(f"layers {layers}: {p}" for layers, p in found)


def biases(spec: ModelSpec) -> str:
    """Which projections have one."""
    there = {
        "query, key, value": spec.qkv_bias,
        "attention output": spec.out_bias,
        "feed-forward": spec.mlp_bias,
        "output layer": spec.output_bias,
    }
    return ", ".join(name for name, has in there.items() if has) or "none"


def _embedding(spec: ModelSpec) -> str:
    return "".join(
        (
            f"vocabulary {spec.vocab:,}",
            f" of {spec.embedding_width} columns" if spec.embedding_width is not None else "",
            f", times {spec.embedding_scale:.4g}" if spec.embedding_scale != 1 else "",
            f", {spec.token_types} token types" if spec.token_types else "",
            ", is the output layer" if spec.tied else "",
            ", is the encoder's too" if spec.shared_embedding else "",
            f", states times {spec.logit_scale:.4g} in front of the output" if spec.logit_scale != 1 else "",
        )
    )


def _context(spec: ModelSpec) -> str:
    longest = "" if spec.max_context is None else f", no more than {spec.max_context:,}"
    return f"trained on {spec.trained_context:,} tokens{longest}"


def _dropout(spec: ModelSpec) -> str:
    at = {
        "sub-layers": spec.dropout,
        "weights of attention": spec.attention_dropout,
        "hidden layer": spec.activation_dropout,
    }
    found = [f"{probability:g} on {place}" for place, probability in at.items() if probability]
    found += ["on the last states"] * spec.final_dropout + ["before the classifier"] * spec.pooled_dropout
    return ", ".join(found) or "none"


def _encoder(spec: ModelSpec) -> str:
    if spec.encoder is None:
        return "none"
    return "; ".join(ASPECTS[name].words(spec.encoder) for name in ("layers", "heads", "feed-forward"))


ASPECTS: Mapping[str, Aspect] = {
    "kind": Aspect(("causal", "head"), lambda spec: f"{spec.kind}, {brief(spec.head)}"),
    "encoder": Aspect(("encoder",), _encoder),
    "layers": Aspect(("layers", "width"), lambda spec: f"{spec.layers} layers of width {spec.width:,}"),
    "order": Aspect(("order", "final_norm", "embedding_norm"), _order),
    "norm": Aspect(("norm", "norm_bias", "norm_eps"), _norm),
    "positions": Aspect(("positions",), _positions),
    "feed-forward": Aspect(("hidden", "gated", "activation"), _feed_forward),
    "heads": Aspect(("heads", "kv_heads", "head_dim"), heads),
    "scores": Aspect(("attention_scale", "qk_norm", "global_projections", "linear"), _scores),
    "patterns": Aspect(("patterns",), _patterns),
    "biases": Aspect(("qkv_bias", "out_bias", "mlp_bias", "output_bias"), biases),
    "embedding": Aspect(
        (
            "vocab",
            "embedding_width",
            "embedding_scale",
            "token_types",
            "tied",
            "shared_embedding",
            "logit_scale",
        ),
        _embedding,
    ),
    "context": Aspect(("trained_context", "max_context"), _context),
    "dropout": Aspect(
        ("dropout", "attention_dropout", "activation_dropout", "final_dropout", "pooled_dropout"), _dropout
    ),
    "fresh weights": Aspect(("init_std",), lambda spec: f"standard deviation {spec.init_std:g}"),
    "family": Aspect(("family",), lambda spec: spec.family),
}
"""All fields of a spec, in the order in which one model is turned into another."""
