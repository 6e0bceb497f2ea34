"""Acts 1 and 3: patterns drawn, and what keys and values cost, by arithmetic on a spec; then why to trust the model
that was just trained, by numbers that are measured here and now."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import attend
from headway.draw import draw_patterns, pattern_text, saved_figure, side_by_side
from headway.models import Decoder, catalog, cost
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, Sink, Window, visible
from headway.report import size, table
from headway.tokens import Tokens
from headway_lab.profiling import doublings, in_turn

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
    """The patterns for a terminal."""
    tokens = Tokens.range(count).with_global(list(GLOBAL))
    blocks = [(name, pattern_text(pattern, count, tokens, unicode)) for name, pattern in PATTERNS]
    return side_by_side(blocks, width, gap=3)


def save_pictures(path: Path, count: int = 20) -> None:
    """The patterns as one PNG."""
    tokens = Tokens.range(count).with_global(list(GLOBAL))
    with saved_figure(path) as figure:
        names = [f"{name}\n{pattern}" for name, pattern in PATTERNS]
        draw_patterns(figure, [pattern for _, pattern in PATTERNS], count, tokens, names, legend=False)


def kv_bytes() -> dict[str, list[int]]:
    """Bytes of one row's keys and values in bf16 at each of `CONTEXTS`: as many kv heads as query heads, fewer of them,
    and windows."""
    mha = catalog.spec(SHAPE)
    gqa, window = replace(mha, kv_heads=8), Window.last(WINDOW)
    specs = {
        f"MHA, {mha.kv_heads} kv heads": mha,
        f"GQA, {gqa.kv_heads} kv heads": gqa,
        f"GQA, window {WINDOW} in every other layer": gqa.with_patterns([window, Causal()]),
        f"GQA, window {WINDOW} in every layer": gqa.with_patterns(window),
    }
    return {
        what: [cost.kv_bytes_stored(spec, n, torch.bfloat16) for n in CONTEXTS]
        for what, spec in specs.items()
    }


def kv_table() -> str:
    """`kv_bytes` for a terminal."""
    stored = kv_bytes()
    first, *_ = stored.values()
    cells = [(what, *map(size, own), f"{own[-1] / first[-1]:.1%}") for what, own in stored.items()]
    return table(("", *(f"{n // 1024}k tokens" for n in CONTEXTS), "of MHA"), cells)


@dataclass(frozen=True)
class Equality:
    """How far logits of a cached decode are from those of one full forward."""

    tokens: int
    dtype: torch.dtype
    difference: float
    largest: float

    def __str__(self) -> str:
        return (
            f"{str(self.dtype).removeprefix('torch.')}: largest difference {self.difference:.1e} "
            f"({self.tokens} tokens, logits up to {self.largest:.1f})"
        )


@torch.inference_mode()
def cached_equals_full(model: Decoder, ids: Tensor, dtype: torch.dtype) -> Equality:
    """Feed ids [1, T] once as a whole, and once through the caches: half of it in uneven chunks, then token
    by token."""
    model = copy.deepcopy(model).to(dtype).eval()
    full, cache, count = model(ids), model.make_cache(1), ids.shape[1]
    cuts = [0, count // 7, count // 5, count // 2, *range(count // 2 + 1, count + 1)]
    parts = [model(ids[:, a:b], cache=cache) for a, b in pairwise(cuts) if b > a]
    difference = float((torch.cat(parts, 1) - full).abs().max())
    return Equality(count, dtype, difference, float(full.abs().max()))


@dataclass(frozen=True)
class CacheSize:
    """The caches after `tokens` tokens: slots of one windowed and of one full layer, bytes of all
    layers, and bytes that all layers would have if every one of them grew."""

    tokens: int
    ring: int
    growing: int | None
    nbytes: int
    nbytes_growing: int


@torch.inference_mode()
def cache_sizes(model: Decoder, window: int, times: int = 8, chunk: int = 32) -> list[CacheSize]:
    """Decode to `times` windows; the caches at 1, 2, 4, .. windows."""
    spec, cache = model.eval().spec, model.make_cache(1)
    element = cost.kv_bytes_per_token(spec, model.model.like.dtype) // spec.layers
    noise = torch.Generator().manual_seed(0)
    done, sizes = 0, list[CacheSize]()
    for count in doublings(window, times * window):
        for ids in torch.randint(0, spec.vocab, (1, count - done), generator=noise).split(chunk, 1):
            model(ids, cache=cache, logits_for=slice(-1, None))
        done = count
        rings = [layer.slots for layer in cache.layers if layer.bound is not None]
        rest = [layer.slots for layer in cache.layers if layer.bound is None]
        nbytes, whole = element * (sum(rings) + sum(rest)), element * spec.layers * count
        sizes.append(CacheSize(count, max(rings), max(rest, default=None), nbytes, whole))
    return sizes


def cache_table(rows: list[CacheSize]) -> str:
    """`cache_sizes` for a terminal."""
    columns = (
        "tokens",
        "slots, windowed layer",
        "slots, full layer",
        "keys and values",
        "if all layers grew",
    )
    cells = [(r.tokens, r.ring, r.growing, size(r.nbytes), size(r.nbytes_growing)) for r in rows]
    return table(columns, cells)


@dataclass(frozen=True)
class Timing:
    """Median seconds of one attention call each way, and the largest difference of the results."""

    tokens: int
    window: int
    heads: int
    repeats: int
    masked: float
    causal: float
    ours: float
    difference: float

    @property
    def ratio(self) -> float:
        return self.masked / self.ours

    def __str__(self) -> str:
        rows = [
            (f"torch SDPA, mask of {self.tokens} x {self.tokens}", self.masked * 1e3, size(self.tokens**2)),
            ("torch SDPA, causal, no window (another result)", self.causal * 1e3, "none"),
            (f"headway, Window.last({self.window})", self.ours * 1e3, "none"),
        ]
        return table(("", "median ms", "mask"), rows)


def time_window(
    tokens: int = 8192, window: int = 512, heads: int = 8, head_dim: int = 64, repeats: int = 3
) -> Timing:
    """A causal window, forward, float32: torch's SDPA with a ready-made mask, and `attend`. One at a time, in turn."""
    noise = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, head_dim, generator=noise) for _ in range(3))
    pattern, at = Window.last(window), Tokens.range(tokens)
    mask = visible(pattern, at, at)
    runs: dict[str, Callable[[], Tensor]] = {
        "masked": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=mask),
        "causal": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        "ours": lambda: attend(q, k, v, pattern),
    }
    with torch.inference_mode():
        outs = {name: run() for name, run in runs.items()}  # the first call of each also warms up
        seconds = in_turn(runs, repeats)
    difference = float((outs["masked"] - outs["ours"]).abs().max())
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return Timing(tokens, window, heads, repeats, **median, difference=difference)
