"""The token mixers that layers of a model may have: one table, with a row for each kind.

Legend: M width, H query heads, K kv heads, D per head, E per value; e bytes per number, w = max(e, 4).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from headway.attention.delta import DeltaSpec, RuleSizes, SSDSpec
from headway.attention.linear_attention import LinearAttentionSpec, choose_form
from headway.errors import ConfigError
from headway.nn import (
    SSD,
    Attention,
    AttentionBeside,
    AttentionLayer,
    GatedDelta,
    GlobalAttention,
    LayerNorm,
    LinearAttention,
    MixingLayer,
    RMSNorm,
    ShortConv,
    ShortConvolution,
    make_norm,
)
from headway.patterns import Pattern
from headway.positions import PositionScheme


@dataclass(frozen=True, kw_only=True)
class Softmax:
    """Softmax attention over the layer's pattern, described by the other fields of a `ModelSpec`, with the settings
    that are specific to this layer.

    kv_heads, head_dim: K and D of this layer; those of the spec if None.
    v_norm: whether every value has a norm without weights (Gemma 4).
    tied_values: whether values are the keys before their norm and rotation, so that there is no v_proj.
    kv_from: number of an earlier layer with the same pattern and positions whose keys and values this layer attends
    to; it has no key and value projections and no KV cache of its own. K and D are those of that layer (Gemma 3n, 4).
    beside: another mixer, with a recurrent state, that reads the same tokens; the layer's output is the sum of both
    outputs times `factors` (`headway.nn.AttentionBeside`; Falcon-H1).
    """

    kv_heads: int | None = None
    head_dim: int | None = None
    v_norm: bool = False
    tied_values: bool = False
    kv_from: int | None = None
    beside: object | None = None
    factors: tuple[float, ...] = (1.0, 1.0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "factors", tuple(self.factors))


def differ(mixers: Sequence[object]) -> bool:
    """Returns whether any softmax layer has sizes of its own, other settings for values, or another layer's keys."""
    plain = (replace(m, beside=None, factors=(1.0, 1.0)) for m in mixers if isinstance(m, Softmax))
    return any(mixer != Softmax() for mixer in plain)


def beside_layers(mixers: Sequence[object]) -> list[int]:
    """Returns the numbers of the layers that have a mixer beside attention."""
    return [i for i, mixer in enumerate(mixers) if getattr(mixer, "beside", None) is not None]


def parts_of(mixer: object) -> list[object]:
    """Returns the mixers of a layer: `mixer`, and the one beside it, if any."""
    beside = getattr(mixer, "beside", None)
    return [mixer] if beside is None else [mixer, beside]


def states_of(mixers: Iterable[object]) -> list[object]:
    """Returns the distinct mixers that keep a recurrent state."""
    each = dict.fromkeys(part for mixer in mixers for part in parts_of(mixer))
    return [part for part in each if not isinstance(part, Softmax)]


@dataclass(frozen=True, kw_only=True)
class MixerKind:
    """A kind of mixer. In the functions, `spec` is a `ModelSpec` (whose module imports this one) and `mixer` a value
    of the kind.

    Attributes:
        name: name of the kind.
        layer: (spec, mixer, pattern, positions, backend) -> the layer, which defines what its cache stores
            (`MixingLayer.state`).
        silent: fields of a spec that do not affect its layers.
        why: the reason for that, for error messages.
        positions: whether its layers apply positions to queries, keys or scores.
        both_sides: whether its layers are bidirectional in an encoder: their pattern is then Full(), else Causal().
        flops: (spec, mixer, pattern, n) -> operations on n tokens of a row besides the products with weights.
        saved: (spec, mixer, e) -> bytes per token that are saved for the backward pass, besides those of norms.
        first: (spec, mixer) -> numbers per token that a first forward pass holds at once besides the residual stream
            and its norm, if they are more than those of softmax attention.
    """

    name: str
    layer: Callable[[Any, Any, Pattern, PositionScheme, str], MixingLayer]
    silent: Sequence[str] = ()
    why: str = ""
    positions: bool = False
    both_sides: bool = False
    flops: Callable[[Any, Any, Pattern, int], float] = lambda spec, mixer, pattern, n: 0.0
    saved: Callable[[Any, Any, int], int] = lambda spec, mixer, e: 0
    first: Callable[[Any, Any], int] = lambda spec, mixer: 0


