"""What query heads share: multi-head, grouped-query and multi-query attention. (Ainslie et al. 2023, figure 2.)"""

import torch
from torch import Tensor

from headway.attention import attend, attention_weights
from headway.cache import CacheSpec, KVCache, make_cache
from headway.checkpoints.restore import as_decoder
from headway.draw import BLUE, GREEN, GREY, ORANGE, RED, VIOLET
from headway.heads import Heads
from headway.models import ModelSpec, build, cost
from headway.nn import Attention
from headway.patterns import Causal
from headway.tokens import Tokens
from headway_lab.explain.report import Axes, Figure, Report, Row, Rows
from headway_lab.profiling import again, one_thread

QUERY_HEADS, KV_HEADS = 8, (8, 4, 2, 1)
WIDTH, LENGTH, BATCH, SEED = 64, 24, 2, 0
CONTEXT, REPEATS = 8192, 7
EQUAL = 1e-12
LAYOUTS = [Heads.of(QUERY_HEADS, kv_heads) for kv_heads in KV_HEADS]
COLOURS = (BLUE, ORANGE, GREEN, RED, VIOLET, GREY)

FORMULA = """query head h reads key/value head h // G;  H = K G heads, K of them with keys and values of their own
out = concat_h softmax(q_h . k_(h // G) / sqrt(D)) v_(h // G)  W_o      (each head on its own, none are summed)
parameters   M D (2 H + 2 K)         cache   2 K D numbers per token: K / H of multi-head attention's
one more token: operations hardly change with K, the bytes read do; with a cache, decoding waits for memory"""


def run() -> Report:
    """Each layout: its parameters and cache counted, its heads traced by gradients, its output compared."""
    with one_thread():
        full = measure(LAYOUTS[0])
        rows = [full, *(measure(layout, full) for layout in LAYOUTS[1:])]
    # [H, K]: query head h reads h // G and no other.
    groups = [torch.eye(one.kv_heads, dtype=torch.bool).repeat_interleave(one.group, 0) for one in LAYOUTS]
    return judge(rows, all(map(torch.equal, map(reads, LAYOUTS), groups)))


def measure(layout: Heads, full: Row | None = None) -> Row:
    """One layer of random weights on random tokens, in float64; `full` is the row of multi-head attention."""
    h, k, group = layout.query_heads, layout.kv_heads, layout.group
    noise = torch.Generator().manual_seed(SEED)
    layer = Attention(WIDTH, h, k).double()
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=noise, dtype=torch.float64)
    cache = make_cache(
        Causal(), CacheSpec(batch=BATCH, kv_heads=k, head_dim=layer.head_dim, dtype=torch.float64)
    )
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, WIDTH**-0.5, generator=noise)
        cache.reserve(LENGTH)
        layer(x, cache=cache)
    q, keys, values = (
        torch.randn(BATCH, n, LENGTH, layer.head_dim, generator=noise, dtype=torch.float64) for n in (h, k, k)
    )
    out = attend(q, keys, values, Causal())
    repeated = attend(q, keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1), Causal())
    flops, moved, seconds = step_of(layout)
    return {
        "kind": layout.kind,
        "query heads": h,
        "kv heads": k,
        "group": group,
        "parameters": sum(p.numel() for p in layer.parameters()),
        "cache (B)": cache.nbytes,
        "of MHA's cache": cache.nbytes / (full or {"cache (B)": cache.nbytes})["cache (B)"],
        "from repeated heads": float((out - repeated).abs().max()),
        "from summed scores": float((out - summed_over_group(q, keys, values, layout)).abs().max()),
        "FLOPs / token": flops,
        "bytes / token": moved,
        "tokens/s": 1 / seconds,
    }


def step_of(layout: Heads, context: int = CONTEXT) -> tuple[float, int, float]:
    """One more token of a small decoder with `context` tokens in its cache: operations and bytes counted from the spec,
    seconds of the fastest of some steps, in float32, on a cache of random keys."""
    h, k = layout.query_heads, layout.kv_heads
    spec = ModelSpec.of(
        "llama", vocab=256, width=64 * h, layers=2, heads=h, kv_heads=k, hidden=128 * h, tied=True
    )
    model = as_decoder(build(spec, dtype=torch.float32, seed=SEED).eval())
    cache, new = model.make_cache(1), torch.zeros(1, 1, dtype=torch.int64)
    cache.reserve(context)
    noise = torch.Generator().manual_seed(SEED)
    with torch.inference_mode():
        for layer in cache.layers:
            assert isinstance(layer, KVCache)
            keys, values = torch.randn(2, 1, k, context - 1, spec.head_dim, generator=noise)
            layer.update(keys, values, Tokens.range(context - 1))
        model(new, cache=cache)
        seconds = min(again(model, new, cache) for _ in range(REPEATS))
    moved = cost.weight_bytes_read(spec, torch.float32) + cost.kv_bytes_read(spec, context, torch.float32)
    return cost.decode_flops(spec, context), moved, seconds


