"""Whether rotary positions make distant tokens matter less. (Su et al. 2021, section 3.4.3.)"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from headway.positions import Rotary
from headway_lab.draw import RED
from headway_lab.explain.figures import Axes, curves, panels
from headway_lab.explain.report import Report

HEAD_DIM, FARTHEST = 128, 256
PAIRS, AT_ONCE, SEEDS = 1024, 64, (0, 1, 2)
SHOWN = (0, 1, 5, 10, 50, 100, 200, 236, 256)
DIGITS = (0, 1, 5, 10, 50, 100, 200, 256)


def run(*, seeds: Sequence[int] = SEEDS) -> Report:
    """Computes f(m) for m = 0..256 at d = 128, and what it bounds: scores of random queries and keys, rotated by
    `Rotary`."""
    rotary, distance, shares = Rotary(pairing="adjacent"), torch.arange(FARTHEST + 1), []
    frequencies = rotary.frequencies(HEAD_DIM)
    for seed in seeds:
        noise = torch.Generator().manual_seed(seed)
        for _ in range(PAIRS // AT_ONCE):
            q, k = torch.randn(2, AT_ONCE, 1, 1, HEAD_DIM, generator=noise, dtype=torch.float64)
            score, auto = scores(rotary, q, k, distance).abs(), scores(rotary, q, q, distance)
            share = score / bound(q[:, 0], k[:, 0], distance, frequencies)
            above = (score > score[:, :1]).double()
            shares.append(torch.stack((share.amax(0), above.mean(0), (auto / auto[:, :1]).mean(0))))
    tightest, exceeds, alike = torch.stack(shares, 1)
    columns = {
        "f(m)": decay(distance, frequencies),
        "f, equal theta": decay(distance, torch.ones_like(frequencies)),
        "|score| / bound, max": tightest.amax(0),
        "share above m = 0": exceeds.mean(0),
        "q = k: score / score(0)": alike.mean(0),
    }
    return judge(columns, seeds)


def decay(distance: Tensor, frequencies: Tensor) -> Tensor:
    """Returns f(m) of distances [...] under the frequencies [d/2], float64. It is constant if all frequencies are
    equal."""
    angle = distance.to(torch.float64)[..., None] * frequencies.to(torch.float64)
    partial = torch.polar(torch.ones_like(angle), angle).cumsum(-1)
    return partial.abs().mean(-1)


def bound(q: Tensor, k: Tensor, distance: Tensor, frequencies: Tensor) -> Tensor:
    """Returns the bound of |sum_i h_i e^(i m theta_i)| for q, k [..., d] in adjacent pairs and distances m that
    broadcast to [...], float64: max_i |h_(i+1) - h_i| d/2 decay(m). (Abel summation.)"""
    q, k = (torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous()) for x in (q, k))
    h = q * k.conj()
    steps = torch.cat((h[..., 1:], torch.zeros_like(h[..., :1])), -1) - h
    return steps.abs().amax(-1) * decay(distance, frequencies) * frequencies.shape[-1]


def scores(rotary: Rotary, q: Tensor, k: Tensor, distance: Tensor) -> Tensor:
    """Returns q . (R_m k) for q, k [N, 1, 1, d] and every distance m, [N, M]."""
    return (rotary.rotate(k.expand(-1, -1, len(distance), -1), distance) * q).sum(-1)[:, 0]


def judge(columns: Mapping[str, Tensor], seeds: Sequence[int] = SEEDS) -> Report:
    """Returns the verdict on the curve [257] and the pairs: it falls, with bumps, and no pair exceeds the bound."""
    curve, equal, tightest, exceeds, alike = columns.values()
    rises = int((curve.diff() > 0).sum())
    falls = float(curve[0] / curve[-1])
    above = float(exceeds[1:].mean())
    return Report(
        rows=tuple(
            {"m (tokens)": m, **{name: float(column[m]) for name, column in columns.items()}}
            for m in range(len(curve))
        ),
        claims={
            "falls": falls > 2,
            "equal": float((equal - equal[0]).abs().max()) < 1e-9,
            "rises": rises > 0,
            "bound": float(tightest.max()) <= 1,
            "above": abs(above - 0.5) < 0.05,
            "alike": float(alike[-1]) < 0.5,
        },
        values={
            "pairs": len(seeds) * PAIRS,
            "falls": falls,
            "rises": rises,
            "lowest": int(curve.argmin()),
            "tightest": float(tightest.max()),
            "above": above,
        },
        highlight=SHOWN,
        picture="\n".join(f"f({m:<3}) = {float(curve[m]):9.6f}" for m in DIGITS if m < len(curve)),
    )


def draw_decay(axes: Axes, report: Report) -> None:
    """Draws f(m) against distance, also with equal frequencies, and marks where it rises."""
    forms = {"f, equal theta": "-- grey", "f(m)": "- blue"}
    curves("m (tokens)", forms, "upper trend of rotary products", ylim=(0, None))(axes, report)
    curve = report.column("f(m)")
    rises = [m for m in range(1, len(curve)) if curve[m] > curve[m - 1]]
    axes.plot(rises, [curve[m] for m in rises], ".", color=RED, markersize=3)


OF_PAIRS = {
    "|score| / bound, max": "- blue",
    "share above m = 0": "- orange",
    "q = k: score / score(0)": "- green",
}
draw = panels(draw_decay, curves("m (tokens)", OF_PAIRS, "random queries and keys", ylim=(0, 1)))
