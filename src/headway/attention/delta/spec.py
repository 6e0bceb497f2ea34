"""Layers of the gated delta rule, and of state-space duality, as values."""

import math
from dataclasses import dataclass

from headway.errors import ConfigError, as_error, check_known, check_whole
from headway.heads import Heads

DECAYS = ("head", "channel")
GATES = ("silu", "sigmoid")
ORDERS = ("pre", "output")


@dataclass(frozen=True, kw_only=True)
class RuleSizes:
    """Sizes of a layer whose state is updated by `delta_attend`.

    heads, key_heads      value heads, H, and heads of queries and keys, K, which must divide H
    head_dim, value_dim   width of a query or key, D, and of a value, E (by default D)
    conv                  tokens in the window of the convolution of queries, keys and values, W; with 1 it is a factor

    Raises ConfigError for sizes below 1, and if key_heads does not divide heads.
    """

    heads: int
    key_heads: int
    head_dim: int
    value_dim: int | None = None
    conv: int = 4

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.value_dim is None:
            object.__setattr__(self, "value_dim", self.head_dim)
        for size in ("heads", "key_heads", "head_dim", "value_dim", "conv"):
            check_whole(f"{name}: {size}", getattr(self, size), 1)
        with as_error(ConfigError, name):
            Heads.of(self.heads, self.key_heads)

    @property
    def value_size(self) -> int:
        """E, the width of a value."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def channels(self) -> tuple[int, int, int]:
        """Numbers of channels of a token's queries, keys and values."""
        keys = self.key_heads * self.head_dim
        return keys, keys, self.heads * self.value_size

    @property
    def decays(self) -> int:
        """Number of decays of a token."""
        return self.heads


@dataclass(frozen=True, kw_only=True)
class DeltaSpec(RuleSizes):
    """Sizes and gates of a layer of the gated delta rule (`headway.nn.GatedDelta`): those of `RuleSizes`, and

    decay                 "head": one decay for each head (Gated DeltaNet, Qwen3-Next); "channel": one for each channel
                          of a head's keys (Kimi's KDA)
    gate                  activation of the output gate, "silu" or "sigmoid"
    rank                  rank of the projections of decays and gates, which are then products of two matrices; None for
                          one full matrix
    beta_scale            factor on betas: with 2 they are in (0, 2), and eigenvalues of a state's transition in (-1, 1)
                          (Grazzi et al. 2024, "Unlocking State-Tracking in Linear RNNs", section 4)
    norm_eps              epsilon of the norm of the output, by default the model's
    order                 order of the norms in its blocks, "pre" or "output" (`headway.nn.Block`), by default the
                          model's

    Raises ConfigError as `RuleSizes` does, and for unknown names or numbers out of range.
    """

    decay: str = "head"
    gate: str = "silu"
    rank: int | None = None
    beta_scale: float = 1.0
    norm_eps: float | None = None
    order: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rank is not None:
            check_whole("DeltaSpec: rank", self.rank, 1)
        check_known(self.decay, DECAYS, "DeltaSpec: there is no decay")
        check_known(self.gate, GATES, "DeltaSpec: there is no gate")
        if self.order is not None:
            check_known(self.order, ORDERS, "DeltaSpec: there is no order of norms")
        if not 0 < self.beta_scale <= 2:
            raise ConfigError(f"DeltaSpec: beta_scale must be above 0 and at most 2, got {self.beta_scale!r}")
        if self.norm_eps is not None and not 0 <= self.norm_eps < 1:
            raise ConfigError(f"DeltaSpec: norm_eps must be at least 0 and below 1, got {self.norm_eps!r}")

    @property
    def decays(self) -> int:
        return self.heads * (self.head_dim if self.decay == "channel" else 1)


@dataclass(frozen=True, kw_only=True)
class SSDSpec(RuleSizes):
    """Sizes of a layer of state-space duality (`headway.nn.SSD`; Mamba-2): those of `RuleSizes`, with K its groups, D
    its state size, and E the width of a head, and

    conv_bias    whether the convolution has a bias
    bias         whether the projections have biases
    norm         whether the gated output is normed
    least_step   lower bound of the steps (Nemotron-H)
    factors      factors on the projections that gate, values, keys, queries and steps are computed from, biases
                 included (Falcon-H1)

    Raises ConfigError as `RuleSizes` does, for a step below 0, and unless there are five factors above 0.
    """

    conv_bias: bool = True
    bias: bool = False
    norm: bool = True
    least_step: float = 0.0
    factors: tuple[float, ...] = (1.0,) * 5

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "factors", tuple(self.factors))
        if not 0 <= self.least_step < math.inf:
            raise ConfigError(
                f"SSDSpec: least_step must be a finite number of at least 0, got {self.least_step!r}"
            )
        if len(self.factors) != 5 or not all(0 < factor < math.inf for factor in self.factors):
            raise ConfigError(f"SSDSpec: factors must be five finite numbers above 0, got {self.factors}")
