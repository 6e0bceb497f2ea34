"""Why attention has several heads: what channels are to a convolution. (Vaswani et al. 2017, section 3.2.2.)"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise, product
from statistics import fmean

import torch

from headway.draw import BLUE, GREY, INK, RED
from headway.positions import Rotary
from headway_lab.explain.offset_task import SYMBOLS, TOKENS, WIDTH, Trained, sample, train
from headway_lab.explain.report import Figure, Report, Rows, mosaic
from headway_lab.explain.spread import every, gap

OFFSETS, HEADS, STEPS, SEEDS = (1, 3, 6, 10), (1, 2, 4), 250, (0, 1, 2)
QUICK = {"seeds": (0, 1)}


def run(*, seeds: Sequence[int] = SEEDS, steps: int = STEPS) -> Report:
    """The same layer with 1, 2 and 4 heads, trained alike: how many tokens it names, and where its heads look."""
    rows = []
    for heads, seed in product(HEADS, seeds):
        trained = fit(heads, seed, steps)
        looked = looks(trained)
        rows.append(
            {
                "heads": heads,
                "parameters": sum(p.numel() for p in trained.layer.parameters()),
                "seed": seed,
                "steps": steps,
                "right": trained.accuracy(),
                "last loss": trained.losses[-1],
                "heads look back": " ".join(map(str, looked)),
                "places": len(set(looked)),
            }
        )
    return judge(rows)


@cache
def fit(heads: int, seed: int, steps: int) -> Trained:
    """One trained layer."""
    return train(Rotary(pairing="adjacent"), OFFSETS, heads=heads, steps=steps, seed=seed)


@torch.no_grad()
def looks(trained: Trained) -> list[int]:
    """For each head: how far back it looks most."""
    far = max(OFFSETS) + 4
    late = trained.layer.weights(sample(16, torch.Generator().manual_seed(20_000)))[:, :, far:]
    shares = [late.diagonal(far - back, 2, 3).mean((0, 2)) for back in range(far)]
    return torch.stack(shares).argmax(0).tolist()


def mean_right(rows: Rows) -> dict[int, float]:
    """The mean share of tokens named, by heads."""
    return {heads: fmean(row["right"] for row in rows if row["heads"] == heads) for heads in HEADS}


def judge(rows: Rows) -> Report:
    """The verdict: with a head for each place all tokens are named, with fewer heads they are not."""
    mean, most = mean_right(rows), HEADS[-1]
    own = [row for row in rows if row["heads"] == most and row["places"] == len(OFFSETS)]
    right = {heads: [row["right"] for row in rows if row["heads"] == heads] for heads in HEADS}
    seeds = tuple(dict.fromkeys(row["seed"] for row in rows))
    return Report(
        rows=tuple(rows),
        claims={
            "with as many parameters": len({row["parameters"] for row in rows}) == 1,
            "more heads name more tokens": every(gap(right[a], right[b]).lower for a, b in pairwise(HEADS)),
            f"{most} heads name over 90 %": mean[most] > 0.9,
            f"the {most} heads share the {len(OFFSETS)} places among them, with every seed": len(own)
            == len(seeds),
        },
        setting=f"width {WIDTH}, rows of {TOKENS} of {SYMBOLS} symbols, {rows[0]['steps']} steps, seeds {seeds}",
        finding=(
            f"with {rows[0]['parameters']} parameters each, layers of {', '.join(map(str, HEADS))} heads name "
            f"{', '.join(f'{mean[heads]:.0%}' for heads in HEADS)} of the {len(OFFSETS)} tokens (chance is "
            f"{1 / SYMBOLS:.0%}); in {len(own)} of {len(seeds)} runs the {most} heads share the {len(OFFSETS)} places "
            "among them"
        ),
    )


@torch.no_grad()
def draw(figure: Figure, report: Report) -> None:
    """Attention maps of one row: the single head, then each of the four heads; and the share of tokens named."""
    axes = mosaic(figure, 8.5, 6.0, "ABC;DEF")
    ids = sample(1, torch.Generator().manual_seed(20_000))
    one, four = (
        fit(heads, report.rows[0]["seed"], report.rows[0]["steps"]) for heads in (HEADS[0], HEADS[-1])
    )
    maps = [one.layer.weights(ids)[0, 0], *four.layer.weights(ids)[0]]
    titles = ["1 head", *(f"head {h} of 4: {far} back" for h, far in enumerate(looks(four), start=1))]
    for panel, weights in zip(axes[:5], maps, strict=True):
        panel.imshow(weights[:24, :24].numpy(), cmap="Blues", vmin=0, vmax=1)
        panel.grid(visible=False)
    last = axes[5]
    last.bar([str(heads) for heads in HEADS], mean_right(report.rows).values(), color=BLUE)
    last.plot([str(heads) for heads in report.column("heads")], report.column("right"), ".", color=INK)
    last.axhline(1 / SYMBOLS, color=RED, linestyle="--", linewidth=1)
    last.grid(visible=False, axis="x")
    below = [*["key"] * 5, "heads (dots: seeds; dashed: chance)"]
    for panel, title, label in zip(axes, [*titles, "tokens named"], below, strict=True):
        panel.set_title(title, fontsize=9)
        panel.set_xlabel(label, fontsize=8, color=GREY)
        panel.tick_params(labelsize=7)
    axes[0].set_ylabel("query", fontsize=8, color=GREY)