def kind_of(mixer: object) -> MixerKind:
    """Returns the row of `MIXERS` for a mixer. Raises ConfigError if there is none."""
    if type(mixer) not in MIXERS:
        known = ", ".join(kind.__name__ for kind in MIXERS)
        raise ConfigError(f"ModelSpec: mixers must be values of {known}, got {mixer!r}")
    return MIXERS[type(mixer)]


def silent_fields(mixers: Iterable[object]) -> Mapping[str, MixerKind]:
    """Returns the fields of a spec that affect none of its layers, each with a kind that explains why."""
    kinds = [kind_of(mixer) for mixer in dict.fromkeys(mixers)]
    return {name: kinds[0] for name in kinds[0].silent if all(name in kind.silent for kind in kinds)}


def state_kinds(spec: Any) -> str:
    """Returns the names of the spec's mixers that keep a recurrent state, joined by "and"; "" if there are none."""
    return " and ".join(kind_of(mixer).name for mixer in states_of(spec.mixers))


def order_of(spec: Any, mixer: object) -> Any:
    """Returns the order of norms in layers with this mixer."""
    return (mixer.order if isinstance(mixer, DeltaSpec) else None) or spec.order


def norm_of(spec: Any) -> Callable[[int], RMSNorm | LayerNorm]:
    """Returns the constructor of the model's norms, which takes a width."""
    kind, bias, offset, weight = spec.norm, spec.norm_bias, spec.norm_offset, spec.norm_weight
    return partial(make_norm, kind, eps=spec.norm_eps, bias=bias, offset=offset, weight=weight)


def options_of(spec: Any, positions: PositionScheme, **others: Any) -> dict[str, Any]:
    """Returns the keyword arguments of the attention layers of a spec; `others` replace or extend them."""
    return {
        "positions": positions,
        "head_dim": spec.head_dim,
        "qkv_bias": spec.qkv_bias,
        "out_bias": spec.out_bias,
        "qk_norm": spec.qk_norm,
        "norm": norm_of(spec),
        "gate": spec.gate,
        "gate_act": spec.gate_act,
        "output_dropout": spec.dropout,
        **others,
    }


def attention(
    spec: Any,
    pattern: Pattern,
    positions: PositionScheme,
    backend: str,
    across: bool = False,
    mixer: Softmax = Softmax(),
    kv_from: MixingLayer | None = None,
) -> AttentionLayer:
    """Returns the softmax attention of one layer: to its own keys and values, to those of `kv_from` if given, or
    with `across` to an encoder's states."""
    kind: type[Attention] = GlobalAttention if spec.global_projections else Attention
    options: dict[str, Any] = {"gate": None} if across else {"score": spec.score}
    if mixer.beside is not None:
        beside = kind_of(mixer.beside).layer(spec, mixer.beside, pattern, positions, backend)
        kind, options = AttentionBeside, {**options, "beside": beside, "factors": mixer.factors}
    kv_heads, head_dim = mixer.kv_heads or spec.kv_heads, mixer.head_dim or spec.head_dim
    if isinstance(kv_from, AttentionLayer):
        kv_heads, head_dim = kv_from.heads.kv_heads, kv_from.head_dim
        options["kv_from"] = kv_from
    if mixer.v_norm:
        options["v_norm"] = partial(make_norm, spec.norm, eps=spec.norm_eps, bias=False, weight=False)
    options |= {"head_dim": head_dim, "tied_values": mixer.tied_values}
    return kind(
        *(spec.width, spec.heads, kv_heads),
        pattern=pattern,
        scale=spec.attention_scale,
        backend=backend,
        sink_logit=spec.sink_logit and not across,
        **options_of(spec, positions, dropout=spec.attention_dropout, **options),
    )


def _linear(
    spec: Any, mixer: LinearAttentionSpec, pattern: Pattern, positions: PositionScheme, backend: str
) -> LinearAttention:
    sizes = spec.width, spec.heads, spec.kv_heads
    return LinearAttention(*sizes, linear=mixer, pattern=pattern, **options_of(spec, positions))


def _linear_flops(spec: Any, mixer: LinearAttentionSpec, pattern: Pattern, n: int) -> float:
    sizes = mixer.features(spec.head_dim), spec.head_dim, spec.layout.group
    return float(spec.kv_heads * (choose_form(pattern, n, n, *sizes).flops or 0.0))


