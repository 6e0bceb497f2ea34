"""Why scores are divided by the square root of the head's width. (Vaswani et al. 2017, section 3.2.1.)"""

from collections.abc import Iterator, Sequence
from statistics import fmean

from torch import Tensor

from headway.attention import attention_weights
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows, ranged
from headway_lab.profiling import normal

WIDTHS = (4, 8, 16, 32, 64, 128, 256, 512)
SEEDS = (0, 1, 2)
QUERIES, KEYS = 256, 64


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields Var(q . k) and the median norm of the softmax's Jacobian, with and without the scale, for d = 4..512."""
    for width in WIDTHS:
        results = [measure(width, seed) for seed in seeds]
        yield {
            "d": width,
            **{name: fmean(result[name] for result in results) for name in results[0]},
            **ranged("Var(q.k)", [result["Var(q.k)"] for result in results], fmean),
            "least |J| with scale": min(result["|J| with scale"] for result in results),
            "most |J| without": max(result["|J| without scale"] for result in results),
        }


def measure(width: int, seed: int) -> dict[str, float]:
    """Returns the columns of one width, for one seed."""
    q, k = normal(1, 1, QUERIES + KEYS, width, seed=seed).split((QUERIES, KEYS), 2)
    sharp = attention_weights(q, k, scale=1.0)
    return {
        "Var(q.k)": float((q @ k.mT).var()),
        "|J| without scale": float(jacobian_norm(sharp).median()),
        "|J| with scale": float(jacobian_norm(attention_weights(q, k)).median()),
        "largest weight without scale": float(sharp.amax(-1).mean()),
    }


def judge(rows: Rows) -> Report:
    """Returns the verdict: the variance follows d, the unscaled Jacobian collapses, the scaled one does not."""
    mean_error = max(abs(row["Var(q.k)"] / row["d"] - 1) for row in rows)
    largest_error = max(
        abs(row[name] / row["d"] - 1) for row in rows for name in ("Var(q.k), least", "Var(q.k), most")
    )
    collapse = rows[0]["|J| without scale"] / rows[-1]["most |J| without"]
    keep = max(row["|J| with scale"] for row in rows) / min(row["least |J| with scale"] for row in rows)
    return Report(
        rows=tuple(rows),
        claims={
            "variance": mean_error < 0.1 and largest_error < 0.2,
            "collapse": collapse > 10,
            "keep": keep < 1.5,
        },
        values={"off": mean_error, "most": largest_error, "collapse": collapse, "keep": keep},
    )


def jacobian_norm(p: Tensor) -> Tensor:
    """Returns the Frobenius norm of diag(p) - p p^T for each row of weights p [.., S]: sum p^2 - 2 sum p^3 + (sum
    p^2)^2."""
    square, cube = p.square().sum(-1), p.pow(3).sum(-1)
    return (square - 2 * cube + square.square()).clamp_min(0).sqrt()


GRADIENT = {"|J| without scale": "o- red", "|J| with scale": "o- green"}
draw = panels(
    curves("d", {"d": "-- grey", "Var(q.k)": "o blue"}, "variance of q · k", log="xy"),
    curves("d", GRADIENT, "gradient through the softmax", "median |dp/ds|", log="xy"),
)
