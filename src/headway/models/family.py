"""The class of model families, and settings that several families share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from headway.errors import ConfigError
from headway.models.head import Head
from headway.patterns import Causal, Full
from headway.positions import Learned, Rotary


@dataclass(frozen=True)
class Family:
    """A family of models: its defaults, and the sizes of new models.

    Attributes:
        about: one line of description.
        defaults: `ModelSpec` fields that need not be given (patterns default to Causal()).
        theta: base of the rotary positions, by default.
        derive: computes further default fields from the fields that are known so far.
        groups: whether new models share kv heads among query heads (`ModelSpec.of_depth`).
        classifier: activation of the dense layer before a sequence classifier, for encoders.
    """

    about: str
    defaults: Mapping[str, Any] = field(default_factory=dict)
    theta: float = 10000.0
    derive: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda fields: {}
    groups: bool = False
    classifier: str = "tanh"

    def fields(self, values: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Returns all fields of a `ModelSpec` except its family: the given values, and defaults for the others.
        Raises ConfigError, with a message that starts with `where`, if a required size is missing."""
        fields = {**self.defaults, **values}
        if needed := [n for n in ("vocab", "width", "layers", "heads", "hidden") if n not in fields]:
            raise ConfigError(f"{where}: {', '.join(needed)} must be given")
        fields = {**self.derive(fields), **fields}
        fields.setdefault("patterns", Causal())
        fields.setdefault("kv_heads", fields["heads"])
        fields.setdefault("positions", Rotary(self.theta, pairing="halves"))
        if "head_dim" not in fields:
            width, heads = fields["width"], fields["heads"]
            if heads < 1 or width % heads:
                raise ConfigError(
                    f"ModelSpec: width {width} is not a multiple of {heads} heads; give head_dim"
                )
            fields["head_dim"] = width // heads
        return fields

    def hidden(self, width: int) -> int:
        """Returns F of new models: the family's own, or 8/3 M rounded up to a multiple of 64 with a gate, and 4 M
        without; either has 8 M^2 weights (Shazeer 2020, section 3)."""
        if "hidden" in self.defaults:
            return int(self.defaults["hidden"])
        return -(-8 * width // 3 // 64) * 64 if self.defaults.get("gated", True) else 4 * width

    def kv_heads(self, heads: int, group: int) -> int:
        """Returns K of new models: the family's fixed number, or H / group, or H."""
        always: int | None = self.defaults.get("kv_heads")
        return always or (heads // group if self.groups else heads)

    def sizes(self, depth: int, context: int, group: int | None) -> dict[str, Any]:
        """Returns the fields of `ModelSpec.of_depth`:

            layers = depth        width = 64 depth        heads = depth, of 64 dims
            kv_heads = heads / group        hidden = 8/3 width, rounded up to a multiple of 64; 4 width without a gate

        Embedding and output layer are tied unless the family says otherwise; a table of learned positions has
        `context` rows.

        Raises ConfigError if depth is below 1 or group does not divide the heads.
        """
        if depth < 1:
            raise ConfigError(f"ModelSpec.of_depth: depth must be at least 1, got {depth}")
        if group is None:
            group = depth // self.kv_heads(depth, 1 if depth % 2 else 2)
        if group < 1 or depth % group:
            raise ConfigError(
                f"ModelSpec.of_depth: {depth} heads cannot be divided into groups of {group} per kv head; "
                f"group must divide {depth}"
            )
        sizes: dict[str, Any] = {
            "width": 64 * depth,
            "layers": depth,
            "heads": depth,
            "kv_heads": depth // group,
            "head_dim": 64,
            "hidden": self.hidden(64 * depth),
            "tied": self.defaults.get("tied", True),
            "trained_context": context,
        }
        if isinstance(table := self.defaults.get("positions"), Learned):
            sizes["positions"] = replace(table, size=context)
        return sizes


grouped = partial(Family, groups=True)
"""A family whose new models share kv heads among query heads."""


def encoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the encoder's fields in an encoder-decoder, given the fields of both: bidirectional, without an
    output layer."""
    of_both = {
        name: value for name, value in fields.items() if name not in ("shared_embedding", "logit_scale")
    }
    encoder_only = {
        "causal": False,
        "patterns": Full(),
        "head": Head("states"),
        "tied": False,
        "output_bias": False,
    }
    return of_both | encoder_only


def scaled_embedding(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a scale of sqrt(M) for embeddings (Vaswani et al. 2017, section 3.4)."""
    return {"embedding_scale": fields["width"] ** 0.5}


def partial_rotary(
    share: float, pairing: Literal["halves", "adjacent"] = "halves"
) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """Returns a `derive` function with rotary positions on a share of each head, rounded down to whole pairs, at
    least one pair."""

    def positions(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        if "positions" in fields:
            return {}
        head_dim = fields.get("head_dim", fields["width"] // max(fields["heads"], 1))
        return {"positions": Rotary(pairing=pairing, dims=max(2, 2 * int(head_dim * share / 2)))}

    return positions


BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
LAYER_NORM = {"norm": "layer", "norm_bias": True}
NEOX = {**LAYER_NORM, **BIASES, "norm_eps": 1e-5, "gated": False}
GPT2 = {
    **NEOX,
    "positions": Learned(1024),
    "activation": "gelu_pytorch_tanh",
    "tied": True,
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "trained_context": 1024,
}
