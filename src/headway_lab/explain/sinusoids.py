"""What sinusoids added to the embeddings tell about positions. (Vaswani et al. 2017, section 3.5.)"""

import math

import torch
from torch import Tensor

from headway.positions import Sinusoidal
from headway_lab.explain.figures import Axes, curves, label_axes, panels
from headway_lab.explain.report import Report, Rows
from headway_lab.profiling import normal

WIDTH, COUNT, SEED = 512, 2048, 0
APART = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SOME = [0, 1, 7, 100, COUNT - 1]
ALLOWED = 4 * COUNT * 2.0**-53  # an angle p theta_i is rounded by up to p 2^-53; three enter


def run() -> Report:
    """Measures, for distances k, how far PE(p + k) is from T_k PE(p), and how products of rows vary with p."""
    table, rows = positions(), []
    projected = table @ projection()
    for k in APART:
        plain = (table[:-k] * table[k:]).sum(-1) / (WIDTH / 2)
        mixed = (projected[:-k] * table[k:]).sum(-1)
        mean = float(plain.mean())
        rows.append(
            {
                "k": k,
                "|PE(p+k) - T_k PE(p)|": float((table[k:] - shifted(table, k)[:-k]).abs().max()),
                "PE(p).PE(p+k) / (M/2)": mean,
                "from sum of cos": mean - float((k * frequencies()).cos().mean()),
                "spread over p": float(plain.std()),
                "projected": float(mixed.mean()),
                "spread over p, projected": float(mixed.std()),
            }
        )
    return judge(rows, float((table[SOME] - by_hand()).abs().max()))


def positions() -> Tensor:
    """Returns PE [COUNT, M]."""
    return Sinusoidal().embedding(torch.arange(COUNT), WIDTH, torch.float64)


def projection() -> Tensor:
    """Returns a random W_q W_k^T [M, M]."""
    return normal(WIDTH, WIDTH, seed=SEED) / WIDTH


def frequencies() -> Tensor:
    """Returns 10000^(-2i/M), [M/2]."""
    return 10000.0 ** (-torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)


def by_hand() -> Tensor:
    """Returns the printed formula, number by number, for the positions `SOME`, including the first and the last."""
    angles = [[p / 10000 ** (2 * i / WIDTH) for i in range(WIDTH // 2)] for p in SOME]
    return torch.tensor(
        [[f(a) for a in row for f in (math.sin, math.cos)] for row in angles], dtype=torch.float64
    )


def shifted(table: Tensor, k: int) -> Tensor:
    """Returns T_k applied to every row: (s, c) -> (s cos + c sin, c cos - s sin) of k / 10000^(2i/M)."""
    s, c = table[:, 0::2], table[:, 1::2]
    cos, sin = (k * frequencies()).cos(), (k * frequencies()).sin()
    return torch.stack((s * cos + c * sin, c * cos - s * sin), -1).flatten(-2)


def judge(rows: Rows, from_formula: float) -> Report:
    """Returns the verdict: one linear map per distance; products depend only on distance until they are projected."""
    map_error = max(row["|PE(p+k) - T_k PE(p)|"] for row in rows)
    spread = max(row["spread over p"] for row in rows)
    mixed = min(row["spread over p, projected"] / max(abs(row["projected"]), 1e-12) for row in rows)
    closed = max(abs(row["from sum of cos"]) for row in rows)
    return Report(
        rows=tuple(rows),
        claims={
            "formula": from_formula < ALLOWED,
            "linear": map_error < ALLOWED,
            "cosines": max(closed, spread) < ALLOWED,
            "projected": mixed > 0.1,
        },
        values={
            "from_formula": from_formula,
            "off": map_error,
            "spread": spread,
            "mixed": mixed,
            "farthest": COUNT - 1,
            "length": math.sqrt(WIDTH / 2),
            "scale": math.sqrt(WIDTH),
        },
    )


def draw_table(axes: Axes, report: Report) -> None:
    """Draws PE of the first positions."""
    axes.imshow(
        positions()[:128].numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest"
    )
    label_axes(axes, "PE", "feature (even: sine, odd: cosine)", "position p")
    axes.grid(visible=False)


PRODUCTS = {
    "PE(p).PE(p+k) / (M/2)": "o- blue",
    "spread over p": "o- grey",
    "spread over p, projected": "o- orange",
}
draw = panels(draw_table, curves("k", PRODUCTS, "products of two rows", log="x"))
