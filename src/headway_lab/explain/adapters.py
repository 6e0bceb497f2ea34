"""What a low-rank adapter trains, and that merging makes it part of the weights. (Hu et al. 2022.)"""

from collections.abc import Iterator
from typing import Any

import torch

from headway.models import ModelSpec, build, catalog, cost
from headway.nn import Adapter, Lora, attach, merge, unmerge
from headway_lab.explain.figures import curves, panels
from headway_lab.explain.report import Report, Row, Rows

RANKS = (1, 4, 16, 64)
LARGE = "llama-2-7b"
SMALL = {"vocab": 64, "width": 96, "heads": 4, "kv_heads": 2, "head_dim": 24, "hidden": 160}


@torch.no_grad()
def run() -> Iterator[Row]:
    """Yields, for each rank, counts on a published size, and function, difference and rank on two blocks with random B,
    in float64."""
    sizes: Any = SMALL
    spec, large = ModelSpec.of_depth(2, **sizes), catalog.spec(LARGE)
    ids = torch.arange(48).reshape(1, -1) % SMALL["vocab"]
    for rank in RANKS:
        model, lora = build(spec, dtype=torch.float64, seed=0), Lora(rank=rank, alpha=2.0 * rank)
        base_output = model(ids)
        attach(model, Adapter.fresh(model, lora))
        fresh = model(ids)
        noise = torch.Generator().manual_seed(rank)
        for name, p in model.named_parameters():
            if name.endswith("lora_B"):
                p.copy_(torch.randn(p.shape, generator=noise, dtype=p.dtype) * 0.02)
        with_adapter = model(ids)
        layer: Any = model.get_submodule("model.layers.0.self_attn.q_proj")
        weight = layer.weight.clone()
        merge(model)
        merged, change_rank = model(ids), torch.linalg.matrix_rank(layer.weight - weight, rtol=1e-9)
        unmerge(model)
        trained = cost.adapter_parameters(large, lora)
        yield {
            "rank": rank,
            f"trained ({LARGE})": trained,
            "share": trained / cost.parameter_count(large),
            "gradient and moments (GiB)": cost.trained_bytes(trained) / 2**30,
            "of all (GiB)": cost.trained_bytes(cost.parameter_count(large)) / 2**30,
            "change at first": float((fresh - base_output).abs().max()),
            "change with B": float((with_adapter - base_output).abs().max()),
            "merged - apart": float((merged - with_adapter).abs().max()),
            "rank of W' - W": int(change_rank),
            "unmerged is W": bool(torch.equal(layer.weight, weight)),
        }


def judge(rows: Rows) -> Report:
    """Returns the verdict: nothing changes at first, merging changes nothing, the rank is r, and rank 16 trains under 2
    %."""
    sixteen = rows[RANKS.index(16)]
    return Report(
        rows=tuple(rows),
        claims={
            "fresh": all(row["change at first"] == 0 for row in rows),
            "with B": all(row["change with B"] > 1e-3 for row in rows),
            "merged": all(row["merged - apart"] < 1e-12 for row in rows),
            "rank": all(row["rank of W' - W"] == row["rank"] for row in rows),
            "unmerged": all(row["unmerged is W"] for row in rows),
            "few": sixteen["share"] < 0.02,
        },
        values={"sixteen": sixteen, "off": max(row["merged - apart"] for row in rows)},
    )


SIZES = {"gradient and moments (GiB)": "o- blue", "of all (GiB)": "-- grey"}
CHANGES = {"change with B": "o- orange", "merged - apart": "s- blue"}
draw = panels(
    curves("rank", SIZES, f"an adapter of {LARGE}", "GiB", log="xy"),
    curves("rank", CHANGES, "largest difference of outputs", log="xy"),
)
