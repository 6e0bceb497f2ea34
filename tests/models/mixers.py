"""Specs of models whose layers mix tokens in several ways."""

from typing import Any

from headway.attention.delta import DeltaSpec, SSDSpec
from headway.attention.linear_attention import LinearAttentionSpec
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.patterns import Causal, Window

SIZE: dict[str, Any] = {"vocab": 97, "width": 48, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 80}
DELTA = DeltaSpec(heads=4, key_heads=2, head_dim=8, value_dim=6)
SSD = SSDSpec(heads=4, key_heads=2, head_dim=6, value_dim=8)
SEES = (Causal(), Causal(), Causal(), Window.last(6))
SPECS: dict[str, ModelSpec] = {
    "delta": ModelSpec.of("llama", **SIZE).with_mixer(DELTA),
    "delta + full": ModelSpec.of("llama", **SIZE, mixers=(DELTA, DELTA, DELTA, Softmax())),
    "delta + window": ModelSpec.of("llama", **SIZE, mixers=(DELTA, DELTA, DELTA, Softmax()), patterns=SEES),
    "linear + delta + full": ModelSpec.of(
        "llama", **SIZE, mixers=(LinearAttentionSpec(), DELTA, Softmax(), DELTA)
    ),
    "duality": ModelSpec.of("llama", **SIZE).with_mixer(SSD),
    "duality + delta + full": ModelSpec.of("llama", **SIZE, mixers=(SSD, DELTA, SSD, Softmax())),
    "decays by channel": ModelSpec.of(
        "llama",
        **SIZE,
        mixers=(
            DeltaSpec(heads=2, key_heads=2, head_dim=8, decay="channel", gate="sigmoid", rank=4),
            Softmax(),
        ),
    ),
}
