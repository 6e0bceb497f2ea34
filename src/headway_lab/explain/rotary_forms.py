"""The ways in which rotary embedding is printed, side by side. (Su et al. 2021, equations 15 and 34.)"""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from headway.draw import BLUE, GREY
from headway.errors import ConfigError
from headway.positions import Pairing, Rotary, to_pairing
from headway.positions.schemes import exact_positions, powers
from headway_lab.explain.report import Figure, Report, Rows, panels
from headway_lab.profiling import fastest, normal

HEAD_DIM, TOKENS, HEADS, REPEATS, SEED = 128, 256, 4, 5, 0
ALLOWED = 1e-12

FORMULA = """R_m q            d^2 products: all but two of each row's d numbers are 0
q e^(i m theta)  neighbours as real and imaginary part                                    (freqs_cis)
q * (c0, c0, c1, c1, ..) + (-q1, q0, -q3, q2, ..) * (s0, s0, s1, s1, ..)                  2d products
[Y1 Y2] * cos [C C] + [-Y2 Y1] * sin [C C]     printed with C alone, whose d/2 columns do not fit d: it stands twice
x * cos[p] + rotate_half(x) * sin[p]           tables built once, read by position
the first three turn (0, 1), (2, 3), ..; the last two (0, d/2), (1, d/2 + 1), ..: equal once reordered"""

Form = Callable[[Tensor, Tensor], Tensor]


# The printed forms: x [..., T, d] and positions [T], theta_i = theta^(-2i/d), i = 0 .. d/2 - 1. They are for reading
# and for tests; the engine uses `Rotary`.


def angles(position: Tensor, dims: int, theta: float = 10000.0) -> Tensor:
    """p * theta_i, [T, d/2], float64.

    Counting i from 1 with theta_i = theta^(-2(i-1)/d) (Su et al., eq. 15) is the same table, and counting
    positions from 1 shifts queries and keys alike, which no score can see. Raises ConfigError for odd dims.
    """
    if dims < 2 or dims % 2:
        raise ConfigError(
            f"rotary dims must be even (coordinates are rotated in pairs) and at least 2, got {dims}"
        )
    return exact_positions(position)[:, None] * powers(theta, dims, position.device)


def complex_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """f(q, m) = q e^(i m theta): neighbours are the real and the imaginary part (`freqs_cis` of Meta's LLaMA)."""
    angle = angles(position, x.shape[-1], theta)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)


def rotation_matrix(position: int, dims: int, theta: float = 10000.0) -> Tensor:
    """R_m [d, d]: 2 x 2 blocks ((cos, -sin), (sin, cos)) of m theta_i on the diagonal, float64. R_m^T R_n = R_(n-m)."""
    angle = angles(torch.tensor([position]), dims, theta)[0]
    cos, sin = angle.cos(), angle.sin()
    rotation: Tensor = torch.block_diag(*torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2)))
    return rotation


def matrix_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """R_m x by the whole block-diagonal matrix: d^2 products where 2d would do."""
    rotations = torch.stack([rotation_matrix(int(p), x.shape[-1], theta) for p in position]).to(x.dtype)
    return torch.einsum("tij,...tj->...ti", rotations, x)


