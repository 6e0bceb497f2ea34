"""What masks hide, and the four patterns of Longformer's figure 2, as seen by gradients."""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.attention import attend
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, Window, visible
from headway.tokens import Tokens
from headway_lab.draw import GREY, PALE, draw_pattern
from headway_lab.explain.figures import Figure, bare
from headway_lab.explain.report import Report

COUNT, HEADS, WIDTH, SEED = 24, 2, 8, 0
GLOBAL = (0, 9)
TOKENS = Tokens.range(COUNT).with_global(list(GLOBAL))

CASES: tuple[tuple[str, Pattern], ...] = (
    ("full", Full()),
    ("sliding window", Window.around(3)),
    ("dilated window", Window.around(3, step=2)),
    ("global + window", Window.around(2) | Global()),
    ("causal", Causal()),
    ("causal window", Window.last(6)),
    ("causal dilated", Window.last(5, step=2)),
    ("causal global + window", Window.last(4) | (Causal() & GlobalKeys())),
)


def run() -> Report:
    """Compares, for each pattern, the allowed pairs, the pairs with a gradient, and the outputs that change when a
    token does."""
    rows: list[dict[str, Any]] = []
    for name, pattern in CASES:
        allowed = visible(pattern, TOKENS, TOKENS)[0, 0]
        gradient, changed = measure(pattern)
        forbidden = ~(allowed | torch.eye(COUNT, dtype=torch.bool))
        rows.append(
            {
                "pattern": name,
                "pairs allowed": int(allowed.sum()),
                "with gradient": int((gradient > 0).sum()),
                "differing": int(((gradient > 0) != allowed).sum()),
                "changed from outside": int((changed & forbidden).sum()),
                "gradient from the future": float(gradient.triu(1).max()) if pattern.is_causal else None,
            }
        )
    wrong = sum(row["differing"] + row["changed from outside"] for row in rows)
    leak = max(row["gradient from the future"] or 0.0 for row in rows)
    return Report(
        rows=tuple(rows),
        picture="\n".join(f"{name:<22}  {pattern}" for name, pattern in CASES),
        claims={
            "declared": all(row["differing"] == 0 for row in rows),
            "changed": all(row["changed from outside"] == 0 for row in rows),
            "future": leak == 0.0,
        },
        values={"wrong": wrong, "leak": leak},
    )


@cache
def measure(pattern: Pattern) -> tuple[Tensor, Tensor]:
    """Returns gradient norms |d (w_i . y_i) / d x_j| [N, N] for random w, and which outputs i change when token j does.

    The queries are fixed, so that a token's own query does not count as seeing itself."""
    noise = torch.Generator().manual_seed(SEED)
    x = torch.randn(COUNT, HEADS * WIDTH, generator=noise, dtype=torch.float64)
    to_q, to_k, to_v = torch.randn(3, HEADS * WIDTH, HEADS * WIDTH, generator=noise, dtype=torch.float64)
    q = _heads(x @ to_q / WIDTH)

    def layer(x: Tensor) -> Tensor:
        k, v = _heads(x @ to_k / WIDTH), _heads(x @ to_v)
        y = attend(q, k, v, pattern, q_tokens=TOKENS, k_tokens=TOKENS)
        return y[0].transpose(0, 1).flatten(1)

    source = x.clone().requires_grad_()
    y = (layer(source) * torch.randn(x.shape, generator=noise, dtype=torch.float64)).sum(-1)
    rows = [torch.autograd.grad(y[i], source, retain_graph=True)[0].norm(dim=-1) for i in range(COUNT)]
    before, unit = layer(x), torch.eye(COUNT, dtype=x.dtype)[..., None]
    changed = [(layer(x + unit[t]) != before).any(-1) for t in range(COUNT)]
    return torch.stack(rows), torch.stack(changed, -1)


def draw(figure: Figure, report: Report) -> None:
    """Draws a row of declared patterns above a row of measured gradients, two-sided patterns first, causal ones
    below."""
    figure.set_size_inches(12.6, 13.4)
    axes = figure.subplots(4, 4)
    for number, (name, pattern) in enumerate(CASES):
        top, column = 2 * (number // 4), number % 4
        draw_pattern(axes[top][column], pattern, TOKENS, f"{name}: declared", legend=False)
        below, gradient = axes[top + 1][column], measure(pattern)[0]
        below.imshow(np.ma.log10(gradient.numpy()), cmap="viridis", interpolation="nearest")
        below.set_facecolor(PALE)
        below.set_title(f"{name}: measured", fontsize=9, loc="left")
        label = f"log10 |d out / d in|, {int((gradient > 0).sum())} pairs not 0"
        below.set_xlabel(label, fontsize=8, color=GREY)
        bare(below)


def _heads(x: Tensor) -> Tensor:
    return x.view(1, COUNT, HEADS, WIDTH).transpose(1, 2)
