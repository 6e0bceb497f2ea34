"""Rotary positions in GGUF's metadata, as llama.cpp understands them (src/llama-model.cpp, ggml's `ggml_rope_ext`).

rope.freq_base            theta
rope.dimension_count      rotated dims: the first of a head, or all
rope.scaling.type         "none", "linear", "yarn"; by default "linear" if there is a factor
rope.scaling.factor       of linear and YaRN
rope.scaling.finetuned    false if a model has no positions (Granite's hybrids)
rope.scaling.original_context_length, attn_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow
                          of YaRN: the amplitude is attn_factor yarn_attn_factor (1 + 0.1 ln factor)
tensor rope_freqs.weight  one divisor for every frequency; used for LLaMA 3.1's rule, and with 1e30 for pairs that are
                          not rotated (Gemma 4)
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.hf.config_keys import ConfigReader, Inexpressible
from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.positions import (
    LinearScaling,
    Llama3,
    LongRope,
    NoPositions,
    Pairing,
    Proportional,
    Rotary,
    Scaling,
    YaRN,
    rotations,
)

FACTORS, CONTEXT = "rope_freqs.weight", "context_length"
THETA = 10000.0
SCALING = "rope.scaling."
ORIGINAL = f"{SCALING}original_context_length"
LOW, HIGH, TRAINED = 1.0, 4.0, 8192
"""Parameters of LLaMA 3.1's rule, which the file does not hold: it only has the divisors."""
STILL = 1e30
"""The divisor of pairs that are not rotated."""
NEAR = 1e-5
"""Relative tolerance for divisors that were computed in float32."""
YARN = tuple(
    f"{SCALING}{name}"
    for name in ("attn_factor", "yarn_attn_factor", "yarn_ext_factor", "yarn_beta_fast", "yarn_beta_slow")
)
ROPE = (
    *("rope.freq_base", "rope.dimension_count", "rope.scale_linear", ORIGINAL, *YARN),
    *(f"{SCALING}{name}" for name in ("type", "factor", "finetuned")),
)
"""The keys that are read."""


