"""Describes a spec in words, aspect by aspect."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import pairwise
from typing import NamedTuple

from headway.heads import Heads
from headway.models.mixers import Softmax, kind_of
from headway.models.spec import ModelSpec
from headway.positions import PerLayer

ORDERS = {
    "pre": "x + f(norm(x))",
    "post": "norm(x + f(x))",
    "parallel": "x + attention(norm(x)) + feed-forward(norm'(x))",
    "joint": "x + attention(norm(x)) + feed-forward(norm(x))",
    "sandwich": "x + norm'(f(norm(x)))",
    "output": "x + norm(f(x))",
}
NORMS = {"rms": "RMSNorm: x / sqrt(mean x^2 + eps)", "layer": "LayerNorm: (x - mean x) / sqrt(var x + eps)"}


class Aspect(NamedTuple):
    """Fields of a spec that are described, and changed, together.

    Attributes:
        told: fields that `always` puts into words.
        unusual: fields that are named, with their value, if it is not the default of `ModelSpec`.
    """

    told: tuple[str, ...]
    always: Callable[[ModelSpec], str]
    unusual: tuple[str, ...]

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of all fields of the aspect."""
        return (*self.told, *self.unusual)

    def words(self, spec: ModelSpec) -> str:
        """Returns the description of these fields of `spec`."""
        parts = [self.always(spec), *(_named(name, getattr(spec, name)) for name in self.unusual)]
        return ", ".join(filter(None, parts)) or "none"


def _named(name: str, value: object) -> str:
    """Returns a field and its value in words, True as the name alone; "" for the default."""
    words = name.replace("_", " ")
    if value == getattr(ModelSpec, name):
        return ""
    if isinstance(value, str):
        return f"{words} {value}"
    if isinstance(value, bool):
        return words if value else f"no {words}"
    if not isinstance(value, int | float):
        return brief(value)
    return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value:.4g}"


def _aspect(told: str, always: Callable[[ModelSpec], str] = lambda spec: "", unusual: str = "") -> Aspect:
    return Aspect(tuple(told.split()), always, tuple(unusual.split()))


