"""The held-out loss of all stages of a recipe, over the tokens that each was trained on."""

from __future__ import annotations

import statistics
from collections import defaultdict
from pathlib import Path

from headway.draw import saved_figure
from headway.recipes.recipe import Recipe, Stage
from headway.train.metrics import METRICS, read_metrics

MARKS = "osD^vPX*<>"


def draw_stages(recipe: Recipe, path: Path) -> bool:
    """Draw what stages with three evaluations or more measured: left those from fresh weights, right those
    that an earlier stage began: the mean over seeds, and the range between them. Whether there was any."""
    curves = {stage.name: _curve(recipe, stage) for stage in recipe.stages}
    parts = [
        [s for s in recipe.stages if (s.source is None) == fresh and len(curves[s.name]) > 2]
        for fresh in (True, False)
    ]
    if not any(parts):
        return False
    with saved_figure(path, width=10.0) as figure:
        titles = ("from fresh weights", "from an earlier stage")
        drawn = [(part, title) for part, title in zip(parts, titles, strict=True) if part]
        for axes, (part, title) in zip(figure.subplots(1, len(drawn), squeeze=False)[0], drawn, strict=True):
            for i, stage in enumerate(part):
                at, values = zip(*curves[stage.name], strict=True)
                line = "-" if i < 5 else "--"
                mean = [statistics.fmean(v) for v in values]
                (drawn_line,) = axes.plot(
                    at, mean, line, marker=MARKS[i % len(MARKS)], markersize=4, label=stage.name
                )
                low, high = [min(v) for v in values], [max(v) for v in values]
                axes.fill_between(at, low, high, color=drawn_line.get_color(), alpha=0.15, linewidth=0)
            axes.locator_params("x", nbins=5)
            axes.set_title(title)
            axes.set_xlabel("trained tokens of the stage")
            axes.set_ylabel("held-out loss, nats per token")
            axes.legend()
    return True


def _curve(recipe: Recipe, stage: Stage) -> list[tuple[float, list[float]]]:
    """For each evaluation, in order: trained tokens (the mean over the seeds) and the held-out loss of every seed."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for seed in recipe.seeds:
        tokens = {0: 0}
        for line in read_metrics(recipe.stage_folder(stage, seed) / METRICS):
            if "loss" in line:
                tokens[line["step"]] = line["trained_tokens"]
            if line.get("val_loss") is not None and "step" in line:
                found[line["step"]].append((tokens[line["step"]], line["val_loss"]))
    steps = [zip(*found[step], strict=True) for step in sorted(found)]
    return [(statistics.fmean(at), list(losses)) for at, losses in steps]
