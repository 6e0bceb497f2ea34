"""Act 1: the patterns drawn, and what keys and values cost, by arithmetic on a spec."""

from dataclasses import replace
from pathlib import Path

import torch

from headway.draw import draw_patterns, pattern_text, saved_figure, side_by_side
from headway.models import catalog, cost
from headway.patterns import Causal, Full, Global, GlobalKeys, Pattern, Sink, Window
from headway.report import size, table
from headway.tokens import Tokens

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
    gqa = replace(mha, kv_heads=8)
    window = Window.last(WINDOW)
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
    columns = ("", *(f"{n // 1024}k tokens" for n in CONTEXTS), "of MHA")
    cells = [(what, *map(size, own), f"{own[-1] / first[-1]:.1%}") for what, own in stored.items()]
    return table(columns, cells)