def _linear_saved(spec: Any, mixer: LinearAttentionSpec, e: int) -> int:
    """Returns the bytes per token in the chunked form: in w bytes per number queries and keys with their features
    (`_feature_numbers`), values, numerators and twice the denominators; in e bytes per number the output."""
    assert mixer.key_feature is not None
    h, k, d, w = spec.heads, spec.kv_heads, spec.head_dim, max(e, 4)
    rotates = spec.positions.marks == "queries and keys"
    query = _feature_numbers(mixer.feature, d, rotates, summed=False)
    key = _feature_numbers(mixer.key_feature, d, rotates, summed=not spec.causal)
    return int(w * (h * (query + d + 2) + k * (key + d)) + e * d * h)


def _feature_numbers(feature: str, d: int, rotates: bool, summed: bool) -> int:
    """Returns how many numbers a query or key saves with its features for numerator and denominator.

    Keys `summed` at once for all queries do not save their features for the denominator. "cosine" saves one feature
    vector for both, and its length before and after `eps`; a softmax saves only its result, rotated and unrotated, and
    a softmax over tokens also its exponentials and their sums.
    """
    if feature == "cosine":
        return 2 * d + 3
    if feature.startswith("softmax"):
        return d * (1 + rotates + 2 * (feature != "softmax"))
    return d * (3 - summed)


def _rule_saved(outs: int, spec: Any, mixer: RuleSizes, e: int) -> int:
    """Returns the bytes per token of queries, keys and values before their convolution, of `outs` outputs, and of each
    head's decays and betas.

    The outputs are: the read result, the gated result and the gate; in SSD also the values that its skip multiplies,
    and the norm before and after gains that groups do not share.
    """
    channels, out = sum(mixer.channels), mixer.heads * mixer.value_size
    outs -= 2 * (not getattr(mixer, "norm", True))
    return e * (channels + outs * out) + 4 * (3 * mixer.decays + 2 * mixer.heads)


def _rule_first(spec: Any, mixer: RuleSizes) -> int:
    """Returns the numbers per token of queries, keys and values before and after their convolution; and of the read
    result, its copy as the norm's input, its normed and gated forms, and the gate."""
    return 2 * sum(mixer.channels) + 5 * mixer.heads * mixer.value_size


def _rule(name: str, layer: type[GatedDelta] | type[SSD], products: int, outs: int) -> MixerKind:
    """Returns the kind of a layer whose state `delta_attend` updates. Its definition has `products` of D E numbers
    each: the update, what a query reads and, if the rule erases, what a key predicts."""
    return MixerKind(
        name=name,
        layer=lambda spec, mixer, *how: layer(
            spec.width, mixer, norm_eps=spec.norm_eps, output_dropout=spec.dropout
        ),
        silent=_HEADS,
        why=_NO_HEADS,
        flops=lambda spec, m, pattern, n: 2.0 * products * n * m.heads * m.head_dim * m.value_size,
        saved=partial(_rule_saved, outs),
        first=_rule_first,
    )


_WEIGHTS = ("attention_dropout", "attention_scale", "score_cap", "sink_logit", "global_projections")
_HEADS = (*_WEIGHTS, "qkv_bias", "out_bias", "qk_norm", "gate", "gate_act")
_NO_HEADS = "it has no attention heads"
MIXERS: dict[type, MixerKind] = {
    Softmax: MixerKind(
        name="softmax attention",
        layer=lambda spec, mixer, pattern, positions, backend: attention(
            spec, pattern, positions, backend, mixer=mixer
        ),
        positions=True,
        both_sides=True,
    ),
    LinearAttentionSpec: MixerKind(
        name="linear attention",
        layer=_linear,
        silent=_WEIGHTS,
        why="it has no attention weights to drop and no scores to scale or to cap",
        positions=True,
        both_sides=True,
        flops=_linear_flops,
        saved=_linear_saved,
    ),
    DeltaSpec: _rule("the gated delta rule", GatedDelta, products=3, outs=3),
    SSDSpec: _rule("state-space duality", SSD, products=2, outs=6),
    ShortConv: MixerKind(
        name="short convolutions",
        layer=lambda spec, mixer, *how: ShortConvolution(spec.width, mixer, output_dropout=spec.dropout),
        silent=_HEADS,
        why=_NO_HEADS,
        saved=lambda spec, mixer, e: 6 * spec.width * e,
        first=lambda spec, mixer: 8 * spec.width,
    ),
}
"""The kinds of mixers by the type of their values. A new kind is a new row, whose value type is a frozen dataclass."""
