"""Differences of two models in words and numbers, computed from their `ModelSpec`s."""

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
    """One aspect in which two models differ, as described for each."""

    aspect: str
    first: str
    second: str


class Number(NamedTuple):
    """One count in both models; None if it does not apply to a model."""

    name: str
    first: float | None
    second: float | None

    @property
    def ratio(self) -> float | None:
        """second / first; None if either is missing or first is 0."""
        return self.second / self.first if self.first and self.second is not None else None


def differences(first: ModelSpec, second: ModelSpec) -> tuple[Difference, ...]:
    """Returns every aspect in which the two models differ, as `ASPECTS` describes it. If both have an encoder, its
    aspects follow those of the decoder."""
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
    """Returns parameters by place, KV cache bytes, and operations per token, in rows of `context` tokens.

    KV cache and decoding costs are None for an encoder. `kept` says how each model stores its weights, bfloat16 by
    default; the KV cache has the dtype of its products.
    """
    sides = [_counted(spec, context, storage) for spec, storage in zip((first, second), kept, strict=True)]
    names = dict.fromkeys(name for side in sides for name in side)
    return tuple(Number(name, *(side.get(name) for side in sides)) for name in names)


def ladder(first: ModelSpec, second: ModelSpec) -> dict[str, ModelSpec]:
    """Returns specs that lead from `first` to `second`, changing one aspect at a time: "first", then for each aspect
    that differs the previous spec with that aspect changed, under its name. The last one is `second`.

    Raises ConfigError if an intermediate spec is invalid.
    """
    specs = {"first": first}
    for name, aspect in ASPECTS.items():
        previous = list(specs.values())[-1]
        change = {field: getattr(second, field) for field in aspect.fields}
        if any(getattr(previous, field) != value for field, value in change.items()):
            try:
                specs[name] = replace(previous, **change)
            except ConfigError as error:
                raise ConfigError(
                    f"ladder: {name} cannot change by itself, {aspect.words(previous)} to {aspect.words(second)}: "
                    f"{error}; give two models of the same sizes"
                ) from error
    return specs


def _counted(spec: ModelSpec, context: int, kept: Kept) -> dict[str, float]:
    """Returns the counts of `numbers` for one model, by name."""
    counts: dict[str, float] = {"parameters": cost.parameter_count(spec)}
    counts |= {f"... {place}": count for place, count in cost.parameters(spec).items()}
    counts["weights, bytes"] = sum(cost.kept_bytes(spec, kept).values())
    if spec.causal:
        counts["keys and values, bytes per token"] = cost.kv_bytes_per_token(spec, kept.dtype)
        counts[f"... kept at {context:,} tokens, bytes"] = cost.kv_bytes_stored(spec, context, kept.dtype)
        counts["one more token, FLOP"] = cost.decode_flops(spec, context)
    counts["training, FLOP per token"] = cost.train_flops(spec, context)
    return counts
