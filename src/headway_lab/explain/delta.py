"""What the state of the gated delta rule reads out, forgets and overwrites. (Schlag et al. 2021, section 4.)"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from headway.attention import attend
from headway.attention.delta import delta_attend
from headway_lab.explain.figures import Axes, bare, curves, label_axes, panels
from headway_lab.explain.report import Report, Rows
from headway_lab.profiling import normal

WIDTH, TOKENS, HEADS, SEEDS = 16, 40, 2, (0, 1, 2)
PAIRS = (4, 8, 16, 32, 64)
DECAY, SHARP, EQUAL = 0.9, 40.0, 1e-10
Read = Callable[[Tensor, Tensor, Tensor], Tensor]


def run(*, seeds: Sequence[int] = SEEDS) -> Report:
    """Compares the rule with its formulas; then writes pairs of keys and values, reads them, and overwrites them: means
    over seeds."""
    exact = [against_formulas(seed) for seed in seeds]
    rows = []
    for name, pairs in product(KINDS, PAIRS):
        once, anew = map(fmean, zip(*(recall(KINDS[name], pairs, seed) for seed in seeds), strict=True))
        size = 2 * pairs * WIDTH if name == "softmax" else WIDTH * WIDTH
        rows.append({"kind": name, "pairs": pairs, "wrong": once, "wrong, anew": anew, "numbers kept": size})
    return judge({name: max(errors[name] for errors in exact) for name in exact[0]}, rows)


def inputs(seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns random q, k of length 1, v, log decays and beta of a row of TOKENS."""
    q, k, v = (normal(1, HEADS, TOKENS, WIDTH, seed=seed + 10 * i) for i in range(3))
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    decay, beta = (normal(1, HEADS, TOKENS, seed=seed + 10 * i).sigmoid() for i in (4, 5))
    return q, k, v, decay.log(), beta


