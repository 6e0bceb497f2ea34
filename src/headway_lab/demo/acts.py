"""Acts 1 and 3 of the demo: drawn patterns and the size of the KV cache, computed from a spec; then measurements that
check the model that was just trained."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.cache import PAGE
from headway.models import Decoder, catalog, cost
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, Sink, Window, draw
from headway.report import size, table
from headway.tokens import Tokens
from headway_lab.bench.attention import measure
from headway_lab.bench.cases import CASES, FORWARD
from headway_lab.bench.measure import Effort
from headway_lab.bench.rows import Row
from headway_lab.draw import draw_patterns, saved_figure
from headway_lab.profiling import doublings

PATTERNS: tuple[tuple[str, Pattern], ...] = (
    ("full", Full()),
    ("window", Window.around(2)),
    ("dilated window", Window.around(2, step=2)),
    ("window + global", Window.around(1) | Global()),
    ("causal", Causal()),
    ("causal window", Window.last(4)),
    ("causal window + sinks", Window.last(3) | (Causal() & Sink(2))),
    ("causal window + global", Window.last(3) | (Causal() & GlobalKeys())),
)
GLOBAL = (0, 5)
SHAPE = "llama-2-7b"
CONTEXTS = (1024, 32768)
WINDOW = 1024


def pictures(count: int = 11, unicode: bool = True, width: int = 100) -> str:
    """Returns the patterns drawn for a terminal."""
    tokens = Tokens.range(count).with_global(list(GLOBAL))
    blocks = [(name, draw(pattern, count, tokens, "■·" if unicode else "#.")) for name, pattern in PATTERNS]
    return side_by_side(blocks, width, gap=3)


def side_by_side(blocks: Sequence[tuple[str, str]], width: int = 100, gap: int = 4) -> str:
    """Returns titled blocks of text next to each other, as many per row as fit into `width` characters."""
    boxes = []
    for title, block in blocks:
        lines = [title, *block.splitlines()]
        boxes.append([line.ljust(max(map(len, lines))) for line in lines])
    rows: list[list[list[str]]] = [[]]
    for box in boxes:
        used = sum(len(placed[0]) + gap for placed in rows[-1])
        if rows[-1] and used + len(box[0]) > width:
            rows.append([])
        rows[-1].append(box)
    text = []
    for row in rows:
        height = max(map(len, row))
        filled = [box + [" " * len(box[0])] * (height - len(box)) for box in row]
        text.append("\n".join((" " * gap).join(line).rstrip() for line in zip(*filled, strict=True)))
    return "\n\n".join(text)


def save_pictures(path: Path, count: int = 20) -> None:
    """Draws the patterns into one PNG."""
    tokens = Tokens.range(count).with_global(list(GLOBAL))
    with saved_figure(path) as figure:
        names = [f"{name}\n{pattern}" for name, pattern in PATTERNS]
        draw_patterns(figure, [pattern for _, pattern in PATTERNS], count, tokens, names, legend=False)


def kv_bytes() -> dict[str, list[int]]:
    """Returns the KV cache bytes of one sequence in bf16 at each of `CONTEXTS`: with as many KV heads as query heads,
    with fewer, and with windows."""
    mha = catalog.spec(SHAPE)
    gqa, window = replace(mha, kv_heads=8), Window.last(WINDOW)
    specs = {
        f"MHA, {mha.kv_heads} kv heads": mha,
        f"GQA, {gqa.kv_heads} kv heads": gqa,
        f"GQA, window {WINDOW} in every other layer": gqa.with_patterns([window, Causal()]),
        f"GQA, window {WINDOW} in every layer": gqa.with_patterns(window),
    }
    return {
        label: [cost.kv_bytes_stored(spec, n, torch.bfloat16) for n in CONTEXTS]
        for label, spec in specs.items()
    }


def kv_table() -> str:
    """Returns `kv_bytes` as a table for a terminal."""
    stored = kv_bytes()
    first, *_ = stored.values()
    cells = [(label, *map(size, counts), f"{counts[-1] / first[-1]:.1%}") for label, counts in stored.items()]
    return table(("", *(f"{n // 1024}k tokens" for n in CONTEXTS), "of MHA"), cells)


@torch.inference_mode()
def cached_equals_full(model: Decoder, ids: Tensor, dtype: torch.dtype) -> dict[str, Any]:
    """Returns how far the logits of cached decoding are from those of one full forward: ids [1, T] are fed once as a
    whole, and once through the KV cache, the first half in uneven chunks, then token by token."""
    model = copy.deepcopy(model).to(dtype).eval()
    full, cache, count = model(ids), model.make_cache(1), ids.shape[1]
    cuts = [0, count // 7, count // 5, count // 2, *range(count // 2 + 1, count + 1)]
    parts = [model(ids[:, a:b], cache=cache) for a, b in pairwise(cuts) if b > a]
    difference = float((torch.cat(parts, 1) - full).abs().max())
    name, largest = str(dtype).removeprefix("torch."), float(full.abs().max())
    return {"tokens": count, "dtype": name, "difference": difference, "largest": largest}


@torch.inference_mode()
def cache_sizes(model: Decoder, window: int, times: int = 8, chunk: int = 32) -> list[dict[str, int | None]]:
    """Decodes `times` windows of random tokens; at 1, 2, 4, .. windows returns the slots in the pages of a windowed and
    of a full layer, the bytes of all layers, and the bytes if no layer had a window."""
    spec, cache = model.eval().spec, model.make_cache(1)
    element = cost.kv_bytes_per_token(spec, model.model.like.dtype) // spec.layers
    noise = torch.Generator().manual_seed(0)
    decoded, sizes = 0, list[dict[str, int | None]]()
    for count in doublings(window, times * window):
        for ids in torch.randint(0, spec.vocab, (1, count - decoded), generator=noise).split(chunk, 1):
            model(ids, cache=cache, logits_for=slice(-1, None))
        decoded = count
        layer_slots = list(zip(spec.patterns, cache.slots, strict=True))
        windows = [slots for pattern, slots in layer_slots if pattern.retention.reach is not None]
        growing = [slots for pattern, slots in layer_slots if pattern.retention.reach is None]
        slots = {"window": max(windows), "growing": max(growing, default=None)}
        unwindowed_bytes = element * spec.layers * -(-count // PAGE) * PAGE
        sizes.append({"tokens": count, **slots, "nbytes": cache.nbytes, "nbytes_growing": unwindowed_bytes})
    return sizes


def cache_table(rows: list[dict[str, Any]]) -> str:
    """Returns `cache_sizes` as a table for a terminal."""
    columns = (
        "tokens",
        "slots, windowed layer",
        "slots, full layer",
        "keys and values",
        "if all layers grew",
    )
    return table(
        columns, [(*slots, size(stored), size(grown)) for *slots, stored, grown in map(dict.values, rows)]
    )


def time_window(tokens: int, repeats: int) -> Row:
    """Times a causal window, forward, float32: `attend` in turn with torch's SDPA with a precomputed mask."""
    case = CASES["window"].at(tokens).with_peers(["mask"])
    return measure(case, "float32", FORWARD, "auto", Effort(repeats=repeats, least=1))
