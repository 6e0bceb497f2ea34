"""Rotary scalings: how trained frequencies are changed for longer contexts.

The numbers equal those of `transformers` 5.23 (`modeling_rope_utils.ROPE_INIT_FUNCTIONS`), which is the test's oracle;
they are computed in float64 here, in float32 there. `docs/positions.md` lists where its behaviour is odd. Throughout,
f_i = theta^(-2i/d), i = 0 .. d/2 - 1, d rotated dimensions, `trained_context` in tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from headway.errors import ConfigError, check_whole
from headway.positions.schemes import powers


class Scaling:
    """A frozen, hashable rule that gives frequencies from (theta, d) and, if `length_dependent`, a row's length."""

    length_dependent: ClassVar[bool]

    def __post_init__(self) -> None:
        """Validates the numeric fields and lists of numbers; lengths are integers, all others become floats."""
        owner = type(self).__name__
        for name, value in vars(self).items():
            if name == "trained_context":
                check_whole(f"{owner}: trained_context", value, 2)
            elif name.endswith("_factor") and isinstance(value, list | tuple):
                numbers = tuple(_positive(owner, f"every {name}", number) for number in value)
                object.__setattr__(self, name, numbers)
            elif value is not None and name != "truncate":
                object.__setattr__(self, name, _positive(owner, name, value))
        factor = getattr(self, "factor", None)
        if factor is not None and factor < 1:
            raise ConfigError(
                f"{owner}: factor must be >= 1 (longest context over trained context), got {factor!r}"
            )

    @property
    def amplitude(self) -> float:
        """Factor on cosines and sines, hence its square on scores ("attention factor" elsewhere)."""
        return 1.0

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        """Returns the radians per position, float64: [dims/2], or [..., dims/2] for a `length` of shape [...].

        Without a length, a length-dependent rule returns those of rows within the trained context.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class LinearScaling(Scaling):
    """Position interpolation (Chen et al. 2023): f_i / factor."""

    factor: float
    length_dependent = False

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        return powers(theta, dims, _device(length)) / self.factor


@dataclass(frozen=True)
class Proportional(Scaling):
    """f_i / factor for i < floor(partial_rotary_factor d / 2), and 0 for the other pairs, which are not rotated: a
    share of each head is rotated, with frequencies computed for the whole head (the full-attention layers of Gemma
    4)."""

    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    length_dependent = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.partial_rotary_factor > 1:
            raise ConfigError(
                f"Proportional: partial_rotary_factor must be at most 1, got {self.partial_rotary_factor:g}"
            )

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        frequencies = powers(theta, dims, _device(length)) / self.factor
        frequencies[int(self.partial_rotary_factor * dims // 2) :] = 0.0
        return frequencies


@dataclass(frozen=True)
class DynamicNTK(Scaling):
    """The base grows with the row's own length L once it exceeds the trained context (bloc97 and emozilla, 2023):

    theta' = theta * (factor * max(L, trained_context) / trained_context - (factor - 1))^(d / (d - 2))
    """

    factor: float
    trained_context: int
    length_dependent = True

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        if dims <= 2:
            raise ConfigError(
                f"DynamicNTK: its exponent d / (d - 2) needs more than 2 rotated dims, got {dims}"
            )
        if length is None:
            return powers(theta, dims)
        longest = length.to(torch.float64).clamp(min=self.trained_context)
        stretch = self.factor * longest / self.trained_context - (self.factor - 1)
        base = theta * stretch ** (dims / (dims - 2))
        exponent = torch.arange(0, dims, 2, dtype=torch.float64, device=length.device) / -dims
        return base[..., None] ** exponent


@dataclass(frozen=True)
class YaRN(Scaling):
    """Interpolates slow pairs, keeps fast ones, and ramps between them (Peng et al. 2023, section 3.2).

        f'_i = (1 - g_i) * f_i + g_i * f_i / factor      g_i = clamp((i - low) / (high - low), 0, 1)
        low, high = the i whose pair makes beta_fast, beta_slow full rotations within the trained context
                    (rounded outwards if `truncate`), limited to [0, d - 1]
        amplitude = attention_factor, else m(mscale) / m(mscale_all_dim), else m(1)
        m(s) = 0.1 s ln(factor) + 1

    `mscale` and `mscale_all_dim` must be given together (DeepSeek) and exclude `attention_factor`.
    """

    factor: float
    trained_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    length_dependent = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.beta_fast <= self.beta_slow:
            raise ConfigError(
                f"YaRN: beta_fast must be greater than beta_slow (full rotations within the trained context), "
                f"got beta_fast={self.beta_fast} and beta_slow={self.beta_slow}"
            )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ConfigError(
                f"YaRN: set both mscale and mscale_all_dim, or neither (one alone has no effect); "
                f"got mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim}"
            )
        if self.mscale is not None and self.attention_factor is not None:
            raise ConfigError(
                f"YaRN: attention_factor={self.attention_factor} already fixes the amplitude; "
                f"drop it, or drop mscale={self.mscale} and mscale_all_dim={self.mscale_all_dim}"
            )

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        log = 0.1 * math.log(self.factor)
        if self.mscale is not None and self.mscale_all_dim is not None:
            return (self.mscale * log + 1) / (self.mscale_all_dim * log + 1)
        return log + 1

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        if theta <= 1:
            raise ConfigError(
                f"YaRN: theta must be greater than 1 for pairs to rotate differently, got {theta}"
            )

        def pair_that_rotates(times: float) -> float:
            return dims * math.log(self.trained_context / (times * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_that_rotates(self.beta_fast), pair_that_rotates(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dims - 1)
        # transformers widens an empty ramp by this much, and checkpoints were trained with it
        high = high + 0.001 if low == high else high
        base = powers(theta, dims, _device(length))
        pair = torch.arange(dims // 2, dtype=base.dtype, device=base.device)
        ramp = ((pair - low) / (high - low)).clamp(0, 1)
        return (1 - ramp) * base + ramp * base / self.factor


@dataclass(frozen=True)
class Llama3(Scaling):
    """LLaMA 3.1's rule by wavelength w_i = 2 pi / f_i, with c = trained_context:

    w_i > c / low_freq_factor     f_i / factor
    w_i < c / high_freq_factor    f_i
    between                       (1 - s) f_i / factor + s f_i,  s = (c / w_i - low) / (high - low)
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    trained_context: int
    length_dependent = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                f"Llama3: high_freq_factor must be greater than low_freq_factor, "
                f"got high_freq_factor={self.high_freq_factor} and low_freq_factor={self.low_freq_factor}"
            )

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        base = powers(theta, dims, _device(length))
        rotations = self.trained_context * base / (2 * math.pi)
        smooth = (rotations - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * base / self.factor + smooth * base


@dataclass(frozen=True)
class LongRope(Scaling):
    """One searched divisor per pair (Ding et al. 2024): f_i / short_factor[i] for rows of at most
    `trained_context` tokens, f_i / long_factor[i] for longer rows.

        amplitude = attention_factor, else sqrt(1 + ln(factor) / ln(trained_context))

    `factor` is max_context / trained_context; it or `attention_factor` must be given.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    trained_context: int
    factor: float | None = None
    attention_factor: float | None = None
    length_dependent = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.short_factor) != len(self.long_factor):
            raise ConfigError(
                f"LongRope: short_factor and long_factor must both hold one number per rotated pair, "
                f"got {len(self.short_factor)} and {len(self.long_factor)} numbers"
            )
        if self.factor is None and self.attention_factor is None:
            raise ConfigError(
                "LongRope: the amplitude needs factor or attention_factor; give factor (max_context / trained_context) "
                "or attention_factor"
            )

    @property
    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_context))

    def frequencies(self, theta: float, dims: int, length: Tensor | None = None) -> Tensor:
        if len(self.short_factor) != dims // 2:
            raise ConfigError(
                f"LongRope: {dims} rotated dims are {dims // 2} pairs, "
                f"but short_factor and long_factor hold {len(self.short_factor)} numbers"
            )
        base = powers(theta, dims, _device(length))
        short, long = (base / base.new_tensor(divisors) for divisors in (self.short_factor, self.long_factor))
        if length is None:
            return short
        return torch.where((length > self.trained_context)[..., None], long, short)


def _device(length: Tensor | None) -> torch.device | None:
    return None if length is None else length.device


def _positive(owner: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{owner}: {name} must be a finite number > 0, got {value!r}")
    return float(value)
