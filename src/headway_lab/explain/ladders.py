"""`headway diff A B --ladder`: from one model to another, one aspect at a time, each step trained alike."""

from collections.abc import Callable
from dataclasses import replace

from headway.errors import ConfigError
from headway.language import language_of_environment
from headway.models import ModelSpec
from headway.models.difference import ladder
from headway_lab.explain.contests import gaps, losses, rows
from headway_lab.explain.report import Report
from headway_lab.explain.runs import VOCAB, Budget, Runs, contend
from headway_lab.explain.spread import gap
from headway_lab.explain.tables import read
from headway_lab.explain.topics import Topic

WIDTH, LAYERS, HEADS = 64, 2, 4
UNTRAINED = ("context", "family")
"""Aspects that have no effect on a run."""


def toy(spec: ModelSpec, tokens: int) -> ModelSpec:
    """Returns the same block in 2 layers of width 64 with 4 heads, on bytes: K / H, F / M and the patterns of the first
    and the last layer are kept, and a scaled embedding is scaled by sqrt(64).

    Raises ConfigError for an encoder-decoder, and for a model that cannot be so small."""
    if spec.encoder is not None:
        raise ConfigError("--ladder trains a single stack; compare an encoder-decoder without --ladder")
    kv_heads = max(k for k in (1, 2, 4) if k * spec.heads <= max(HEADS * spec.kv_heads, spec.heads))
    try:
        return replace(
            spec,
            vocab=VOCAB,
            width=WIDTH,
            layers=LAYERS,
            heads=HEADS,
            kv_heads=kv_heads,
            head_dim=WIDTH // HEADS,
            hidden=8 * max(spec.hidden > 0, round(WIDTH * spec.hidden / spec.width / 8)),
            patterns=(spec.patterns[0], spec.patterns[-1]),
            embedding_scale=1.0 if spec.embedding_scale == 1 else WIDTH**0.5,
            logit_scale=1.0 if spec.logit_scale == 1 else WIDTH**-0.5,
            embedding_width=None,
            trained_context=tokens,
            max_context=None,
        )
    except ConfigError as error:
        raise ConfigError(
            f"--ladder trains models in toy sizes, and {spec.family} cannot be built in one: {error}"
        ) from error


def steps_of(first: ModelSpec, second: ModelSpec, tokens: int) -> dict[str, ModelSpec]:
    """Returns the models of a ladder in toy sizes: "first", then one for each aspect that affects a run, by its name.

    Raises ConfigError if no difference is left."""
    specs = ladder(toy(first, tokens), toy(second, tokens))
    trained = {name: spec for name, spec in specs.items() if name not in UNTRAINED}
    if len(trained) == 1:
        raise ConfigError(
            "--ladder: the two models are the same in toy sizes, so there is no step between them to train"
        )
    return trained


def command(
    first: ModelSpec, second: ModelSpec, steps: int | None, seeds: int | None, say: Callable[[str], None]
) -> Report:
    """Runs `headway diff --ladder`: trains every step with every seed, by default 200 steps and three seeds. Raises
    ConfigError as `steps_of` does."""
    defaults = Budget()
    budget = replace(
        defaults, steps=steps or defaults.steps, seeds=tuple(range(seeds or len(defaults.seeds)))
    )
    say(f"training each step of the ladder: {budget.steps} steps with {len(budget.seeds)} seeds")
    report = judge(contend(steps_of(first, second, budget.tokens), budget), budget)
    return sentences(language_of_environment()).told("ladder", report, LAYERS=LAYERS, WIDTH=WIDTH)


def sentences(language: str) -> Topic:
    """Returns the sentences of a ladder, in a language."""
    texts = read(language)
    return Topic(**texts["ladder"], phrases=texts["phrases"], language=language)


def judge(runs: Runs, budget: Budget) -> Report:
    """Returns the report, without sentences: which steps change the loss by more than their bound, the largest change
    first; and the change of all of them together."""
    table = rows(runs, budget.seeds)
    start, *_, end = runs.values()
    changes = gaps(table)
    noticed = sorted(
        (name for name, change in changes.items() if change.seen), key=lambda name: -abs(changes[name].mean)
    )
    return Report(
        rows=tuple(table),
        claims={("step", name): change.seen or None for name, change in changes.items()},
        values={
            "budget": budget,
            "steps": {name: changes[name].mean for name in noticed},
            "whole": gap(losses(end), losses(start)),
        },
    )
