"""Why attention has several heads, as convolutions have channels. (Vaswani et al. 2017, section 3.2.2.)"""

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise, product
from statistics import fmean

import torch

from headway.positions import Rotary
from headway_lab.explain.figures import Axes, Panel, bars, label_axes, panels
from headway_lab.explain.offset_task import SYMBOLS, TOKENS, WIDTH, Trained, sample, train
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.explain.spread import every, gap

OFFSETS, HEADS, STEPS, SEEDS = (1, 3, 6, 10), (1, 2, 4), 250, (0, 1, 2)


def run(*, seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Iterator[Row]:
    """Yields, for the same layer with 1, 2 and 4 heads, trained alike, the share of tokens it names, and where its
    heads look."""
    for heads, seed in product(HEADS, seeds):
        trained = fit(heads, seed, steps)
        looked = looks(trained)
        yield {
            "heads": heads,
            "parameters": sum(p.numel() for p in trained.layer.parameters()),
            "seed": seed,
            "steps": steps,
            "right": trained.accuracy(),
            "last loss": trained.losses[-1],
            "heads look back": " ".join(map(str, looked)),
            "places": len(set(looked)),
        }


@cache
def fit(heads: int, seed: int, steps: int) -> Trained:
    """Returns one trained layer."""
    return train(Rotary(pairing="adjacent"), OFFSETS, heads=heads, steps=steps, seed=seed)


@torch.no_grad()
def looks(trained: Trained) -> list[int]:
    """Returns, for each head, the distance back that it looks at most."""
    farthest = max(OFFSETS) + 4
    late = trained.layer.weights(sample(16, torch.Generator().manual_seed(20_000)))[:, :, farthest:]
    shares = [late.diagonal(farthest - distance, 2, 3).mean((0, 2)) for distance in range(farthest)]
    return torch.stack(shares).argmax(0).tolist()


def judge(rows: Rows) -> Report:
    """Returns the verdict: with a head for each offset all tokens are named, with fewer heads they are not."""
    most_heads = HEADS[-1]
    separated = [row for row in rows if row["heads"] == most_heads and row["places"] == len(OFFSETS)]
    shares_named = {heads: [row["right"] for row in rows if row["heads"] == heads] for heads in HEADS}
    return Report(
        rows=tuple(rows),
        claims={
            "alike": len({row["parameters"] for row in rows}) == 1,
            "more": every(gap(shares_named[a], shares_named[b]).lower for a, b in pairwise(HEADS)),
            "most": fmean(shares_named[most_heads]) > 0.9,
            "shared": len(separated) == len(shares_named[most_heads]),
        },
        values={
            "width": WIDTH,
            "tokens": TOKENS,
            "most": most_heads,
            "places": len(OFFSETS),
            "right": [fmean(shares) for shares in shares_named.values()],
            "chance": 1 / SYMBOLS,
            "shared": len(separated),
            "runs": len(shares_named[most_heads]),
        },
    )


def map_of(heads: int, head: int) -> Panel:
    """Returns a panel with the attention of one head of a layer on one row."""

    @torch.no_grad()
    def draw(axes: Axes, report: Report) -> None:
        trained = fit(heads, report.rows[0]["seed"], report.rows[0]["steps"])
        weights = trained.layer.weights(sample(1, torch.Generator().manual_seed(20_000)))[0, head]
        axes.imshow(weights[:24, :24].numpy(), cmap="Blues", vmin=0, vmax=1)
        axes.grid(visible=False)
        name = "1 head" if heads == 1 else f"head {head + 1} of {heads}: {looks(trained)[head]} back"
        label_axes(axes, name, "key", "query")

    return draw


draw = panels(
    map_of(HEADS[0], 0),
    *(map_of(HEADS[-1], head) for head in range(HEADS[-1])),
    bars(("heads",), "right", "tokens named", "share (line: seeds; dashed: chance)", line=1 / SYMBOLS),
    layout="ABC;DEF",
)
