"""A family of models: what differs from others by a few switches, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Family:
    """What is so in every model of a family, and what is so unless said otherwise.

    Attributes:
        about: one line.
        defaults: fields of `ModelSpec` that need not be given (patterns are Causal() where none are).
        theta: of the rotary positions, unless given.
        classifier: activation of the dense layer in front of a classifier of texts, in an encoder.
        groups: whether several query heads share a kv head in models of one's own (`ModelSpec.of_depth`).
        derive: more such fields, from those that are known by then.
    """

    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda given: {}
    groups: bool = False
    classifier: str = "tanh"

    def hidden(self, width: int) -> int:
        """F in models of one's own: 8/3 M, rounded up to a multiple of 64, with a gate, and 4 M without one; either has
        8 M^2 weights. (Shazeer 2020, section 3.)"""
        return -(-8 * width // 3 // 64) * 64 if self.defaults.get("gated", True) else 4 * width

    def kv_heads(self, heads: int, group: int) -> int:
        """K in models of one's own: always one, or H / group, or H."""
        always: int | None = self.defaults.get("kv_heads")
        return always or (heads // group if self.groups else heads)


BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
LAYER_NORM = {"norm": "layer", "norm_bias": True}
