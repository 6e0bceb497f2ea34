"""Whether attention knows the order of its tokens. (Vaswani et al. 2017, section 3.5.)"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from headway.nn import Attention, PositionEmbedding
from headway.patterns import Causal, Full, Pattern
from headway.positions import Learned, NoPositions, PositionScheme, Rotary, Sinusoidal
from headway.tokens import Tokens
from headway_lab.explain.figures import bars, panels
from headway_lab.explain.report import Report, Row, Rows

TOKENS, WIDTH, HEADS, SEEDS = 24, 32, 4, (0, 1, 2)
EQUAL, APART = 1e-6, 1e-3

CASES: tuple[tuple[str, PositionScheme, Pattern], ...] = (
    ("none", NoPositions(), Full()),
    ("sinusoidal, added", Sinusoidal(), Full()),
    ("learned, added", Learned(TOKENS), Full()),
    ("rotary, on q and k", Rotary(pairing="halves"), Full()),
    ("none", NoPositions(), Causal()),
)


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields, for one layer with and without positions, in float64, whether the output shuffles with the tokens."""
    for name, scheme, pattern in CASES:
        worst = [shuffle_error(scheme, pattern, seed) for seed in seeds]
        yield {
            "positions": name,
            "pattern": str(pattern),
            "least difference": min(worst),
            "largest difference": max(worst),
            "order is seen": max(worst) > EQUAL,
        }


def judge(rows: Rows) -> Report:
    """Returns the verdict: without positions full attention only shuffles; with them, or under a causal mask, it
    changes."""
    blind, least_changes = rows[0]["largest difference"], [row["least difference"] for row in rows[1:]]
    return Report(
        rows=tuple(rows),
        claims={
            "blind": blind <= EQUAL,
            "marked": min(least_changes[:-1]) > APART,
            "masked": least_changes[-1] > APART,
        },
        values={"blind": blind, "marked": min(least_changes[:-1]), "masked": least_changes[-1]},
    )


def shuffle_error(scheme: PositionScheme, pattern: Pattern, seed: int) -> float:
    """Returns the largest |f(P x) - P f(x)| of one attention layer under one random permutation, relative to |f(x)|."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x, order = torch.randn(1, TOKENS, WIDTH, dtype=torch.float64), torch.randperm(TOKENS)
        layer = Attention(WIDTH, HEADS, pattern=pattern, positions=scheme).double()
        marks = PositionEmbedding(scheme, WIDTH).double()
        for parameter in (*layer.parameters(), *marks.parameters()):
            torch.nn.init.normal_(parameter, std=0.3)

    @torch.no_grad()
    def f(x: Tensor) -> Tensor:
        out: Tensor = layer(marks(x, Tokens.range(TOKENS)))
        return out

    out = f(x)
    return float((f(x[:, order]) - out[:, order]).abs().max() / out.abs().max())


draw = panels(
    bars(
        ("positions", "pattern"),
        "largest difference",
        "does a shuffle of the tokens change the outputs?",
        "largest |f(P x) - P f(x)| / |f(x)|",
        pale=lambda row: row["order is seen"],
        line=EQUAL,
        xscale="log",
        xlim=(1e-17, 10),
    )
)
