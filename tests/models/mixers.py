"""Specs of models whose layers mix tokens in several ways."""

from dataclasses import replace
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
    "duality beside attention": ModelSpec.of(
        "llama",
        **SIZE,
        mixers=Softmax(
            beside=replace(SSD, norm=False, factors=(0.5, 1.5, 2.0, 0.75, 1.25)), factors=(0.5, 2.0)
        ),
    ),
    "duality beside windows, some layers without a feed-forward": ModelSpec.of(
        "llama",
        **SIZE,
        mixers=(SSD, Softmax(beside=replace(SSD, least_step=0.7)), Softmax(), Softmax(beside=DELTA)),
        patterns=SEES,
        layer_hidden=(0, None, 0, 64),
    ),
    "decays by channel": ModelSpec.of(
        "llama",
        **SIZE,
        mixers=(
            DeltaSpec(heads=2, key_heads=2, head_dim=8, decay="channel", gate="sigmoid", rank=4),
            Softmax(),
        ),
    ),
}
