"""Mixtures of experts: which are chosen, what a token is computed with, what a batch reads. (Shazeer et al. 2017,
section 2.1; Jiang et al. 2024, "Mixtral of Experts", section 2.1.)"""

from collections.abc import Iterator, Sequence
from statistics import fmean

import torch
from torch import Tensor

from headway.models import ModelSpec, cost
from headway.nn import Experts, MixtureOfExperts
from headway_lab.explain.figures import bars, curves, panels
from headway_lab.explain.report import Report, Row, Rows
from headway_lab.profiling import doublings, normal

WIDTH, ROWS, SEEDS = 64, 512, (0, 1, 2)
EXPERTS = Experts(count=16, top=2, hidden=32)
BATCHES, DRAWS = doublings(1, 64), 200
EQUAL, CLOSE = 1e-12, 0.1
SPEC = ModelSpec.of(
    "qwen3_moe", vocab=256, width=WIDTH, layers=2, heads=4, hidden=32, experts=EXPERTS, head_dim=16, tied=True
)


def run(*, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """Yields the share of rows of each expert; then, for each batch size, the experts and bytes read, with the layer's
    distance from a loop over tokens in the first of these rows."""
    layers = [layer_of(seed) for seed in seeds]
    results = [measure(layer, seed) for layer, seed in zip(layers, seeds, strict=True)]
    for e in range(EXPERTS.count):
        shares = [float(result[0][e]) for result in results]
        yield {"expert": e, "share": fmean(shares), "share, least": min(shares), "share, most": max(shares)}
    names = ("from the loop", "weights off 1", "idle gradient", "busy gradient")
    worst = {name: (min if "busy" in name else max)(result[1][name] for result in results) for name in names}
    for batch in BATCHES:
        read = fmean(chosen_by(layer, batch, seed) for layer, seed in zip(layers, seeds, strict=True))
        yield {
            "batch": batch,
            "experts read": read,
            "expected": EXPERTS.count * (1 - (1 - EXPERTS.top / EXPERTS.count) ** batch),
            "bytes read": cost.weight_bytes_read(SPEC, torch.bfloat16, batch),
            **(worst if batch == 1 else {}),
        }


def layer_of(seed: int) -> MixtureOfExperts:
    """Returns a layer with random weights in float64."""
    layer = MixtureOfExperts(EXPERTS, WIDTH, gated=True).double()
    with torch.no_grad():
        for i, parameter in enumerate(layer.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed + 100 * i) * WIDTH**-0.5)
    return layer


def measure(layer: MixtureOfExperts, seed: int) -> tuple[Tensor, dict[str, float]]:
    """Returns the share of rows [E] of each expert, for random rows; the layer's distance from `loop`; and the
    gradients of experts that one row was routed to, and of the others."""
    x = normal(ROWS, WIDTH, seed=seed)
    chosen, weights = layer.gate(x)
    share = chosen.flatten().bincount(minlength=EXPERTS.count) / chosen.numel()
    layer.zero_grad()
    layer(x[:1]).square().sum().backward()
    sizes = [
        max(float(p.grad.abs().max()) for p in e.parameters() if p.grad is not None) for e in layer.experts
    ]
    busy = set(chosen[0].tolist())
    return share, {
        "from the loop": float((layer(x) - loop(layer, x)).detach().abs().max()),
        "weights off 1": float((weights.sum(-1) - 1).detach().abs().max()),
        "idle gradient": max(size for e, size in enumerate(sizes) if e not in busy),
        "busy gradient": min(size for e, size in enumerate(sizes) if e in busy),
    }


@torch.no_grad()
def loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """Computes the layer row by row, each expert of a row on its own."""
    scores = (x @ layer.gate.weight.T).softmax(-1)
    rows = []
    for row, row_scores in zip(x, scores, strict=True):
        best = row_scores.topk(EXPERTS.top)
        mixed = zip(best.values / best.values.sum(), best.indices, strict=True)
        rows.append(sum(w * layer.experts[int(e)](row) for w, e in mixed))
    return torch.stack([torch.as_tensor(row) for row in rows])


@torch.no_grad()
def chosen_by(layer: MixtureOfExperts, batch: int, seed: int) -> float:
    """Returns the number of experts that a batch of random rows is routed to, the mean of DRAWS batches."""
    chosen = layer.gate(normal(DRAWS * batch, WIDTH, seed=seed + 7))[0].view(DRAWS, -1)
    return fmean(len(set(experts)) for experts in chosen.tolist())


def judge(rows: Rows) -> Report:
    """Returns the verdict: the layer equals the loop; a token is computed with K experts, a batch reads more of
    them."""
    shares, batches = ([row for row in rows if name in row] for name in ("expert", "batch"))
    single, largest = batches[0], batches[-1]
    active, all_parameters = cost.active_parameters(SPEC), cost.parameter_count(SPEC)
    idle = SPEC.layers * (EXPERTS.count - EXPERTS.top) * 3 * WIDTH * EXPERTS.hidden
    return Report(
        rows=tuple(rows),
        claims={
            "loop": max(single["from the loop"], single["weights off 1"]) < EQUAL,
            "gradients": single["idle gradient"] == 0 < single["busy gradient"],
            "active": all_parameters - active == idle,
            "one": single["experts read"] == EXPERTS.top,
            "batch": all(abs(row["experts read"] / row["expected"] - 1) < CLOSE for row in batches),
            "uneven": max(row["share, most"] for row in shares) > 1.2 / EXPERTS.count,
        },
        values={
            "active": active,
            "whole": all_parameters,
            "busiest": max(row["share, most"] for row in shares) * EXPERTS.count,
            "laziest": min(row["share, least"] for row in shares) * EXPERTS.count,
            "many": largest,
            "more": largest["bytes read"] / single["bytes read"],
        },
    )


draw = panels(
    bars(("expert",), "share", "share of rows (line: seeds)", line=1 / EXPERTS.count),
    curves(
        "batch",
        {"expected": "-- grey", "experts read": "o blue"},
        f"experts that a batch reads, of {EXPERTS.count}",
        "experts",
        log="x",
    ),
    curves("batch", {"bytes read": "o- orange"}, "bytes of weights read", legend=None, log="x"),
)
