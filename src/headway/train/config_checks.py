"""Settings that do not fit together, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

    from headway.train.config import TrainConfig


def contradictions(config: TrainConfig) -> Iterable[str]:
    """Each pair of settings that cannot both be meant, as a sentence."""
    lengths = [name for name in ("steps", "epochs", "max_seconds") if getattr(config, name) is not None]
    if len(lengths) > 1:
        yield f"{' and '.join(lengths)} all say how long the run is; give one of them"
    if config.batch_tokens < config.context:
        yield (
            f"batch_tokens {config.batch_tokens} holds no row of context {config.context}; raise it "
            f"to at least {config.context} or lower context"
        )
    if config.micro_batch is not None and config.micro_batch > config.rows_per_step:
        yield (
            f"micro_batch {config.micro_batch} is more than the {config.rows_per_step} rows of a step "
            f"(batch_tokens {config.batch_tokens} / context {config.context})"
        )
    home_made = (
        "family",
        "depth",
        "width",
        "heads",
        "kv_heads",
        "hidden",
        "patterns",
        "linear",
        "dropout",
        "tied",
    )
    shaped = [name for name in home_made if getattr(config, name) is not None]
    if config.model is not None and shaped:
        yield (
            f"model {config.model!r} already fixes {', '.join(shaped)}; leave those out, or leave out model"
        )
    if config.tokenizer is not None and config.vocab is not None:
        yield "vocab is the size of a tokenizer to be trained, but tokenizer is given too; give one of them"
    if config.tokenizer is not None and config.units is not None:
        yield "units says which tokenizer is to be trained, but tokenizer is given too; give one of them"
    if config.linear is not None and config.patterns is not None:
        yield "linear attention sees the whole text (its past, in a decoder), so it has no patterns; leave them out"
    if config.validation is not None and config.validation_share:
        yield "validation and validation_share both say what is held out; give one of them"
    if config.matrix_lr is not None and config.optimizer != "muon":
        yield f"matrix_lr is Muon's learning rate, but optimizer is {config.optimizer}; use lr"
    if config.sample_every is not None and not config.sample_prompts:
        yield "sample_every is given without sample_prompts: there is nothing to continue"


def explain(error: ValidationError, fields: Mapping[str, Any]) -> Iterable[str]:
    """What pydantic found, in words: the setting, what was given, what is asked for."""
    for item in error.errors():
        if not item["loc"]:
            yield item["msg"].removeprefix("Value error, ")
            continue
        name = str(item["loc"][0])
        if item["type"] == "missing":
            yield f"{name} is missing: {fields[name].description}"
            continue
        unit = (fields[name].json_schema_extra or {}).get("unit")
        message = item["msg"][0].lower() + item["msg"][1:]
        yield f"{name} = {item['input']!r}: {message}" + (f" ({unit})" if unit else "")