def summed_over_group(q: Tensor, k: Tensor, v: Tensor, layout: Heads) -> Tensor:
    """The formula as one of the documents prints it, softmax(sum_j q_(i,j) k_i) v_i: all heads of a group get the
    same weights, those of the sum of their queries. Not grouped-query attention."""
    total = q.unflatten(1, (layout.kv_heads, layout.group)).sum(2)
    return (attention_weights(total, k, Causal()) @ v).repeat_interleave(layout.group, 1)


def reads(layout: Heads) -> Tensor:
    """bool [H, K]: which key/value heads each query head's output depends on, by gradient."""
    noise = torch.Generator().manual_seed(SEED)
    q = torch.randn(1, layout.query_heads, 4, 8, generator=noise)
    k, v = torch.randn(2, 1, layout.kv_heads, 4, 8, generator=noise).requires_grad_()
    out = attend(q, k, v, Causal())
    found = [torch.autograd.grad(own.pow(2).sum(), (k, v), retain_graph=True) for own in out[0]]
    return torch.stack([(dk.abs() + dv.abs())[0].sum((1, 2)) > 0 for dk, dv in found])


def judge(rows: Rows, reads_right: bool) -> Report:
    """The verdict: sizes as the formulas say, outputs those of repeated heads, and not those of summed scores."""
    dim, full, one = WIDTH // QUERY_HEADS, rows[0], rows[-1]
    sizes = all(
        row["parameters"] == WIDTH * dim * 2 * (QUERY_HEADS + row["kv heads"])
        and row["cache (B)"] == BATCH * LENGTH * 2 * row["kv heads"] * dim * 8
        for row in rows
    )
    share, same = one["of MHA's cache"], max(row["from repeated heads"] for row in rows)
    other = min(row["from summed scores"] for row in rows if row["group"] > 1)
    return Report(
        rows=tuple(rows),
        seen=sizes and reads_right and same < EQUAL and full["from summed scores"] < EQUAL and other > 1e-3,
        setting=(
            f"width {WIDTH}, {BATCH} x {LENGTH} tokens, random weights, float64, seed {SEED}; one more token of two "
            f"layers of width {64 * QUERY_HEADS} at {CONTEXT} tokens, float32, one thread"
        ),
        finding=(
            f"by gradient every query head reads key/value head h // G and no other; parameters and cache are those "
            f"of the formulas, {share:.4g} of the cache with one kv head; the output is that of multi-head attention "
            f"with repeated heads within {same:.0e}, and differs by {other:.2g} or more from a sum of scores over the "
            f"group; one more token takes {full['FLOPs / token'] / one['FLOPs / token']:.2f} times the operations "
            f"and {full['bytes / token'] / one['bytes / token']:.1f} times the bytes with "
            f"{full['kv heads']} kv heads that it takes with {one['kv heads']} (timed: "
            f"{one['tokens/s'] / full['tokens/s']:.1f} times as long)"
        ),
        picture="\n\n".join(picture(layout) for layout in LAYOUTS if layout.kv_heads != 2),
    )


def picture(layout: Heads) -> str:
    """Query heads above the key/value heads that they read."""
    cell, group = 4, layout.group
    top = "".join(f"q{h}".ljust(cell) for h in range(layout.query_heads))
    one = "|" if group == 1 else "+" + "-" * (cell * (group - 1) - 1) + "+"
    joint = one.ljust(cell * group) * layout.kv_heads
    below = "".join(f"kv{k}".ljust(cell * group) for k in range(layout.kv_heads))
    title = f"{layout.kind}: {layout.query_heads} query heads, {layout.kv_heads} kv heads"
    return "\n".join(line.rstrip() for line in (title, top, joint, below))


def draw(figure: Figure, report: Report) -> None:
    """Above: who reads whom. Below: parameters and cache."""
    figure.set_size_inches(9, 5.2)
    above, below = figure.subfigures(2, 1, height_ratios=[1.0, 1.3])
    for axes, layout in zip(above.subplots(1, len(LAYOUTS)), LAYOUTS, strict=True):
        draw_layout(axes, layout)
    names = [f"{layout.kind}\n{layout.kv_heads} kv" for layout in LAYOUTS]
    left, right = below.subplots(1, 2)
    left.bar(names, report.column("parameters"), color=BLUE)
    left.set_title("parameters of the layer")
    right.bar(names, report.column("cache (B)"), color=ORANGE)
    right.set_title("bytes in the cache")


def draw_layout(axes: Axes, layout: Heads) -> None:
    """One layout on matplotlib axes: query heads on top, each joined to the key/value head that it reads."""
    heads, group = layout.query_heads, layout.group
    for h in range(heads):
        k = h // group
        centre = (k * group + (group - 1) / 2) if layout.kv_heads > 1 else (heads - 1) / 2
        colour = COLOURS[k % len(COLOURS)]
        axes.plot([h, centre], [1, 0], "-", color=colour, linewidth=1)
        axes.plot([h], [1], "s", color=colour, markersize=7)
        axes.plot([centre], [0], "o", color=colour, markersize=9)
    axes.set_title(f"{layout.kind}: {heads} on {layout.kv_heads}", fontsize=9)
    axes.set(xlim=(-0.7, heads - 0.3), ylim=(-0.3, 1.3), xticks=[], yticks=[0, 1], yticklabels=["k, v", "q"])
    axes.grid(visible=False)