def weights(q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Returns the weight of each value in each output [1, H, T, T]: the rule's output if the values are the rows of the
    identity matrix."""
    identity = torch.eye(q.shape[2], dtype=q.dtype).expand(1, q.shape[1], -1, -1)
    return delta_attend(q, k, identity, log_decay, beta, scale=1.0).out


def products(q: Tensor, k: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """Returns w_ts = beta_s q_t^T A_t .. A_(s+1) k_s with A = a (I - beta k k^T), product by product."""
    w, identity = torch.zeros(1, HEADS, TOKENS, TOKENS, dtype=q.dtype), torch.eye(WIDTH, dtype=q.dtype)
    for h, t in product(range(HEADS), range(TOKENS)):
        row = q[0, h, t]
        for s in range(t, -1, -1):
            key, b = k[0, h, s], beta[0, h, s]
            w[0, h, t, s] = b * row @ key
            row = row @ (identity - b * key[:, None] * key) * log_decay[0, h, s].exp()
    return w


def against_formulas(seed: int) -> dict[str, float]:
    """Returns the largest differences: of the other forms from the recurrent one, of outputs from weights times values,
    of weights from products, and, for orthogonal keys, of a token's remaining weight after n steps from a^n; and minus
    the share of negative weights."""
    q, k, v, log_decay, beta = inputs(seed)
    rule = partial(delta_attend, q, k, v, log_decay, beta, scale=1.0)
    out, w = rule(form="recurrent").out, weights(q, k, log_decay, beta)
    frame = frames(WIDTH, seed)[None, None]
    steady = torch.full((1, 1, WIDTH), DECAY, dtype=q.dtype).log()
    remaining = weights(frame[:, :, :1].expand_as(frame), frame, steady, torch.ones_like(steady))[0, 0, :, 0]
    return {
        "forms": max(float((rule(form=form).out - out).abs().max()) for form in ("chunked", "parallel")),
        "rows": float((w @ v - out).abs().max()),
        "products": float((w - products(q, k, log_decay, beta)).abs().max()),
        "decay": float((remaining - DECAY ** torch.arange(WIDTH, dtype=q.dtype)).abs().max()),
        "negative": -float((w < 0).double().sum() / (w != 0).sum()),
    }


def frames(count: int, seed: int) -> Tensor:
    """Returns keys [count, D] of length 1: each group of D consecutive ones is orthogonal."""
    groups = [torch.linalg.qr(normal(WIDTH, WIDTH, seed=seed + 100 + i)).Q for i in range(-(-count // WIDTH))]
    return torch.cat(groups)[:count]


def recall(read: Read, pairs: int, seed: int) -> list[float]:
    """Returns |read - v|^2 / |v|^2 for `pairs` keys after all were written; and for new values, after all keys were
    written again."""
    k = frames(pairs, seed)
    old, new = normal(2, pairs, WIDTH, seed=seed + 20)
    cases = ((k, old, old), (torch.cat((k, k)), torch.cat((old, new)), new))
    return [float((read(k, keys, v) - ref).square().sum() / ref.square().sum()) for keys, v, ref in cases]


def by_delta(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Returns what queries read from the rule's state after all pairs, with beta = 1 and no decay."""
    steady = torch.zeros(1, 1, len(k), dtype=k.dtype)
    k, v = k[None, None], v[None, None]
    return q @ delta_attend(k, k, v, steady, steady + 1, scale=1.0).state[0, 0]


KINDS: Mapping[str, Read] = {
    "sums": lambda q, k, v: q @ (k.mT @ v),
    "delta": by_delta,
    "softmax": lambda *qkv: attend(*(x[None, None] for x in qkv), scale=SHARP, backend="dense")[0, 0],
}


def judge(exact: Mapping[str, float], rows: Rows) -> Report:
    """Returns the verdict: formulas hold; the rule overwrites, while sums add and softmax averages; a state holds D
    keys."""
    row_at = {(row["kind"], row["pairs"]): row for row in rows}
    most = max(row["pairs"] for row in rows)
    rewritten_errors = {
        k: [r["wrong, anew"] for r in rows if r["kind"] == k and r["pairs"] <= WIDTH] for k in KINDS
    }
    return Report(
        rows=tuple(rows),
        claims={
            "forms": exact["forms"] < EQUAL,
            "rows": max(exact["rows"], exact["products"]) < EQUAL,
            "signs": exact["negative"] < -0.1,
            "decay": exact["decay"] < EQUAL,
            "overwritten": max(rewritten_errors["delta"]) < EQUAL,
            "added": min(rewritten_errors["sums"]) > 0.5 and min(rewritten_errors["softmax"]) > 0.3,
            "full": row_at["delta", most]["wrong"] > 0.5 and row_at["softmax", most]["wrong"] < 0.05,
        },
        values={
            "exact": max(exact.values()),
            "negative": -exact["negative"],
            "anew": {kind: max(errors) for kind, errors in rewritten_errors.items()},
            "most": most,
            "wrong": {kind: row_at[kind, most]["wrong"] for kind in KINDS},
        },
    )


def draw_weights(axes: Axes, report: Report) -> None:
    """Draws the weights of one head, with slower decay than in the measurement."""
    q, k, _, log_decay, beta = inputs(SEEDS[0])
    w = weights(q, k, log_decay / 8, beta)[0, 0]
    size = float(w.abs().max())
    axes.imshow(w.numpy(), cmap="RdBu", vmin=-size, vmax=size, interpolation="nearest")
    label_axes(axes, "weights (red: below 0)", "token read", "query")
    bare(axes)


FORMS = {"sums": "o- red", "delta": "o- blue", "softmax": "o- green"}
TEXT = "|read - v|² / |v|²"
AXES: dict[str, Any] = {"by": "kind", "log": "x"}
draw = panels(
    draw_weights,
    curves("pairs", FORMS, f"written once, {WIDTH} x {WIDTH} numbers", TEXT, of="wrong", **AXES),
    curves("pairs", FORMS, "each key written anew", of="wrong, anew", legend=None, **AXES),
)
