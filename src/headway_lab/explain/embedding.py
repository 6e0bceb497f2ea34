"""Why embeddings are multiplied by the square root of the width. (Vaswani et al. 2017, section 3.4.)"""

import math
from typing import Any

import torch

from headway.models import EncoderDecoder, ModelSpec, build
from headway.positions import Sinusoidal
from headway_lab.explain import TOPICS, Report

WIDTHS = (32, 64, 128, 256, 512, 1024)
VOCAB, POSITIONS, STATES, SEED = 2000, 512, 256, 0

FORMULA = """one matrix E [V, M] is source embedding, target embedding and output layer: logits = x E^T
a normed state has |x| = sqrt(M), so Var(logit) = |e|^2: rows of length 1 (entries of variance 1/M) give variance 1
|PE(p)| = sqrt(M/2) at every p, so without a scale |e| / |PE| = sqrt(2/M), and with sqrt(M) it is sqrt(2) at every M
share of the token in what the first layer is given: |s e|^2 / (|s e|^2 + |PE|^2), s the scale"""


@torch.no_grad()
def run() -> Report:
    """Fresh encoder-decoders of growing width: lengths of embeddings and positions, and the variance of logits."""
    rows = []
    for width in WIDTHS:
        spec = ModelSpec.of_pair(
            "transformer",
            vocab=VOCAB,
            width=width,
            layers=1,
            heads=4,
            hidden=width,
            tied=True,
            init_std=width**-0.5,
        )
        model = build(spec, seed=SEED)
        assert isinstance(model, EncoderDecoder)
        matrix = model.decoder.embedding
        token = float(matrix.norm(dim=-1).mean())
        place = float(Sinusoidal().embedding(torch.arange(POSITIONS), width).norm(dim=-1).mean())
        noise = torch.Generator().manual_seed(SEED)
        states = torch.nn.functional.layer_norm(torch.randn(STATES, width, generator=noise), (width,))
        scale = spec.embedding_scale
        rows.append(
            (
                *(width, scale, token, scale * token, place, token / place, scale * token / place),
                *(_share(token, place), _share(scale * token, place)),
                *(float(model.logits(states).var()), float((states @ (scale * matrix).T).var())),
                len({p.data_ptr() for name, p in model.named_parameters() if p.shape == matrix.shape}),
            )
        )
    return judge(rows)


def _share(token: float, place: float) -> float:
    return token**2 / (token**2 + place**2)


def judge(rows: list[tuple[Any, ...]]) -> Report:
    """The verdict: with the scale token and position are of one size at every width, without it tokens drown; the
    matrix itself must stay small for its other use."""
    first, last = rows[0], rows[-1]
    even = max(abs(row[6] / math.sqrt(2) - 1) for row in rows)
    falls = max(abs(row[5] / math.sqrt(2 / row[0]) - 1) for row in rows)
    calm, wild = max(abs(row[9] - 1) for row in rows), max(abs(row[10] / row[0] - 1) for row in rows)
    at = {row[0]: row for row in rows}.get(512, last)
    return Report(
        topic="embedding",
        question=TOPICS["embedding"][1],
        formula=FORMULA,
        columns=(
            *("M", "sqrt(M)", "|e|", "|sqrt(M) e|", "|PE|", "|e| / |PE|", "|sqrt(M) e| / |PE|"),
            *(
                "share of the token",
                "share, scaled",
                "Var(logit)",
                "Var(logit), entries of variance 1",
                "matrices",
            ),
        ),
        rows=tuple(rows),
        seen=max(even, falls, calm, wild) < 0.1 and all(row[11] == 1 for row in rows),
        setting=f"M = {first[0]}..{last[0]}, {VOCAB} tokens, {POSITIONS} positions, seed {SEED}, not trained",
        finding=(
            f"at M = {at[0]} a token's row is {at[2]:.3f} long and a position's {at[4]:.3f}: unscaled, the token is "
            f"{at[7]:.1%} of what the first layer is given, times {at[1]:.3f} it is {at[8]:.0%}, as at every other "
            f"width (ratio sqrt(2) within {even:.0%}). The rows cannot just be longer: the same matrix makes the "
            f"logits, whose variance is {at[9]:.2f} and would be {at[10]:.0f}"
        ),
    )


def draw(figure: Any, report: Report) -> None:
    """Left: lengths against the width. Right: how much of the sum is the token."""
    figure.set_size_inches(9, 3.8)
    left, right = figure.subplots(1, 2)
    width = report.column("M")
    left.loglog(width, report.column("|PE|"), "s--", color="#8a94a0", label="position, |PE|")
    left.loglog(width, report.column("|e|"), "o-", color="#c8453c", label="token, |e|")
    left.loglog(width, report.column("|sqrt(M) e|"), "o-", color="#3c9b6b", label="token, |√M e|")
    left.set(title="lengths of what is added", xlabel="width M", ylabel="length")
    right.semilogx(width, report.column("share of the token"), "o-", color="#c8453c", label="e + PE")
    right.semilogx(width, report.column("share, scaled"), "o-", color="#3c9b6b", label="√M e + PE")
    right.set(title="share of the token in the sum", xlabel="width M", ylabel="share", ylim=(0, 1))
    for axes in (left, right):
        axes.set_xticks(width, [str(w) for w in width])
        axes.minorticks_off()
        axes.legend()
