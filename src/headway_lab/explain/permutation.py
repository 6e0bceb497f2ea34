"""Whether attention knows the order of its tokens. (Vaswani et al. 2017, section 3.5.)"""

from typing import Any

import torch
from torch import Tensor

from headway.nn import Attention, PositionEmbedding
from headway.patterns import Causal, Full, Pattern
from headway.positions import Learned, NoPositions, PositionScheme, Rotary, Sinusoidal
from headway.tokens import Tokens
from headway_lab.explain import TOPICS, Report

TOKENS, WIDTH, HEADS, SEEDS = 24, 32, 4, (0, 1, 2)
EQUAL = 1e-6

FORMULA = """f(P x) = P f(x) for every permutation P of the tokens   (equivariance)
holds for full attention without positions: each output is a sum over the *set* of keys
measured: largest |f(P x) - P f(x)| over tokens, relative to the largest |f(x)|"""

CASES: tuple[tuple[str, PositionScheme, Pattern], ...] = (
    ("none", NoPositions(), Full()),
    ("sinusoidal, added", Sinusoidal(), Full()),
    ("learned, added", Learned(TOKENS), Full()),
    ("rotary, on q and k", Rotary(pairing="halves"), Full()),
    ("none", NoPositions(), Causal()),
)


def run() -> Report:
    """Shuffle the tokens of one layer with and without positions, in float64: does the output shuffle with
    them?
    """
    rows = []
    for name, scheme, pattern in CASES:
        worst = [shuffle_error(scheme, pattern, seed) for seed in SEEDS]
        rows.append((name, str(pattern), min(worst), max(worst), max(worst) > EQUAL))
    return judge(rows)


def judge(rows: list[tuple[str, str, float, float, bool]]) -> Report:
    """The verdict: without positions full attention only shuffles; with them, or under a causal mask, it
    changes.
    """
    blind, marked = rows[0], rows[1:]
    return Report(
        topic="order",
        question=TOPICS["order"][1],
        formula=FORMULA,
        columns=("positions", "pattern", "least difference", "largest difference", "order is seen"),
        rows=tuple(rows),
        seen=blind[3] <= EQUAL and all(least > 1e3 * EQUAL for _, _, least, *_ in marked),
        setting=f"{TOKENS} tokens, width {WIDTH}, {HEADS} heads, random weights, {len(SEEDS)} seeds, float64",
        finding=(
            f"without positions a shuffle of the tokens shuffles the outputs and changes none ({blind[3]:.0e}); "
            f"every kind of position changes them by {min(r[2] for r in marked[:-1]):.1%} or more, and so does a "
            f"causal mask by itself ({marked[-1][2]:.1%}): it tells how many tokens came before"
        ),
    )


def shuffle_error(scheme: PositionScheme, pattern: Pattern, seed: int) -> float:
    """Largest |f(P x) - P f(x)| of one attention layer under one random permutation, relative to |f(x)|."""
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


def draw(figure: Any, report: Report) -> None:
    """One bar for each kind of position: how much a shuffle changes, on a logarithmic axis."""
    figure.set_size_inches(7.5, 3.2)
    axes = figure.subplots()
    names = [f"{p}\n{q}" for p, q in zip(report.column("positions"), report.column("pattern"), strict=True)]
    sizes = [max(float(size), 1e-17) for size in report.column("largest difference")]
    colours = ["#2f6fb3" if seen else "#3c9b6b" for seen in report.column("order is seen")]
    axes.barh(names[::-1], [size - 1e-17 for size in sizes[::-1]], left=1e-17, color=colours[::-1])
    axes.axvline(EQUAL, color="#8a94a0", linestyle="--", linewidth=1.2)
    axes.set_axisbelow(True)
    axes.grid(visible=False, axis="y")
    axes.set(xscale="log", xlim=(1e-17, 10), xlabel="largest |f(P x) - P f(x)| / |f(x)|")
    axes.set_title("does a shuffle of the tokens change the outputs?")
