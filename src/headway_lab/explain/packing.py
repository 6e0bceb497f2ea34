"""What padding wastes, what packing saves, and that packed examples do not see each other. (Krell et al. 2021.)"""

import random
from collections.abc import Callable, Iterator, Sequence

import torch

from headway.data.chats import best_fit
from headway.models import ModelSpec, build
from headway.tokens import Tokens
from headway_lab.draw import BLUE
from headway_lab.explain.figures import Axes, bars, label_axes, panels
from headway_lab.explain.report import Report, Row, Rows

SEEDS = (0, 1, 2)
EXAMPLES, ROOM, BATCH = 2000, 512, 16
MEDIAN, SPREAD = 110.0, 0.6  # of lengths like Alpaca's: most are short, a few fill a row
VOCAB = 64


def lengths(seed: int) -> list[int]:
    """Returns log-normal lengths, at most that of a row."""
    rng = random.Random(seed)
    return [min(ROOM, max(8, round(MEDIAN * 2.718281828 ** rng.gauss(0, SPREAD)))) for _ in range(EXAMPLES)]


def padded(drawn: Sequence[int]) -> int:
    """Returns the number of slots of padded batches in the given order."""
    batches = [drawn[i : i + BATCH] for i in range(0, len(drawn), BATCH)]
    return sum(len(batch) * max(batch) for batch in batches)


WAYS: dict[str, Callable[[Sequence[int]], int]] = {
    "padded": padded,
    "sorted": lambda drawn: padded(sorted(drawn)),
    "packed": lambda drawn: ROOM * len(best_fit(drawn, ROOM)),
}


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields the share of filled slots for each way and seed; then the difference of a packed row's outputs from those
    of its parts, with and without document bounds, in float64."""
    for seed in seeds:
        drawn = lengths(seed)
        for way, slots in WAYS.items():
            yield {"way": way, "seed": seed, "filled": sum(drawn) / slots(drawn)}
    model = build(
        ModelSpec.of_depth(2, VOCAB, width=32, heads=2, kv_heads=1, head_dim=16), dtype=torch.float64, seed=0
    )
    parts = [torch.randint(VOCAB, (1, n), generator=torch.Generator().manual_seed(n)) for n in (7, 12, 5)]
    row = torch.cat(parts, dim=1)
    with torch.no_grad():
        alone = torch.cat([model(part) for part in parts], dim=1)
        outputs = {
            "with bounds": model(row, tokens=Tokens.packed([[part.shape[1] for part in parts]])),
            "without": model(row),
        }
    for label, y in outputs.items():
        yield {"way": f"packed {label}", "difference": float((y - alone).abs().max())}


def judge(rows: Rows) -> Report:
    """Returns the verdict: packing fills over 97 % for every seed, padding less, and only bounds separate examples."""
    filled = {way: [row["filled"] for row in rows if row["way"] == way] for way in WAYS}
    difference, unbounded_difference = (row["difference"] for row in rows if "difference" in row)
    return Report(
        rows=tuple(rows),
        claims={
            "packed": min(filled["packed"]) > 0.97,
            "padded": max(filled["padded"]) < 0.7,
            "kept": difference < 1e-12,
            "leaked": unbounded_difference > 1e-3,
        },
        values={
            "padded": max(filled["padded"]),
            "sorted": min(filled["sorted"]),
            "packed": min(filled["packed"]),
            "gain": min(filled["packed"]) / max(filled["padded"]),
            "kept": difference,
            "leaked": unbounded_difference,
        },
    )


def draw_lengths(axes: Axes, report: Report) -> None:
    """Draws the lengths of the examples of one seed."""
    axes.hist(lengths(report.rows[0]["seed"]), bins=32, color=BLUE)
    label_axes(axes, "lengths of the examples", "tokens", "examples")


draw = panels(bars(("way",), "filled", "slots that hold a token", "share", xlim=(0, 1.1)), draw_lengths)