def brief(value: object) -> str:
    """Returns a dataclass as text, without fields that have their default value: Rotary(pairing='halves')."""
    if not is_dataclass(value):
        return repr(value)
    arguments = [
        f"{f.name}={brief(getattr(value, f.name))}"
        for f in fields(value)
        if getattr(value, f.name) != f.default
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


def patterns_by_layer(spec: ModelSpec) -> tuple[tuple[str, str], ...]:
    """Returns (layers, pattern) as text for each distinct pattern."""
    return _by_layer(map(str, spec.patterns))


def positions_in_words(spec: ModelSpec) -> str:
    """Returns the position schemes in words, by layer if they differ."""
    if not isinstance(spec.positions, PerLayer):
        return brief(spec.positions)
    return _in_words(_by_layer(map(brief, spec.layer_positions)))


def _by_layer(values: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Returns (layers, value) for each distinct value; `values` are those of layers 0, 1, ..."""
    layers_of: dict[str, list[int]] = {}
    for number, value in enumerate(values):
        layers_of.setdefault(value, []).append(number)
    return tuple((layer_numbers(numbers), value) for value, numbers in layers_of.items())


def layer_numbers(numbers: Sequence[int]) -> str:
    """Returns 0, 1, 2, 5, 7 as "0-2, 5, 7"; four or more single numbers at an even stride as "0, 2 .. 10"."""
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


def _heads(spec: ModelSpec) -> str:
    return _in_words(_by_layer(_of_heads(spec, i) for i in range(spec.layers)))


def _of_heads(spec: ModelSpec, layer: int) -> str:
    kv_heads, head_dim = spec.key_sizes[layer]
    kind, source = Heads.of(spec.heads, kv_heads).kind, spec.key_layers[layer]
    of = "" if source == layer else f" of layer {source}"
    return f"{spec.heads} query, {kv_heads} key/value{of} ({kind}), {head_dim} dims each"


def _scores(spec: ModelSpec) -> str:
    softmax = "q . k / sqrt(D)" if spec.attention_scale is None else f"q . k * {spec.attention_scale:g}"
    return _in_words(
        _by_layer(
            softmax + _of_values(m) if isinstance(m, Softmax) else f"{kind_of(m).name}: {brief(m)}"
            for m in spec.mixers
        )
    )


def _of_values(mixer: Softmax) -> str:
    values = ", normed values" * mixer.v_norm + ", values are keys" * mixer.tied_values
    if mixer.beside is None:
        return values
    factors = "" if mixer.factors == (1.0, 1.0) else " times {:g} and {:g}".format(*mixer.factors)
    return f"{values}, beside {kind_of(mixer.beside).name}: {brief(mixer.beside)}{factors}"


def _feed_forward(spec: ModelSpec) -> str:
    if not spec.hidden:
        return "none: layers of attention alone"
    inner = f"{spec.activation}(gate x) * up x" if spec.gated else f"{spec.activation}(up x)"
    return f"down({inner}), {_in_words(_by_layer(_wide(spec, i) for i in range(spec.layers)))}"


def _wide(spec: ModelSpec, layer: int) -> str:
    """Returns the hidden units of one layer in words; with experts, also how they are chosen."""
    experts = spec.experts[layer]
    if experts is None:
        cut = f", {share:.0%} of gates cut" if (share := spec.mlp_sparsity[layer]) else ""
        return f"{hidden:,} wide{cut}" if (hidden := spec.hidden_of(layer)) else "none"
    more = [
        f"{f.name.replace('_', ' ')} {value}"
        for f in fields(experts)[3:]
        if (value := getattr(experts, f.name)) != f.default
    ]
    return ", ".join((f"{experts.top} of {experts.count} experts", f"{experts.hidden:,} wide", *more))


def _patterns(spec: ModelSpec) -> str:
    return _in_words(patterns_by_layer(spec))


def _in_words(by_layer: Sequence[tuple[str, str]]) -> str:
    if len(by_layer) == 1:
        return by_layer[0][1]
    return "; ".join(f"layers {layers}: {value}" for layers, value in by_layer)


def _encoder(spec: ModelSpec) -> str:
    if spec.encoder is None:
        return "none"
    return "; ".join(ASPECTS[name].words(spec.encoder) for name in ("layers", "heads", "feed-forward"))


ASPECTS: Mapping[str, Aspect] = {
    "kind": _aspect("causal head", lambda spec: f"{spec.kind}, {brief(spec.head)}"),
    "encoder": _aspect("encoder", _encoder),
    "layers": _aspect("layers width", lambda spec: f"{spec.layers} layers of width {spec.width:,}"),
    "order": _aspect(
        "order",
        lambda spec: f"{spec.order}: {ORDERS[spec.order]}",
        "final_norm embedding_norm first_norm residual_scale layer_scalar altup laurel",
    ),
    "norm": _aspect(
        "norm norm_eps",
        lambda spec: f"{NORMS[spec.norm]}, eps {spec.norm_eps:g}",
        "norm_bias norm_weight norm_offset",
    ),
    "positions": _aspect("positions", lambda spec: f"on {spec.positions.marks}: {positions_in_words(spec)}"),
    "feed-forward": _aspect(
        "hidden layer_hidden gated activation mlp_sparsity experts", _feed_forward, "mlp_scale mlp_gate_scale"
    ),
    "heads": _aspect("heads kv_heads head_dim", _heads),
    "scores": _aspect(
        "attention_scale mixers",
        _scores,
        "score_cap qk_norm sink_logit gate gate_act global_projections",
    ),
    "patterns": _aspect("patterns", _patterns),
    "biases": _aspect("", unusual="qkv_bias out_bias mlp_bias output_bias"),
    "embedding": _aspect(
        "vocab",
        lambda spec: f"vocab {spec.vocab:,}",
        "embedding_width embedding_scale per_layer_embedding per_layer_vocab token_types tied shared_embedding "
        "logit_scale logit_cap",
    ),
    "context": _aspect(
        "trained_context", lambda spec: f"trained on {spec.trained_context:,} tokens", "max_context"
    ),
    "dropout": _aspect(
        "", unusual="dropout attention_dropout activation_dropout final_dropout pooled_dropout"
    ),
    "fresh weights": _aspect("init_std", lambda spec: f"standard deviation {spec.init_std:g}"),
    "family": _aspect("family", lambda spec: spec.family),
}
"""All fields of a spec by aspect, in the order in which `ladder` turns one model into another."""
