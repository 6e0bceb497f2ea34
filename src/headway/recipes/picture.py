"""The losses of all stages of a recipe, over the tokens that each was trained on."""

from __future__ import annotations

import statistics
from itertools import zip_longest
from pathlib import Path
from typing import Any

from headway.draw import saved_figure
from headway.recipes.recipe import Recipe, Stage
from headway.train.metrics import METRICS, read_metrics

MARKS = "osD^vPX*<>"
ENOUGH = 3
"""Evaluations that make a curve."""
BINS = 25
"""Of a training's steps: neighbours are averaged."""

Curve = list[tuple[float, list[float]]]
"""For each measurement, in order: trained tokens (the mean over the seeds) and the loss of every seed."""


def draw_stages(recipe: Recipe, path: Path) -> bool:
    """Draw the losses of stages: left those from fresh weights, right those that an earlier stage began.

    Of a stage that was evaluated three times or more the held-out loss, the mean over seeds and the range between
    them; of another the loss of its training, and marks where held-out data were evaluated. Whether there was any."""
    curves = {stage.name: _curves(recipe, stage) for stage in recipe.stages}
    parts = [
        [s for s in recipe.stages if (s.source is None) == fresh and max(map(len, curves[s.name])) > 1]
        for fresh in (True, False)
    ]
    if not any(parts):
        return False
    with saved_figure(path, width=10.0) as figure:
        titles = ("from fresh weights", "from an earlier stage")
        drawn = [(part, title) for part, title in zip(parts, titles, strict=True) if part]
        for axes, (part, title) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            for i, stage in enumerate(part):
                _draw(axes, stage.name, *curves[stage.name], MARKS[i % len(MARKS)], "-" if i < 5 else "--")
            axes.locator_params("x", nbins=5)
            axes.set_title(title)
            axes.set_xlabel("trained tokens (or texts) of the stage")
            every = all(len(curves[stage.name][1]) >= ENOUGH for stage in part)
            axes.set_ylabel("held-out loss, nats" if every else "loss, nats (marks: held out)")
            axes.legend()
    return True


def _draw(axes: Any, name: str, training: Curve, held: Curve, mark: str, line: str) -> None:
    own: dict[str, Any] = {"linestyle": line, "label": name}
    if len(held) < ENOUGH:
        each = -(-len(training) // BINS)
        bins = [training[i : i + each] for i in range(0, len(training), each)]
        means = [statistics.fmean(loss for _, losses in few for loss in losses) for few in bins]
        (drawn,) = axes.plot([few[-1][0] for few in bins], means, linewidth=1, **own)
        own = {"linestyle": "none", "color": drawn.get_color()}
    if held:
        at, values = zip(*held, strict=True)
        means = [statistics.fmean(v) for v in values]
        (drawn,) = axes.plot(at, means, marker=mark, markersize=4, **own)
        if len(held) >= ENOUGH:
            low, high = [min(v) for v in values], [max(v) for v in values]
            axes.fill_between(at, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


def _curves(recipe: Recipe, stage: Stage) -> tuple[Curve, Curve]:
    """The loss of the training, and of held-out data. Where epochs end at other steps for other seeds, the first
    measurement of each seed belongs together, the second, and so on."""
    found: dict[str, list[list[tuple[int, float]]]] = {"loss": [], "val_loss": []}
    for seed in recipe.seeds:
        tokens = {0: 0}
        own: dict[str, list[tuple[int, float]]] = {name: [] for name in found}
        for entry in read_metrics(recipe.stage_folder(stage, seed) / METRICS):
            if "loss" in entry:
                tokens[entry["step"]] = entry["trained_tokens"]
            for name, measured in own.items():
                if entry.get(name) is not None and "step" in entry:
                    measured.append((tokens[entry["step"]], entry[name]))
        for name, measured in own.items():
            found[name].append(measured)
    training, held = (
        [
            (statistics.fmean(at for at, _ in some), [loss for _, loss in some])
            for some in ([one for one in turn if one is not None] for turn in zip_longest(*seeds))
        ]
        for seeds in found.values()
    )
    return training, held
