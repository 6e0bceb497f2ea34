"""The published forms of rotary embedding, side by side. (Su et al. 2021, equations 15 and 34.)"""

import time
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.positions import Pairing, Rotary, to_pairing
from headway.positions.schemes import exact_positions, powers
from headway_lab.explain.figures import bars, panels
from headway_lab.explain.report import Report, Row, Rows, ranged
from headway_lab.explain.spread import Gap, log_gap
from headway_lab.profiling import in_turn, normal, one_thread

HEAD_DIM, TOKENS, HEADS, REPEATS, SEED = 128, 256, 4, 7, 0
READY, ELEMENTWISE = "R_m, built before", "swapped neighbours"
ALLOWED = 1e-12

Form = Callable[[Tensor, Tensor], Tensor]


# The published forms: x [..., T, d] and positions [T], theta_i = theta^(-2i/d), i = 0 .. d/2 - 1. They are for reading
# and for tests; the library uses `Rotary`.


def angles(position: Tensor, dims: int, theta: float = 10000.0) -> Tensor:
    """Returns p * theta_i, [T, d/2], float64.

    Counting i from 1 with theta_i = theta^(-2(i-1)/d) (Su et al., eq. 15) gives the same table, and counting
    positions from 1 shifts queries and keys alike, which no score can see. Raises ConfigError for odd dims.
    """
    if dims < 2 or dims % 2:
        raise ConfigError(
            f"rotary dims must be even (coordinates are rotated in pairs) and at least 2, got {dims}"
        )
    return exact_positions(position)[:, None] * powers(theta, dims, position.device)


def complex_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """Returns f(q, m) = q e^(i m theta): adjacent components are the real and the imaginary part (`freqs_cis` of Meta's
    LLaMA)."""
    angle = angles(position, x.shape[-1], theta)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)).flatten(-2).to(x.dtype)


def rotation_matrix(position: int, dims: int, theta: float = 10000.0) -> Tensor:
    """Returns R_m [d, d]: 2 x 2 blocks ((cos, -sin), (sin, cos)) of m theta_i on the diagonal, float64. R_m^T R_n =
    R_(n-m)."""
    angle = angles(torch.tensor([position]), dims, theta)[0]
    cos, sin = angle.cos(), angle.sin()
    rotation: Tensor = torch.block_diag(*torch.stack((cos, -sin, sin, cos), -1).unflatten(-1, (2, 2)))
    return rotation


def matrix_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """Returns R_m x by the whole block-diagonal matrix: d^2 products where 2d would do."""
    rotations = torch.stack([rotation_matrix(int(p), x.shape[-1], theta) for p in position]).to(x.dtype)
    return torch.einsum("tij,...tj->...ti", rotations, x)


def swapped_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """Returns (q0, q1, q2, ..) * (cos0, cos0, cos1, ..) + (-q1, q0, -q3, ..) * (sin0, sin0, sin1, ..)."""
    angle = angles(position, x.shape[-1], theta).repeat_interleave(2, -1)
    even, odd = x[..., 0::2], x[..., 1::2]
    swapped = torch.stack((-odd, even), -1).flatten(-2)
    return x * angle.cos().to(x.dtype) + swapped * angle.sin().to(x.dtype)


def half_split_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """Returns [Y1 Y2] * cos [C C] + [-Y2 Y1] * sin [C C], with C [T, d/2] the angles.

    It is printed with C alone, whose d/2 columns do not fit the d columns of Y; C is meant twice.
    """
    half = angles(position, x.shape[-1], theta)
    twice = torch.cat((half, half), -1)
    return x * twice.cos().to(x.dtype) + rotate_half(x) * twice.sin().to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Returns (x1, x2) -> (-x2, x1) for the two halves of the last axis."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rotate_half_form(x: Tensor, position: Tensor, theta: float = 10000.0) -> Tensor:
    """Returns x * cos + rotate_half(x) * sin with tables built once and indexed by position (LLaMA in
    `transformers`)."""
    low, high = int(position.min()), int(position.max())
    table = angles(torch.arange(low, high + 1), x.shape[-1], theta)
    table = torch.cat((table, table), -1)
    cos, sin = table.cos()[position - low].to(x.dtype), table.sin()[position - low].to(x.dtype)
    return x * cos + rotate_half(x) * sin


