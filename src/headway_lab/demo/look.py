"""Act 1: the patterns drawn, and what keys and values cost, by arithmetic on a spec."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from headway.draw import draw_patterns, pattern_text, saved_figure, side_by_side
from headway.models import ModelSpec, catalog, cost
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


@dataclass(frozen=True)
class Stored:
    """Bytes of keys and values of one row at each of `CONTEXTS`."""

    what: str
    stored: tuple[int, ...]


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


def kv_bytes() -> list[Stored]:
    """What one row keeps in bf16: as many kv heads as query heads, fewer, and fewer with windows."""
    mha = catalog.spec(SHAPE)
    gqa = replace(mha, kv_heads=8)
    window = Window.last(WINDOW)
    rows: list[tuple[str, ModelSpec]] = [
        (f"MHA, {mha.kv_heads} kv heads", mha),
        (f"GQA, {gqa.kv_heads} kv heads", gqa),
        (f"GQA, window {WINDOW} in every other layer", gqa.with_patterns([window, Causal()])),
        (f"GQA, window {WINDOW} in every layer", gqa.with_patterns(window)),
    ]
    return [
        Stored(what, tuple(cost.kv_bytes_stored(spec, n, torch.bfloat16) for n in CONTEXTS))
        for what, spec in rows
    ]


def kv_table() -> str:
    """`kv_bytes` for a terminal."""
    rows = kv_bytes()
    first = rows[0].stored[-1]
    columns = ("", *(f"{n // 1024}k tokens" for n in CONTEXTS), "of MHA")
    cells = [(row.what, *map(size, row.stored), f"{row.stored[-1] / first:.1%}") for row in rows]
    return table(columns, cells)
