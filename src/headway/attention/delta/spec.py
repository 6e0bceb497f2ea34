"""A layer of the gated delta rule as one value."""

from dataclasses import dataclass

from headway.errors import ConfigError, as_error, check_known, check_whole
from headway.heads import Heads

DECAYS = ("head", "channel")
GATES = ("silu", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class DeltaSpec:
    """Sizes and gates of a layer of the gated delta rule (`headway.nn.GatedDelta`).

    heads, key_heads      heads of values, H, and of queries and keys, K, which must divide H
    head_dim, value_dim   D of a query or key, and E of a value (D unless given)
    conv                  tokens that the convolution of queries, keys and values sees, W; 1 is a factor
    decay                 "head": one decay for each head (Gated DeltaNet, Qwen3-Next); "channel": one for each channel
                          of a head's keys (Kimi's KDA)
    gate                  of the output: "silu" or "sigmoid"
    rank                  of the projections of decays and gates, which are then products of two; None is one matrix

    Raises ConfigError for sizes below 1, heads that do not divide, and unknown names.
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int | None = None
    conv: int = 4
    decay: str = "head"
    gate: str = "silu"
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        sizes = ("heads", "key_heads", "head_dim", "value_dim", "conv")
        for name in sizes if self.rank is None else (*sizes, "rank"):
            check_whole(f"DeltaSpec: {name}", getattr(self, name), 1)
        with as_error(ConfigError, "DeltaSpec"):
            Heads.of(self.heads, self.key_heads)
        check_known(self.decay, DECAYS, "DeltaSpec: there is no decay of a")
        check_known(self.gate, GATES, "DeltaSpec: there is no gate")

    @property
    def value_size(self) -> int:
        """E."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def channels(self) -> tuple[int, int, int]:
        """Numbers of a token's queries, keys and values."""
        keys = self.key_heads * self.head_dim
        return keys, keys, self.heads * self.value_size

    @property
    def decays(self) -> int:
        """Decays of a token."""
        return self.heads * (self.head_dim if self.decay == "channel" else 1)
