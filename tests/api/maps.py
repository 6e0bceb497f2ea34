"""Small models whose attention maps are tested."""

from typing import Any

from headway.api import AttentionMaps, LanguageModel, TextEncoder
from headway.attention.linear_attention import LinearAttentionSpec
from headway.models import Head, ModelSpec, build
from headway.patterns import Causal, Global, PerHead, Sink, Window
from headway.positions import Relative
from tests.generate.conftest import MIXED
from tests.text.conftest import byte_level

IDS = [0, *range(20, 38)]
SIZE: dict[str, Any] = {"vocab": 330, "width": 32, "layers": 2, "heads": 4, "hidden": 48, "init_std": 0.3}
PATTERNS = PerHead(Causal(), Window.last(4), Causal() & Sink(2) | Window.last(2), Window(4, 0, 2))
SPECS: dict[str, ModelSpec] = {
    "window with sinks, full": ModelSpec.of("llama", **SIZE, kv_heads=2, patterns=MIXED),
    "a pattern per head": ModelSpec.of("llama", **SIZE, patterns=PATTERNS),
    "linear biases": ModelSpec.of("bloom", **SIZE),
    "relative keys of each layer": ModelSpec.of("llama", **SIZE, positions=Relative(4)),
    "linear attention": ModelSpec.of("llama", **SIZE).with_mixer(LinearAttentionSpec("elu+1")),
    "linear attention, rotated": ModelSpec.of("roformer", **SIZE).with_mixer(LinearAttentionSpec("elu+1")),
    "both sides": ModelSpec.of("bert", **SIZE),
    "global projections": ModelSpec.of("longformer", **SIZE, patterns=Window.around(3) | Global()).with_head(
        Head("classify", labels=("no", "yes"))
    ),
}


def loaded(spec: ModelSpec, **options: Any) -> Any:
    model = build(spec, seed=3, **options).eval().double()
    return (LanguageModel if spec.causal else TextEncoder)(model, byte_level())  # type: ignore[arg-type]


def maps_of(lm: Any, **options: Any) -> AttentionMaps:
    maps = lm.attention("the cat sat on the mat, and why", **options)
    assert isinstance(maps, AttentionMaps)
    return maps
