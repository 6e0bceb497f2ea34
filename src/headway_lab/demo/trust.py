"""Act 3: why to trust it. Every number is measured here and now, on the model that was just trained."""

import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import attend
from headway.models import Decoder, cost
from headway.patterns import Window, visible
from headway.report import size, table
from headway.tokens import Tokens
from headway_lab.profiling import doublings, in_turn


@dataclass(frozen=True)
class Equality:
    """How far logits of a cached decode are from those of one full forward."""

    tokens: int
    dtype: torch.dtype
    difference: float
    largest: float

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        reach = f"{self.tokens} tokens, logits up to {self.largest:.1f}"
        return f"{name}: largest difference {self.difference:.1e} ({reach})"


@torch.inference_mode()
def cached_equals_full(model: Decoder, ids: Tensor, dtype: torch.dtype) -> Equality:
    """Feed ids [1, T] once as a whole, and once through the caches: half of it in uneven chunks, then token
    by token."""
    model = copy.deepcopy(model).to(dtype).eval()
    full = model(ids)
    count = ids.shape[1]
    cuts = [0, count // 7, count // 5, count // 2, *range(count // 2 + 1, count + 1)]
    cache = model.make_cache(1)
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
    model = model.eval()
    spec, cache = model.spec, model.make_cache(1)
    marks = doublings(window, times * window)
    noise = torch.Generator().manual_seed(0)
    seen, sizes = 0, list[CacheSize]()
    while seen < marks[-1]:
        step = min(chunk, min(mark for mark in marks if mark > seen) - seen)
        model(
            torch.randint(0, spec.vocab, (1, step), generator=noise), cache=cache, logits_for=slice(-1, None)
        )
        seen += step
        if seen in marks:
            rings = [layer.slots for layer in cache.layers if layer.bound is not None]
            rest = [layer.slots for layer in cache.layers if layer.bound is None]
            element = cost.kv_bytes_per_token(spec, model.model.embedding.dtype) // spec.layers
            nbytes = element * (sum(rings) + sum(rest))
            sizes.append(
                CacheSize(seen, max(rings), max(rest, default=None), nbytes, element * spec.layers * seen)
            )
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
    """A causal window, forward, float32: torch's SDPA with a ready-made mask, and `attend`. One at a time,
    in turn."""
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