@cache
def matrices(count: int, dtype: torch.dtype) -> Tensor:
    """Returns R_0 .. R_(count-1) [count, d, d]."""
    return torch.stack([rotation_matrix(m, HEAD_DIM) for m in range(count)]).to(dtype)


def ready_matrix_form(x: Tensor, position: Tensor) -> Tensor:
    """Returns the product with precomputed matrices, of the positions 0, 1, .."""
    return torch.einsum("tij,...tj->...ti", matrices(len(position), x.dtype), x)


# Reorders the coordinates of the last axis from one pairing to another.
reorder = partial(to_pairing, heads=1, head_dim=HEAD_DIM, dim=-1)

FORMS: tuple[tuple[str, Form, Pairing, int], ...] = (
    ("matrix R_m", matrix_form, "adjacent", HEAD_DIM**2),
    (READY, ready_matrix_form, "adjacent", HEAD_DIM**2),
    ("complex numbers", complex_form, "adjacent", 2 * HEAD_DIM),
    (ELEMENTWISE, swapped_form, "adjacent", 2 * HEAD_DIM),
    ("halves, C twice", half_split_form, "halves", 2 * HEAD_DIM),
    ("rotate_half", rotate_half_form, "halves", 2 * HEAD_DIM),
    ("Rotary, adjacent", Rotary(pairing="adjacent").rotate, "adjacent", 2 * HEAD_DIM),
    ("Rotary, halves", Rotary(pairing="halves").rotate, "halves", 2 * HEAD_DIM),
)


def run() -> Report:
    """Compares every form on the same vectors in float64, reordered to one pairing; and times each in float32."""
    x, position = normal(1, HEADS, TOKENS, HEAD_DIM, seed=SEED), torch.arange(TOKENS)
    expected = matrix_form(x, position)
    calls = {name: partial(form, x.float(), position) for name, form, *_ in FORMS}
    with one_thread():
        in_turn(calls, 1)  # builds tables and matrices
        times = {
            name: [seconds / TOKENS / HEADS * 1e9 for seconds in seconds_per_round]
            for name, seconds_per_round in in_turn(calls, REPEATS, time.process_time).items()
        }
    rows = []
    for name, form, pairing, products in FORMS:
        rotated = reorder(form(reorder(x, frm="adjacent", to=pairing), position), frm=pairing, to="adjacent")
        error = float((rotated - expected).abs().max() / expected.abs().max())
        rows.append(
            {
                "form": name,
                "pairing": str(pairing),
                "products / vector": products,
                "difference from R_m": error,
                **ranged("ns / vector", times[name]),
            }
        )
    return judge(rows, log_gap(times[READY], times[ELEMENTWISE]))


def judge(rows: Rows, slower: Gap) -> Report:
    """Returns the verdict: all forms are one, and matrices are wasteful, in products and in time. `slower` is the gap
    of the log time of precomputed matrices to that of the elementwise form."""
    worst = max(row["difference from R_m"] for row in rows)
    products = [row["products / vector"] for row in rows]
    return Report(
        rows=tuple(rows),
        claims={
            "one": worst <= ALLOWED,
            "products": products[0] == HEAD_DIM / 2 * products[2],
            "time": slower.higher,
        },
        values={"worst": worst, "products": products[0] // products[2], "slower": slower},
    )


def is_matrix(row: Row) -> bool:
    """Returns whether a form is a product with matrices."""
    return "R_m" in row["form"]


draw = panels(
    bars(("form",), "products / vector", "counted", pale=is_matrix, xscale="log"),
    bars(
        ("form",), "ns / vector", "measured", "ns / vector (line: all rounds)", pale=is_matrix, xscale="log"
    ),
    sharey=True,
)
