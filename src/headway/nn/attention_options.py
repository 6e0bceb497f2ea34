"""Options of all attention layers, and checks of where their keys and values come from.

Legend: D per query and key, E per value.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

from headway.errors import ConfigError
from headway.nn.gates import Gate
from headway.nn.mixers import MixingLayer
from headway.nn.norms import LayerNorm, QKNorm, RMSNorm
from headway.positions import PositionScheme
from headway.scores import Score


class AttentionOptions(TypedDict, total=False):
    """The keyword options of all attention layers; see `AttentionLayer`."""

    head_dim: int | None
    value_dim: int | None
    positions: PositionScheme
    qkv_bias: bool
    out_bias: bool
    qk_norm: QKNorm
    norm: Callable[[int], RMSNorm | LayerNorm]
    v_norm: Callable[[int], RMSNorm | LayerNorm] | None
    tied_values: bool
    kv_from: MixingLayer | None
    score: Score | Sequence[Score]
    gate: Gate | None
    gate_act: str
    dropout: float
    output_dropout: float


def check_keys(layer: Any, kv_from: Any, tied_values: bool, v_norm: bool) -> None:
    """Raises ConfigError unless an `AttentionLayer` can use the keys and values of the layer `kv_from`, if given,
    and keys as values (`tied_values`)."""
    name = type(layer).__name__
    if tied_values and layer.value_dim != layer.head_dim:
        raise ConfigError(
            f"{name}: tied_values needs value_dim equal to head_dim, got head_dim={layer.head_dim} and "
            f"value_dim={layer.value_dim}"
        )
    if kv_from is None:
        return
    if layer.mixer.global_projections or not layer.mixer.rotates_queries:
        raise ConfigError(f"{name}: kv_from needs softmax attention without global_projections")
    if tied_values or v_norm:
        raise ConfigError(f"{name}: values come from kv_from; drop v_norm and tied_values")
    sizes, theirs = ((m.heads.kv_heads, m.head_dim, m.value_dim) for m in (layer, kv_from))
    if sizes != theirs or kv_from.kv_from is not None:
        raise ConfigError(
            f"{name}: kv_from must be a layer with keys and values of its own, of the same kv_heads, head_dim and "
            f"value_dim {sizes}; it has {theirs}"
        )
