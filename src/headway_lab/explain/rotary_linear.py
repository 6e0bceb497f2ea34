"""Linear attention with rotary positions: the effect of a rotated denominator. (Su et al. 2021, section 3.3.)"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway_lab.draw import BLUE, RED
from headway_lab.explain.figures import Axes, bars, label_axes, panels
from headway_lab.explain.report import Report, Rows
from headway_lab.explain.rotary_identity import turn
from headway_lab.profiling import normal

HEAD_DIM, PAIRS, FARTHEST, SEEDS = 64, 300, 2048, (0, 1, 2)
CONTEXTS, KEYS, WILD = 20_000, 2, 100
FORMS = ("not turned", "turned above and below", "turned above only", "1 + cosine, turned")


def run(*, seeds: Sequence[int] = SEEDS) -> Report:
    """Counts the negative products; then measures, for each form, the weights of short contexts and the size of
    outputs."""
    negative = {seed: int((products(*pairs(seed)) < 0).sum()) for seed in seeds}
    return judge(
        negative, [{"form": name, "seed": seed, **measure(name, seed)} for name in FORMS for seed in seeds]
    )


def pairs(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns PAIRS queries and keys from N(0, 1) [PAIRS, D], and the distance of each pair: 1..FARTHEST."""
    noise = random.Random(seed)

    def vector() -> list[float]:
        return [noise.gauss(0, 1) for _ in range(HEAD_DIM)]

    q, k, distances = zip(
        *((vector(), vector(), noise.randint(1, FARTHEST)) for _ in range(PAIRS)), strict=True
    )
    return torch.tensor(q, dtype=torch.float64), torch.tensor(k, dtype=torch.float64), torch.tensor(distances)


def products(q: Tensor, k: Tensor, apart: Tensor) -> Tensor:
    """Returns (R_m phi(q)) . (R_n phi(k)) with m - n = apart, [N]."""
    return (turn(phi(q), apart) * phi(k)).sum(-1)


def phi(x: Tensor) -> Tensor:
    """Returns elu(x) + 1, which is greater than 0."""
    return F.elu(x) + 1


def measure(form: str, seed: int) -> dict[str, float]:
    """Returns, over many contexts of a query and KEYS keys at random distances, the share of negative weights, the
    smallest |denominator| relative to the unrotated one, the largest |sum of weights - 1|, and the largest |out| / max
    |v|."""
    noise = torch.Generator().manual_seed(seed)
    q, *keys = torch.randn(1 + KEYS, CONTEXTS, HEAD_DIM, generator=noise, dtype=torch.float64)
    weights, size = weigh(
        form, q, keys, list(torch.randint(1, FARTHEST + 1, (KEYS, CONTEXTS), generator=noise))
    )
    v = normal(CONTEXTS, KEYS, seed=seed + 1)
    return {
        "negative weights": float((weights * size.sign()[:, None] < 0).double().mean()),
        "least denominator": float(size.abs().min()),
        "off from sum 1": float((weights.sum(-1) - 1).abs().max()),
        "largest |out| / |v|": float(((weights * v).sum(1).abs() / v.abs().amax(1)).max()),
    }


def weigh(form: str, q: Tensor, keys: list[Tensor], apart: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns the weights [N, KEYS] of the values, and the denominators relative to those without rotation [N], for
    queries and keys [N, D] at distances `apart`."""
    assert form in FORMS
    plain = torch.stack([(phi(q) * phi(k)).sum(-1) for k in keys], -1)
    rotated = torch.stack([products(q, k, a) for k, a in zip(keys, apart, strict=True)], -1)
    if form == FORMS[3]:
        q, *keys = (F.normalize(x, dim=-1) for x in (q, *keys))
        plain = torch.stack([1 + (q * k).sum(-1) for k in keys], -1)
        rotated = torch.stack([1 + (turn(q, a) * k).sum(-1) for k, a in zip(keys, apart, strict=True)], -1)
    above = plain if form == FORMS[0] else rotated
    below = plain if form in (FORMS[0], FORMS[2]) else rotated
    return above / below.sum(-1, keepdim=True), below.sum(-1) / plain.sum(-1)


def judge(negative: Mapping[int, int], rows: Rows) -> Report:
    """Returns the verdict: negative products exist, the rotated denominator comes near 0, and the two remedies stay
    bounded."""
    least, most = ({name: reach(rows, name, pick) for name in FORMS} for pick in (min, max))
    _, both, above, cosine = FORMS
    size, share, off, floor = "largest |out| / |v|", "negative weights", "off from sum 1", "least denominator"
    return Report(
        rows=tuple(rows),
        claims={
            "negative": min(negative.values()) > 0,
            "wild": least[both][size] > WILD,
            "bounded": most[above][size] <= KEYS,
            "signed": least[above][share] > 0 and least[above][off] > 0.1,
            "cosine": most[cosine][share] == 0 and most[cosine][off] < 1e-12,
        },
        values={
            "negative": list(negative.values()),
            "floor": least[both][floor],
            "wild": most[both][size],
            "share": most[above][share],
            "bounded": most[above][size],
            "off": most[cosine][off],
        },
    )


def reach(rows: Rows, form: str, pick: Callable[[Iterable[float]], float]) -> dict[str, float]:
    """Returns each number of a form, chosen among its seeds by `pick`."""
    group = [row for row in rows if row["form"] == form]
    return {name: pick(row[name] for row in group) for name in group[0] if name not in ("form", "seed")}


def draw_products(axes: Axes, report: Report) -> None:
    """Draws the products of random pairs against distance."""
    q, k, distances = pairs(report.rows[0]["seed"])
    share = products(q, k, distances) / (phi(q) * phi(k)).sum(-1)
    for name, colour, mask in (("positive", BLUE, share >= 0), ("negative", RED, share < 0)):
        axes.scatter(distances[mask], share[mask], s=9, color=colour, label=f"{name} ({int(mask.sum())})")
    label_axes(axes, f"{PAIRS} products of turned features", "distance (tokens)", "turned / not turned", {})


draw = panels(
    draw_products,
    bars(("form",), "largest |out| / |v|", f"output over largest value, {KEYS} keys", xscale="log"),
)
