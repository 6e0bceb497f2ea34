"""What query heads share: multi-head, grouped-query and multi-query attention. (Ainslie et al. 2023, figure 2.)"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import fmean
from string import ascii_uppercase

import torch
from matplotlib import colormaps
from torch import Tensor

from headway.attention import attend, attention_weights
from headway.cache import CacheSpec, PagedCache, PagedLayer
from headway.checkpoints.restore import as_decoder
from headway.errors import ConfigError
from headway.heads import Heads
from headway.models import ModelSpec, build, cost
from headway.nn import Attention
from headway.patterns import Causal
from headway_lab.draw import GREY
from headway_lab.explain.figures import Axes, Figure, Panel, bars, panels
from headway_lab.explain.report import Report, Row, Rows, ranged
from headway_lab.explain.spread import Gap, log_gap
from headway_lab.profiling import in_turn, one_thread

HEAD_DIM, LENGTH, BATCH, SEEDS = 8, 64, 2, (0, 1, 2)
ROUNDS = 9
EQUAL, APART = 1e-12, 1e-3


def run(
    *, heads: int = 8, kv_heads: int | None = None, context: int = 8192, seeds: Sequence[int] = SEEDS
) -> Report:
    """Measures each layout: its parameters and KV cache are counted, its heads traced by gradients, its output
    compared, and one more token at `context` tokens counted and timed. The layouts are multi-head, `kv_heads` and
    multi-query attention, or, without `kv_heads`, all numbers of KV heads by halving."""
    layouts = layouts_of(heads, kv_heads)
    with one_thread():
        times = step_times(layouts, context)
        rows = [measure(layout, context, seeds, times[i]) for i, layout in enumerate(layouts)]
    return judge(rows, log_gap(times[-1], times[0]))


def layouts_of(heads: int, kv_heads: int | None) -> list[Heads]:
    """Returns the layouts, from as many KV heads as query heads down to one. Raises ConfigError for one head, which
    shares nothing."""
    if heads < 2:
        raise ConfigError(f"explain heads: --heads {heads} must be at least 2")
    if kv_heads is None:
        halved = [heads // 2**i for i in range(heads.bit_length()) if heads % 2**i == 0]
        return [Heads.of(heads, k) for k in dict.fromkeys((*halved, 1))]
    return [Heads.of(heads, k) for k in dict.fromkeys((heads, kv_heads, 1))]


def measure(layout: Heads, context: int, seeds: Sequence[int], times: Sequence[float]) -> Row:
    """Returns the counts of one layer and one step; and, over the seeds, the largest difference of the output from that
    with repeated heads, and the least from that with scores summed over a group, for random tokens in float64."""
    h, k = layout.query_heads, layout.kv_heads
    layer = Attention(HEAD_DIM * h, h, k).double()
    cache = PagedCache(CacheSpec(kv_heads=k, head_dim=HEAD_DIM, dtype=torch.float64), [Causal()])
    tokens = cache.begin([(cache.open(), [0] * LENGTH) for _ in range(BATCH)])
    with torch.no_grad():
        layer(torch.zeros(1, tokens.count, HEAD_DIM * h, dtype=torch.float64), tokens=tokens, cache=cache[0])
    spec = step_spec(layout)
    errors = [differences(layout, seed) for seed in seeds]
    return {
        "kind": layout.kind,
        "query heads": h,
        "kv heads": k,
        "group": layout.group,
        "reads others": int((reads(layout) != groups(layout)).sum()),
        "parameters": sum(p.numel() for p in layer.parameters()),
        "cache (B)": cache.pool.held,
        "of MHA's cache": cache.pool.held / (BATCH * LENGTH * 2 * h * HEAD_DIM * 8),
        "from repeated heads": max(from_repeated for from_repeated, _ in errors),
        "from summed scores": min(from_summed for _, from_summed in errors),
        "FLOPs / token": cost.decode_flops(spec, context),
        "bytes / token": (
            cost.weight_bytes_read(spec, torch.float32) + cost.kv_bytes_read(spec, context, torch.float32)
        ),
        **ranged("ms / token", [1e3 * seconds for seconds in times]),
    }


def differences(layout: Heads, seed: int) -> tuple[float, float]:
    """Returns the largest difference of the output from that with repeated heads, and from that with summed scores."""
    noise = torch.Generator().manual_seed(seed)
    q, keys, values = (
        torch.randn(BATCH, n, LENGTH, HEAD_DIM, generator=noise, dtype=torch.float64)
        for n in (layout.query_heads, layout.kv_heads, layout.kv_heads)
    )
    out, group = attend(q, keys, values, Causal()), layout.group
    repeated = attend(q, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), Causal())
    summed = summed_over_group(q, keys, values, layout)
    return float((out - repeated).abs().max()), float((out - summed).abs().max())


def summed_over_group(q: Tensor, k: Tensor, v: Tensor, layout: Heads) -> Tensor:
    """Computes the formula that one of the documents prints, softmax(sum_j q_(i,j) k_i) v_i: all heads of a group get
    the same weights, those of the sum of their queries. This is not grouped-query attention."""
    total = q.unflatten(1, (layout.kv_heads, layout.group)).sum(2)
    return (attention_weights(total, k, Causal()) @ v).repeat_interleave(layout.group, 1)


def groups(layout: Heads) -> Tensor:
    """Returns bool [H, K]: query head h reads h // G and no other."""
    return torch.eye(layout.kv_heads, dtype=torch.bool).repeat_interleave(layout.group, 0)