def swapped_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """(q0, q1, q2, ..) * (cos0, cos0, cos1, ..) + (-q1, q0, -q3, ..) * (sin0, sin0, sin1, ..)."""
    angle = angles(position, x.shape[-1], theta).repeat_interleave(2, -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    swapped = torch.stack((-odd, even), -1).flatten(-2)
    return x * angle.cos().to(x.dtype) + swapped * angle.sin().to(x.dtype)


def half_split_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """[Y1 Y2] * cos [C C] + [-Y2 Y1] * sin [C C], C [T, d/2] the angles.

    Printed with C alone, whose d/2 columns do not fit the d columns of Y; C is meant twice.
    """
    half = angles(position, x.shape[-1], theta)
    twice = torch.cat((half, half), -1)
    return x * twice.cos().to(x.dtype) + rotate_half(x) * twice.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """(x1, x2) -> (-x2, x1) for the two halves of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_half_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """x * cos + rotate_half(x) * sin with tables built once and indexed by position (LLaMA in `transformers`)."""
    low, high = int(position.min()), int(position.max())
    table = angles(torch.arange(low, high + 1), x.shape[-1], theta)
    table = torch.cat((table, table), -1)
    cos, sin = table.cos()[position - low].to(x.dtype), table.sin()[position - low].to(x.dtype)
    return x * cos + rotate_half(x) * sin


@cache
def matrices(count: int, dtype: torch.dtype) -> Tensor:
    """R_0 .. R_(count-1) [count, d, d]."""
    return torch.stack([rotation_matrix(m, HEAD_DIM) for m in range(count)]).to(dtype)


def ready_matrix_form(x: Tensor, position: Tensor) -> Tensor:
    """The product with matrices that are there already, of the positions 0, 1, .."""
    return torch.einsum("tij,...tj->...ti", matrices(len(position), x.dtype), x)


# Coordinates of the last axis in the order of another pairing.
reorder = partial(to_pairing, heads=1, head_dim=HEAD_DIM, dim=-1)

FORMS: tuple[tuple[str, Form, Pairing, int], ...] = (
    ("matrix R_m", matrix_form, "adjacent", HEAD_DIM**2),
    ("R_m, built before", ready_matrix_form, "adjacent", HEAD_DIM**2),
    ("complex numbers", complex_form, "adjacent", 2 * HEAD_DIM),
    ("swapped neighbours", swapped_form, "adjacent", 2 * HEAD_DIM),
    ("halves, C twice", half_split_form, "halves", 2 * HEAD_DIM),
    ("rotate_half", rotate_half_form, "halves", 2 * HEAD_DIM),
    ("Rotary, adjacent", Rotary(pairing="adjacent").rotate, "adjacent", 2 * HEAD_DIM),
    ("Rotary, halves", Rotary(pairing="halves").rotate, "halves", 2 * HEAD_DIM),
)


def run() -> Report:
    """Every form on the same vectors in float64, reordered to one pairing; and the time of each in float32."""
    x, position = normal(1, HEADS, TOKENS, HEAD_DIM, seed=SEED), torch.arange(TOKENS)
    expected = matrix_form(x, position)
    rows = []
    for name, form, pairing, products in FORMS:
        turned = reorder(form(reorder(x, frm="adjacent", to=pairing), position), frm=pairing, to="adjacent")
        off = float((turned - expected).abs().max() / expected.abs().max())
        seconds = fastest(partial(form, x.float(), position), REPEATS)
        rows.append(
            {
                "form": name,
                "pairing": str(pairing),
                "products / vector": products,
                "difference from R_m": off,
                "ns / vector": seconds / TOKENS / HEADS * 1e9,
            }
        )
    return judge(rows)


def judge(rows: Rows) -> Report:
    """The verdict: all forms are one. Times are shown and not judged."""
    worst = max(row["difference from R_m"] for row in rows)
    products, times = ([row[f"{what} / vector"] for row in rows] for what in ("products", "ns"))
    return Report(
        rows=tuple(rows),
        seen=worst <= ALLOWED and products[0] > products[2],
        setting=f"d = {HEAD_DIM}, {HEADS} heads, {TOKENS} tokens, compared in float64, timed in float32, seed {SEED}",
        finding=(
            f"after the matching reordering all {len(rows)} agree to {worst:.0e}; the matrix takes "
            f"{products[0] // products[2]} times the products of the others, and here {times[1] / min(times):.0f} "
            f"times the time of the fastest even when it is there before ({times[0] / min(times):.0f} times when it is "
            "built)"
        ),
    )


def draw(figure: Figure, report: Report) -> None:
    """Left: multiplications for one vector. Right: measured time for one vector."""
    left, right = panels(figure, 10, 3.4, sharey=True)
    names = report.column("form")[::-1]
    for axes, column, title, unit in (
        (left, "products / vector", "counted", "multiplications for one vector"),
        (right, "ns / vector", "measured", "nanoseconds for one vector"),
    ):
        values = report.column(column)[::-1]
        bars = axes.barh(names, values, color=[GREY if "R_m" in name else BLUE for name in names])
        axes.bar_label(bars, [f"{value:,.0f}".replace(",", " ") for value in values], padding=4, fontsize=8)
        axes.set(title=title, xlabel=unit, xscale="log", xlim=(min(values) / 3, max(values) * 5))
        axes.grid(visible=False, axis="y")