def read_rope(keys: ConfigReader, head_dim: int, pairing: Pairing, factors: Tensor | None) -> Rotary:
    """Returns the rotation that a file describes. Raises ConfigError for an unknown kind of scaling, and for keys that
    contradict each other."""
    theta, dims = keys.number("rope.freq_base", THETA), keys.whole("rope.dimension_count", head_dim)
    if dims > head_dim:
        raise ConfigError(f"rope.dimension_count is {dims}, but a head has only {head_dim} dims")
    factor = keys.number(f"{SCALING}factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    kind = keys.text(f"{SCALING}type", "linear" if factor != 1 else "none")
    if kind not in ("none", "linear", "yarn") or (kind == "none" and factor != 1):
        raise ConfigError(
            f"rotary scaling of type {kind!r} and factor {factor:g} is unsupported; supported are linear, yarn, and "
            "none with factor 1"
        )
    if odd := [key for key in YARN if keys.get(key) is not None and kind != "yarn"]:
        raise ConfigError(f'"{keys.prefix}{odd[0]}" applies to yarn only, but {SCALING}type is {kind!r}')
    scaling: Scaling | None = None
    if kind == "yarn":
        scaling = _read_yarn(keys, factor)
    elif factor != 1:
        scaling = LinearScaling(factor)
    plain = Rotary(theta, pairing=pairing, dims=None if dims == head_dim else dims, scaling=scaling)
    if factors is None:
        return plain
    if scaling is not None:
        raise ConfigError(f"{FACTORS} together with scaling of type {kind!r} is unsupported")
    return replace(plain, scaling=_read_factors(keys, factors, plain, dims))


def write_rope(spec: ModelSpec) -> tuple[dict[str, Any], Tensor | None]:
    """Returns the keys of a spec's rotary positions (those of layers with full attention, if others differ) and the
    tensor of divisors, or None. Raises Inexpressible for positions without keys; callers read the keys again to see
    what they lose."""
    of_layers = zip(spec.layer_positions, spec.patterns, spec.key_sizes, strict=True)
    seeing_all = [
        (scheme, head_dim)
        for scheme, pattern, (_, head_dim) in of_layers
        if pattern == Causal() and isinstance(scheme, Rotary)
    ]
    others = ((scheme, spec.head_dim) for scheme in rotations(spec.positions))
    rotary, head_dim = next(iter((*seeing_all, *others)), (None, 0))
    if spec.positions == NoPositions():
        return {f"{SCALING}finetuned": False}, None
    if rotary is None:
        raise Inexpressible("positions")
    scaling, dims = rotary.scaling, rotary.dims or head_dim
    keys: dict[str, Any] = {"rope.dimension_count": dims, "rope.freq_base": rotary.theta}
    if scaling is None:
        return keys, None
    if isinstance(scaling, LinearScaling):
        return {**keys, f"{SCALING}type": "linear", f"{SCALING}factor": scaling.factor}, None
    if isinstance(scaling, YaRN):
        return {**keys, **_write_yarn(scaling)}, None
    if scaling.length_dependent and (
        not isinstance(scaling, LongRope) or scaling.short_factor != scaling.long_factor
    ):
        raise Inexpressible(f"rotary scaling ({type(scaling).__name__})")
    if isinstance(scaling, Llama3):
        keys[ORIGINAL] = scaling.trained_context
    return keys, _divisors(rotary, dims)


def _divisors(rotary: Rotary, dims: int) -> Tensor:
    divisors = replace(rotary, scaling=None).frequencies(dims) / rotary.frequencies(dims)
    return divisors.clamp(max=STILL).float()


def _read_yarn(keys: ConfigReader, factor: float) -> YaRN:
    default = 1 + 0.1 * math.log(factor)
    amplitude = keys.number(f"{SCALING}attn_factor", 1.0) * keys.number(f"{SCALING}yarn_attn_factor", 1.0)
    if keys.number(f"{SCALING}yarn_ext_factor", 1.0) != 1:
        raise keys.wrong(f"{SCALING}yarn_ext_factor", "1", keys.get(f"{SCALING}yarn_ext_factor"))
    return YaRN(
        factor,
        keys.whole(ORIGINAL, keys.whole(CONTEXT)),
        keys.number(f"{SCALING}yarn_beta_fast", YaRN.beta_fast),
        keys.number(f"{SCALING}yarn_beta_slow", YaRN.beta_slow),
        # 7 digits: the quotient was rounded to float32
        attention_factor=None if amplitude == 1 else float(f"{amplitude * default:.7g}"),
    )


def _write_yarn(scaling: YaRN) -> dict[str, Any]:
    amplitude = scaling.amplitude / (1 + 0.1 * math.log(scaling.factor))
    values = {
        "attn_factor": (amplitude, 1.0),
        "yarn_beta_fast": (scaling.beta_fast, YaRN.beta_fast),
        "yarn_beta_slow": (scaling.beta_slow, YaRN.beta_slow),
    }
    return {
        f"{SCALING}type": "yarn",
        f"{SCALING}factor": scaling.factor,
        ORIGINAL: scaling.trained_context,
        **{f"{SCALING}{name}": value for name, (value, default) in values.items() if value != default},
    }


def _read_factors(keys: ConfigReader, factors: Tensor, plain: Rotary, dims: int) -> Scaling | None:
    """Returns the scaling that has these divisors: a share of rotated pairs if the last pairs are not rotated, LLaMA
    3.1's rule if the divisors are its own, else a LongRope with these divisors at every length."""
    values = [decimal(value) for value in factors.flatten().tolist()]
    if len(values) != dims // 2 or not all(0 < value < math.inf for value in values):
        raise ConfigError(
            f"{FACTORS} must hold {dims // 2} finite numbers above 0, one per rotated pair of dims"
        )
    if all(value == 1 for value in values):
        return None
    turning = [value for value in values if value < STILL]
    if len(turning) < len(values) and values == [1.0] * len(turning) + [STILL] * (len(values) - len(turning)):
        return Proportional(2 * len(turning) / dims)
    if max(values) >= 1:
        rule = Llama3(max(values), LOW, HIGH, keys.whole(ORIGINAL, TRAINED))
        ours = _divisors(replace(plain, scaling=rule), dims)
        if torch.allclose(ours, factors.flatten().float(), NEAR, 0.0):
            return rule
    return LongRope(tuple(values), tuple(values), keys.whole(CONTEXT), attention_factor=1.0)


def decimal(value: float) -> float:
    """Returns the shortest decimal that rounds to a float32: 1e-05 for 9.99999974e-06; other numbers unchanged."""
    if rounded(value) != value:
        return value
    shortest = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(number for number in shortest if rounded(number) == value)


def rounded(value: float) -> float:
    """Returns a number rounded to float32; infinity if it is too large."""
    return float(torch.tensor(value, dtype=torch.float32))
