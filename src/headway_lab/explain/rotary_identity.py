"""Why rotation by absolute positions gives scores of relative ones. (Su et al. 2021, sections 3.1 to 3.3.)"""

from functools import partial

import torch
from torch import Tensor

from headway.nn import RotaryEmbedding
from headway.positions import Rotary, SpecialOrthogonal
from headway.tokens import Tokens
from headway_lab.explain.figures import Axes, label_axes, panels
from headway_lab.explain.report import Report, Rows
from headway_lab.explain.rotary_forms import complex_form, matrix_form, rotation_matrix
from headway_lab.profiling import normal

HEAD_DIM, FARTHEST, CASES, SEED = 64, 4096, 1000, 0
ALLOWED = 4 * FARTHEST * 2.0**-53  # an angle m theta_i is rounded by up to m 2^-53; at most three enter
ROTARY = Rotary(pairing="adjacent")
DRAWN = 48
matrix = partial(rotation_matrix, dims=HEAD_DIM)


def run() -> Report:
    """Measures every step of the derivation on `Rotary` and on the published forms, in float64."""
    noise = torch.Generator().manual_seed(SEED)
    q, k = torch.randn(2, CASES, HEAD_DIM, generator=noise, dtype=torch.float64)
    m, n = torch.randint(0, FARTHEST, (2, CASES), generator=noise)
    size = q.norm(dim=-1) * k.norm(dim=-1)
    score = (turn(q, m) * turn(k, n)).sum(-1)
    flat = q[:50, :2]  # one pair: the two-dimensional case, theta = 1
    positions = [(int(a), int(b)) for a, b in zip(m[:50], n[:50], strict=True)]
    eye = torch.eye(HEAD_DIM, dtype=torch.float64)
    theta = ROTARY.frequencies(HEAD_DIM)
    one_based = 10000.0 ** (-2 * (torch.arange(1, HEAD_DIM // 2 + 1, dtype=torch.float64) - 1) / HEAD_DIM)
    laws: list[tuple[str, int, Tensor]] = [
        ("f(q, 0) = q", CASES, turn(q, torch.zeros_like(m)) - q),
        ("d = 2: q e^(i m theta) = R_m q", 50, complex_form(flat, m[:50]) - matrix_form(flat, m[:50])),
        ("f(q, m) = R_m q", 50, turn(q, m)[:50] - matrix_form(q[:50], m[:50])),
        ("|f(q, m)| = |q|", CASES, turn(q, m).norm(dim=-1) / q.norm(dim=-1) - 1),
        ("phi(m) - phi(m-1) = theta_i", FARTHEST * HEAD_DIM // 2, wrapped(steps() - theta)),
        ("<f(q, m), f(k, n)> = <q, R_(n-m) k>", CASES, (score - (q * turn(k, n - m)).sum(-1)) / size),
        ("positions from 1: same scores", CASES, (score - (turn(q, m + 1) * turn(k, n + 1)).sum(-1)) / size),
        ("R_m^T R_m = I", 50, torch.stack([matrix(a).T @ matrix(a) - eye for a, _ in positions])),
        (
            "R_m^T R_n = R_(n-m)",
            50,
            torch.stack([matrix(a).T @ matrix(b) - matrix(b - a) for a, b in positions]),
        ),
        (
            "any R_1 of SO(d): <R_1^m q, R_1^n k> = <q, R_1^(n-m) k>",
            100,
            any_rotation(q[:100], k[:100], m, n),
        ),
        ("theta_i, i from 0 or from 1", HEAD_DIM // 2, one_based - theta),
    ]
    rows = [
        {"law": law, "cases": cases, "largest difference": float(off.abs().max()), "allowed": ALLOWED}
        for law, cases, off in laws
    ]
    return judge(rows, nearest(q[0]))


def judge(laws: Rows, apart: float) -> Report:
    """Returns the verdict: every law holds to rounding, and no two positions give a query the same vector."""
    rows = tuple({**law, "holds": law["largest difference"] <= ALLOWED} for law in laws)
    return Report(
        rows=rows,
        claims={**{("law", row["law"]): row["holds"] for row in rows}, "apart": apart > 1e-3},
        values={"held": sum(row["holds"] for row in rows), "farthest": FARTHEST - 1, "apart": apart},
    )


def turn(x: Tensor, position: Tensor) -> Tensor:
    """Returns x [N, D] rotated by `Rotary`, each row to its own position [N]."""
    return ROTARY.rotate(x[None, None], position)[0, 0]


def any_rotation(q: Tensor, k: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """Returns <R_1^m q, R_1^n k> - <q, R_1^(n-m) k> over |q| |k|, for an R_1 = e^A that mixes all coordinates, at
    positions below 512 (powers of a matrix are rounded more often than angles)."""
    rotary = RotaryEmbedding(SpecialOrthogonal(ROTARY), HEAD_DIM).double()
    assert rotary.frequency_offset is not None
    m, n = m[: len(q)] % 512, n[: len(q)] % 512
    with torch.no_grad():
        rotary.frequency_offset.normal_(0, 0.1, generator=torch.Generator().manual_seed(SEED))

        def turned(x: Tensor, position: Tensor) -> Tensor:
            table = rotary(Tokens.range(len(x)).with_position(position[None]), x.dtype)
            assert table is not None
            y: Tensor = table.apply(x[None, None])[0, 0]
            return y

        scores = (turned(q, m) * turned(k, n)).sum(-1)
        error: Tensor = (scores - (q * turned(k, n - m)).sum(-1)) / (q.norm(dim=-1) * k.norm(dim=-1))
        return error


def steps() -> Tensor:
    """Returns phi(m) - phi(m-1) of each pair, [FARTHEST, D/2], measured on the rotated vector (1, 0, 1, 0, ...)."""
    unit = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(HEAD_DIM // 2).expand(FARTHEST + 1, -1)
    rotated = torch.view_as_complex(
        turn(unit, torch.arange(FARTHEST + 1)).unflatten(-1, (-1, 2)).contiguous()
    )
    return (rotated[1:] * rotated[:-1].conj()).angle()


def wrapped(angle: Tensor) -> Tensor:
    """Returns the same angle in [-pi, pi)."""
    return (angle + torch.pi).remainder(2 * torch.pi) - torch.pi


def nearest(q: Tensor) -> float:
    """Returns the smallest |f(q, m) - f(q, n)| / |q| over m != n, both below FARTHEST: that of f(q, m - n) and q."""
    rotated = turn(q.expand(FARTHEST, -1), torch.arange(FARTHEST))
    return float((rotated[1:] - q).norm(dim=-1).min() / q.norm())


def draw_angles(axes: Axes, report: Report) -> None:
    """Draws the angle by which each pair is rotated at m."""
    gained = steps()[:DRAWN].cumsum(0)
    for pair in (0, 2, 4, 8, 16):
        name = f"pair {pair}: θ = {ROTARY.frequencies(HEAD_DIM)[pair]:.3g}"
        axes.plot(range(1, DRAWN + 1), gained[:, pair], label=name)
    label_axes(axes, "angle of f(q, m) minus angle of q", "position m", "φ(m), radians, unwrapped", {})


def draw_scores(axes: Axes, report: Report) -> None:
    """Draws all scores of one q and one k, which are equal along diagonals."""
    q, k = (turn(x.expand(DRAWN, -1), torch.arange(DRAWN)) for x in normal(2, HEAD_DIM, seed=SEED))
    axes.imshow((q @ k.T).numpy(), cmap="RdBu")
    label_axes(axes, "one q, one k: the score at (m, n)", "position n of the key", "position m of the query")
    axes.grid(visible=False)


draw = panels(draw_angles, draw_scores, width_ratios=(1.2, 1))
