"""`headway diff A B --ladder`: from one model to another, one aspect at a time, each step trained alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from headway.errors import ConfigError
from headway.models import ModelSpec
from headway.models.difference import ladder
from headway.report import plain, table
from headway_lab.explain.contests import gaps, losses, rows
from headway_lab.explain.runs import VOCAB, Budget, contend
from headway_lab.explain.spread import Gap, gap

WIDTH, LAYERS, HEADS = 64, 2, 4
UNTRAINED = ("context", "family")
"""Aspects that change nothing in a run."""


def toy(spec: ModelSpec, tokens: int) -> ModelSpec:
    """The same block in 2 layers of width 64 with 4 heads, on bytes: K / H, F / M and the patterns of the first and the
    last layer are kept, an embedding that is scaled is scaled by sqrt(64).

    Raises ConfigError for an encoder-decoder, and for what cannot be so small."""
    if spec.encoder is not None:
        raise ConfigError(
            "a ladder trains one stack; of an encoder-decoder, compare the specs without --ladder"
        )
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
            f"a ladder is of models in toy sizes, and {spec.family} has none: {error}"
        ) from error


def steps(first: ModelSpec, second: ModelSpec, tokens: int) -> dict[str, ModelSpec]:
    """The models of a ladder in toy sizes: "first", then each aspect that a run can tell, by its name.

    Raises ConfigError where nothing is left that differs."""
    found = ladder(toy(first, tokens), toy(second, tokens))
    kept = {name: spec for name, spec in found.items() if name not in UNTRAINED}
    if len(kept) == 1:
        raise ConfigError("the two are one model in toy sizes: there is no step between them to train")
    return kept


@dataclass(frozen=True)
class Ladder:
    """The models of a ladder, trained.

    rows     of each model: parameters, mean loss and spread, its gap to the one above
    whole    how far the last ends from the first
    """

    rows: tuple[dict[str, Any], ...]
    whole: Gap
    budget: Budget

    @property
    def verdict(self) -> str:
        """Which steps change the loss by more than their spread, the largest first."""
        seen = [(name, one) for name, one in gaps(self.rows).items() if one.seen]
        seen.sort(key=lambda item: -abs(item[1].mean))
        told = [
            f"{name} {'lowers' if one.lower else 'raises'} it by {abs(one.mean):.3f}" for name, one in seen
        ]
        alone = "; ".join(told) or "no step by itself changes the loss by more than its spread"
        return f"{alone}. From first to last: {self.whole}"

    def to_json(self) -> dict[str, Any]:
        """The ladder in JSON's types."""
        return {
            "budget": str(self.budget),
            "rows": plain(self.rows),
            "whole": {"mean": self.whole.mean, "bound": self.whole.bound, "seen": self.whole.seen},
            "verdict": self.verdict,
        }

    def to_text(self) -> str:
        """The ladder for a terminal."""
        lines = [
            (
                row["contender"] if row["against"] is None else f"+ {row['contender']}",
                row["parameters"],
                row["loss"],
                row["spread"],
                "" if row["against"] is None else str(Gap(row["gap"], row["bound"])),
            )
            for row in self.rows
        ]
        head = ("step", "parameters", "loss", "spread", "against the one above")
        return (
            f"{LAYERS} layers of width {WIDTH}, {self.budget}; loss of held-out text in nats per byte\n"
            f"{table(head, lines)}\n\nverdict: {self.verdict}"
        )


def climb(first: ModelSpec, second: ModelSpec, budget: Budget) -> Ladder:
    """Trains every step of the ladder with every seed. Raises ConfigError as `steps` does."""
    runs = contend(steps(first, second, budget.tokens), budget)
    start, *_, end = runs.values()
    return Ladder(tuple(rows(runs, budget.seeds)), gap(losses(end), losses(start)), budget)


def command(
    first: ModelSpec, second: ModelSpec, steps: int | None, seeds: int | None, say: Callable[[str], None]
) -> Ladder:
    """What `headway diff --ladder` runs: by default 200 steps, three seeds."""
    usual = Budget(seeds=(0, 1, 2))
    budget = replace(
        usual,
        steps=usual.steps if steps is None else steps,
        seeds=usual.seeds if seeds is None else tuple(range(seeds)),
    )
    say(f"training each step of the ladder: {budget}")
    return climb(first, second, budget)