def reads(layout: Heads) -> Tensor:
    """Returns bool [H, K]: which KV heads each query head's output depends on, by gradient."""
    noise = torch.Generator().manual_seed(SEEDS[0])
    q = torch.randn(1, layout.query_heads, 4, 8, generator=noise)
    k, v = torch.randn(2, 1, layout.kv_heads, 4, 8, generator=noise).requires_grad_()
    out = attend(q, k, v, Causal())
    grads = [torch.autograd.grad(head_out.pow(2).sum(), (k, v), retain_graph=True) for head_out in out[0]]
    return torch.stack([(dk.abs() + dv.abs())[0].sum((1, 2)) > 0 for dk, dv in grads])


def step_spec(layout: Heads) -> ModelSpec:
    """Returns the spec of a small decoder with heads of width 64."""
    h, k = layout.query_heads, layout.kv_heads
    return ModelSpec.of(
        "llama", vocab=256, width=64 * h, layers=2, heads=h, kv_heads=k, hidden=128 * h, tied=True
    )


def step_times(layouts: Sequence[Heads], context: int) -> list[list[float]]:
    """Returns the seconds of one core for one more token of each layout, round by round, so that all run under the same
    load; without the first round."""
    steps = {str(layout): step_of(layout, context) for layout in layouts}
    with torch.inference_mode():
        return [seconds[1:] for seconds in in_turn(steps, ROUNDS + 1, time.process_time).values()]


def step_of(layout: Heads, context: int) -> Callable[[], None]:
    """Returns a call that decodes one more token of the small decoder with `context` tokens in its cache, random keys,
    in float32."""
    spec = step_spec(layout)
    model = as_decoder(build(spec, dtype=torch.float32, seed=SEEDS[0]).eval())
    cache, new = model.make_cache(1), torch.zeros(1, 1, dtype=torch.int64)
    noise = torch.Generator().manual_seed(SEEDS[0])
    with torch.inference_mode():
        with cache.step(cache.next_tokens(context - 1)) as packed:
            for layer in cache.pages.layers:
                assert isinstance(layer, PagedLayer)
                keys, values = torch.randn(2, 1, spec.kv_heads, context - 1, spec.head_dim, generator=noise)
                layer.update(keys, values, packed.tokens)
        model(new, cache=cache)

    def decode() -> None:
        cache.trim(1)
        model(new, cache=cache)

    return decode


