"""The differences of two models in words and numbers: functions of two `ModelSpec`."""

from dataclasses import replace
from typing import NamedTuple

import torch

from headway.errors import ConfigError
from headway.models import cost
from headway.models.cost import Kept
from headway.models.description import ASPECTS
from headway.models.spec import ModelSpec

BF16 = Kept(torch.bfloat16)


class Difference(NamedTuple):
    """One aspect that differs, as it is in either model."""

    aspect: str
    first: str
    second: str


class Number(NamedTuple):
    """One count in both models; None where a model has no such thing."""

    name: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """second / first."""
        return self.second / self.first if self.first and self.second is not None else None


def differences(first: ModelSpec, second: ModelSpec) -> tuple[Difference, ...]:
    """Every aspect in which the two differ, as `ASPECTS` describes it. Where both have an encoder, its aspects follow
    those of the decoder."""
    described = (
        Difference(name, aspect.words(first), aspect.words(second)) for name, aspect in ASPECTS.items()
    )
    changed = tuple(aspect for aspect in described if aspect.first != aspect.second)
    if first.encoder is None or second.encoder is None:
        return changed
    inner = differences(first.encoder, second.encoder)
    own_aspects = tuple(aspect for aspect in changed if aspect.aspect != "encoder")
    return (*own_aspects, *(aspect._replace(aspect=f"encoder's {aspect.aspect}") for aspect in inner))


def numbers(
    first: ModelSpec, second: ModelSpec, context: int, kept: tuple[Kept, Kept] = (BF16, BF16)
) -> tuple[Number, ...]:
    """Weights by place, bytes of keys and values, and operations per token, in rows of `context` tokens.

    Costs of caches and of decoding are None for an encoder. `kept` says how the weights of either are stored, in
    bfloat16 unless given; keys and values are in the dtype of its products."""
    sides = [_counted(spec, context, how) for spec, how in zip((first, second), kept, strict=True)]
    names = dict.fromkeys(name for side in sides for name in side)
    return tuple(Number(name, *(side.get(name) for side in sides)) for name in names)


def ladder(first: ModelSpec, second: ModelSpec) -> dict[str, ModelSpec]:
    """Specs from `first` to `second`, changing one aspect at a time: "first", then, under the name of each aspect, the
    previous spec with that aspect changed. The last is `second`.

    Raises ConfigError where a step between them cannot be."""
    specs = {"first": first}
    for name, aspect in ASPECTS.items():
        above = list(specs.values())[-1]
        change = {field: getattr(second, field) for field in aspect.fields}
        if any(getattr(above, field) != value for field, value in change.items()):
            try:
                specs[name] = replace(above, **change)
            except ConfigError as error:
                raise ConfigError(
                    f"ladder: {name} cannot change by itself, {aspect.words(above)} to {aspect.words(second)}: "
                    f"{error}; give two models of the same sizes"
                ) from error
    return specs


def _counted(spec: ModelSpec, context: int, kept: Kept) -> dict[str, float]:
    counts: dict[str, float] = {"parameters": cost.parameter_count(spec)}
    counts |= {f"... {place}": count for place, count in cost.parameters(spec).items()}
    counts["weights, bytes"] = sum(cost.kept_bytes(spec, kept).values())
    if spec.causal:
        counts["keys and values, bytes per token"] = cost.kv_bytes_per_token(spec, kept.dtype)
        counts[f"... kept at {context:,} tokens, bytes"] = cost.kv_bytes_stored(spec, context, kept.dtype)
        counts["one more token, FLOP"] = cost.decode_flops(spec, context)
    counts["training, FLOP per token"] = cost.train_flops(spec, context)
    return counts
