"""Rotary positions in some layers only: asked by a reader of Su et al. 2021, not tried there."""

from collections.abc import Mapping, Sequence
from typing import Any

from headway.positions import NoPositions, PerLayer, PositionScheme, Rotary
from headway_lab.explain import TOPICS, Report
from headway_lab.explain.runs import Budget, Run, columns, contend, draw_losses, gap_in, rows, small, told

BUDGET, LAYERS = Budget(seeds=(0, 1, 2)), 4

FORMULA = """all            PerLayer((rotary,))
every other    PerLayer((rotary, none))                layers 0, 2, ..
first only     PerLayer((rotary, none, none, none))    later layers see the order that the first wrote into the stream
last only      PerLayer((none, none, none, rotary))
none           the causal mask alone tells of places"""


def schemes() -> dict[str, PositionScheme]:
    """Which of four layers turn."""
    turned, plain = Rotary(pairing="halves"), NoPositions()
    rest = (plain,) * (LAYERS - 1)
    return {
        "all": PerLayer((turned,)),
        "every other": PerLayer((turned, plain)),
        "first only": PerLayer((turned, *rest)),
        "last only": PerLayer((*rest, turned)),
        "none": plain,
    }


def run() -> Report:
    """Every choice of layers, trained; each against rotary in all of them."""
    specs = {name: small(positions=scheme, layers=LAYERS) for name, scheme in schemes().items()}
    return judge(contend(specs, BUDGET))


def judge(runs: Mapping[str, Sequence[Run]]) -> Report:
    """The verdict: whether fewer turned layers end higher than all of them."""
    lines = rows(runs, {name: "all" for name in runs if name != "all"})
    apart = {line[0]: gap_in(line) for line in lines[1:]}
    claims = {
        "turning the first layer only ends higher than turning all": apart["first only"].higher,
        "turning every other layer does": apart["every other"].higher,
        "turning none does": apart["none"].higher,
    }
    return Report(
        topic="rotary-layers",
        question=TOPICS["rotary-layers"][1],
        formula=FORMULA,
        columns=columns(BUDGET),
        rows=tuple(lines),
        seen=apart["first only"].higher,
        setting=f"{LAYERS} layers of width 64, {BUDGET}",
        finding=f"{told(claims)}. Against all: " + "; ".join(f"{name} {x}" for name, x in apart.items()),
    )


def draw(figure: Any, report: Report) -> None:
    """Losses of every choice and seed."""
    figure.set_size_inches(8, 3.0)
    axes = figure.subplots()
    draw_losses(axes, report.rows, len(BUDGET.seeds))
    axes.set_title(f"which of {LAYERS} layers turn queries and keys")