def judge(rows: Rows, slower: Gap) -> Report:
    """Returns the verdict: who reads whom, sizes, outputs, bytes and time of a step, each as its own claim. `slower` is
    the gap of the log time of a step with the fewest KV heads to that with the most."""
    h, full, fewest = rows[0]["query heads"], rows[0], rows[-1]
    from_repeated = max(row["from repeated heads"] for row in rows)
    from_summed = min(row["from summed scores"] for row in rows if row["group"] > 1)
    return Report(
        rows=tuple(rows),
        claims={
            "reads": not any(r["reads others"] for r in rows),
            "sizes": all(
                row["parameters"] == h * HEAD_DIM * HEAD_DIM * 2 * (h + row["kv heads"])
                and row["cache (B)"] == BATCH * LENGTH * 2 * row["kv heads"] * HEAD_DIM * 8
                for row in rows
            ),
            "repeated": from_repeated < EQUAL,
            "summed": from_summed > APART,
            "bytes": all(a > b for a, b in pairwise(row["bytes / token"] for row in rows)),
            "time": slower.lower,
        },
        values={
            "same": from_repeated,
            "other": from_summed,
            "operations": fewest["FLOPs / token"] / full["FLOPs / token"],
            "bytes": fewest["bytes / token"] / full["bytes / token"],
            "slower": slower,
        },
        picture="\n\n".join(picture(Heads.of(h, row["kv heads"])) for row in rows),
    )


def picture(layout: Heads) -> str:
    """Returns a drawing of the query heads above the KV heads that they read."""
    cell, group = 4, layout.group
    top = "".join(f"q{h}".ljust(cell) for h in range(layout.query_heads))
    bar = "|" if group == 1 else "+" + "-" * (cell * (group - 1) - 1) + "+"
    joint = bar.ljust(cell * group) * layout.kv_heads
    below = "".join(f"kv{k}".ljust(cell * group) for k in range(layout.kv_heads))
    title = f"{layout.kind}: {layout.query_heads} query heads, {layout.kv_heads} kv heads"
    return "\n".join(line.rstrip() for line in (title, top, joint, below))


def layout_of(row: Row) -> Panel:
    """Returns a panel with query heads on top, each joined to the KV head that it reads, in a different colour for each
    group."""
    layout = Heads.of(row["query heads"], row["kv heads"])

    def draw(axes: Axes, report: Report) -> None:
        for k in range(layout.kv_heads):
            colour = colormaps["turbo"]((k + 0.5) / layout.kv_heads)
            group = range(k * layout.group, (k + 1) * layout.group)
            for h in group:
                axes.plot([h, fmean(group)], [1, 0], "-", color=GREY, linewidth=1)
            axes.plot(group, [1] * layout.group, "s", color=colour, markersize=4)
            axes.plot([fmean(group)], [0], "o", color=colour, markersize=6)
        axes.set_title(f"{layout.kind}: {layout.query_heads} on {layout.kv_heads}", fontsize=9)
        axes.set(ylim=(-0.3, 1.3), xticks=[], yticks=[0, 1], yticklabels=["k, v", "q"])
        axes.grid(visible=False)

    return draw


def draw(figure: Figure, report: Report) -> None:
    """Draws who reads whom above, and below the cache, and bytes and time of one more token."""
    count, names = len(report.rows), ("kind", "kv heads")
    above, below = (
        "".join(x * repeats for x in letters)
        for letters, repeats in ((ascii_uppercase[:count], 3), ("XYZ", count))
    )
    panels(
        *map(layout_of, report.rows),
        bars(names, "of MHA's cache", "cache"),
        bars(names, "bytes / token", "bytes read"),
        bars(names, "ms / token", "time", "ms of one core (line: all rounds)"),
        layout=f"{above};{below}",
    )(figure, report)
    figure.set_size_inches(max(9, 2.6 * count), 5.2)
