"""Calls of every kind for the kernels of every level, and all results of a call."""

from dataclasses import replace

import torch
from torch import Tensor

from headway.patterns import Causal, Chunk, Full, Global, GlobalKeys, GlobalQueries, Pattern, Sink, Window
from headway.scores import ALiBi, RelativeBias, SoftCap
from headway.tokens import Tokens
from tests.native.plain import Problem

PATTERNS: list[Pattern] = [
    Full(),
    Causal(),
    Window.last(5),
    Window.around(40),
    Window(2, 70),
    Window.last(30, step=3),
    Window.around(3, step=2),
    Window.last(60) | Causal() & Sink(3),
    Window.last(33, step=2) | Causal() & GlobalKeys(),
    Window.around(30) | Global(),
    Causal() | GlobalKeys() & GlobalQueries(),
    (Window.around(9) | Sink(2)) & (Causal() | GlobalKeys() | Window(0, 4)),
    Chunk(50),
    Chunk(7) & Causal() | Window.last(30, step=3),
]
TOKENS = ["range", "chunk", "before", "ring", "left", "right", "packed", "global"]
LENGTHS = [1, 2, 17, 63, 97, 131, 200, 300]
HEADS = [(3, 3), (6, 2), (5, 1), (7, 1)]
DIMS = [(16, 16), (64, 64), (33, 33), (128, 128), (256, 256), (7, 9), (80, 40), (32, 129)]
DTYPES = [torch.float32, torch.bfloat16]
STEPS = ["none", "cap", "alibi", "table", "past", "both"]
DROPOUT = [0.0, 0.3]
SCALES = [None, 0.0, -0.3, 2.0]
SETS = ["one", "two"]


def sides(kind: str, n: int) -> tuple[Tokens, Tokens]:
    """Returns queries and keys: the same tokens, or a later chunk, queries before keys, a ring that has wrapped."""
    if kind in ("left", "right"):
        tokens = Tokens.from_lengths([n, n - n // 3], n, kind)
    elif kind == "packed":
        tokens = Tokens.packed([[n // 3, n - n // 3], [n // 2]], n)
    elif kind == "global":
        tokens = Tokens.range(n).with_global([[0, n // 2], [n - 1]])
    elif kind == "chunk":
        return Tokens.range(n // 4 + 1, start=n - n // 4 - 1), Tokens.range(n)
    elif kind == "before":
        return Tokens.range(n, start=3), Tokens.range(n + 5, start=n // 2)
    elif kind == "ring":
        ring = Tokens(torch.cat((torch.arange(n, n + n // 3), torch.arange(n // 3, n))).unsqueeze(0))
        return Tokens.range(3, start=max(0, n + n // 3 - 3)), ring
    else:
        tokens = Tokens.range(n)
    return tokens, tokens


def steps(kind: str, heads: int) -> tuple[SoftCap | ALiBi | RelativeBias, ...]:
    return {
        "none": (),
        "cap": (SoftCap(2.0),),
        "alibi": (ALiBi(),),
        "table": (RelativeBias(torch.randn(32, heads), bidirectional=True),),
        "past": (RelativeBias(torch.randn(16, heads), bidirectional=False, max_distance=30),),
        "both": (SoftCap(5.0), ALiBi(tuple(0.1 * h for h in range(heads))), SoftCap(9.0)),
    }[kind]


def problem(
    pattern: Pattern,
    kind: str,
    n: int,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    score: str = "none",
    dropout: float = 0.0,
    scale: float | None = None,
    sets: str = "one",
) -> Problem:
    q, k = sides(kind, n)
    options = {"score": steps(score, heads[0]), "dropout": dropout, "seed": 2**40 + n, "scale": scale}
    split = k.count // 3 if sets == "two" else None
    return Problem.random(pattern, q, k, dtype, heads=heads, dims=dims, split=split, **options)


def outcome(case: Problem, threads: int = 1) -> list[Tensor]:
    """Returns out, lse and the gradients of q, k and v for fixed gradients of both, computed with this many threads."""
    leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    q, k, v = leaves
    previous = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        part = replace(case, q=q, k=k, v=v).run()
        generator = torch.Generator().manual_seed(1)
        d_out = torch.randn(part.out.shape, generator=generator).to(part.out.dtype)
        d_lse = torch.randn(part.lse.shape, generator=generator)
        return [part.out, part.lse, *torch.autograd.grad((part.out, part.lse), leaves, (d_out, d_lse))]
    finally:
        torch.set_num_threads(previous)


def equal(actual: list[Tensor], expected: list[Tensor]) -> None:
    for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), actual, expected, strict=True):
        assert torch.equal(x, y), name
