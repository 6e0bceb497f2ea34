"""An attention of its own, pair by pair in float64, and sequences cut into chunks: what caches are held to.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.patterns import Causal, GlobalKeys, GlobalQueries, Pattern, PerHead, Sink, Window
from headway.tokens import Tokens

HEADS, KV_HEADS, SIZE, W = 4, 2, 3, 5

# (head, i, j, query is global, key is global) -> may see, on tensors that broadcast
Sees = Callable[[int, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """A pattern, the same in plain comparisons, and its ring in slots, global ones aside (None: grows)."""

    pattern: Pattern
    sees: Sees
    slots: int | None

    def __str__(self) -> str:
        return str(self.pattern).replace(" ", "")


def _last(i: Tensor, j: Tensor, w: int, step: int = 1) -> Tensor:
    return (j <= i) & (i - j <= (w - 1) * step) & ((i - j) % step == 0)


CASES = [
    Case(Causal(), lambda h, i, j, q, k: j <= i, None),
    Case(Window.last(W), lambda h, i, j, q, k: _last(i, j, W), W),
    Case(Window.last(1), lambda h, i, j, q, k: j == i, 1),
    Case(
        Window.last(W) | (Causal() & Sink(2)),
        lambda h, i, j, q, k: _last(i, j, W) | ((j < 2) & (j <= i)),
        2 + W,
    ),
    Case(Window.last(3, step=2), lambda h, i, j, q, k: _last(i, j, 3, 2), 5),
    Case(Causal() & Sink(3), lambda h, i, j, q, k: (j <= i) & (j < 3), 4),
    Case(
        Window.last(W) | (Causal() & GlobalKeys()), lambda h, i, j, q, k: _last(i, j, W) | (k & (j <= i)), W
    ),
    Case(
        Window.last(W) | (Causal() & (Sink(2) | GlobalKeys())),
        lambda h, i, j, q, k: _last(i, j, W) | (((j < 2) | k) & (j <= i)),
        2 + W,
    ),
    Case(
        Window.last(3) | Window.last(3, step=3) | (Causal() & Sink(1)) | (Causal() & GlobalKeys()),
        lambda h, i, j, q, k: _last(i, j, 3) | _last(i, j, 3, 3) | (((j < 1) | k) & (j <= i)),
        1 + 7,
    ),
    Case(
        PerHead(Window.last(3), Window.last(3, step=3), Causal() & GlobalKeys(), Window.last(2)),
        lambda h, i, j, q, k: (_last(i, j, 3), _last(i, j, 3, 3), k & (j <= i), _last(i, j, 2))[h],
        7,
    ),
    Case(
        PerHead(Window.last(3), Causal(), Window.last(2), Window.last(1)),
        lambda h, i, j, q, k: (_last(i, j, 3), j <= i, _last(i, j, 2), j == i)[h],
        None,
    ),
    Case(
        Window.last(W) | (Causal() & GlobalQueries()),
        lambda h, i, j, q, k: _last(i, j, W) | (q & (j <= i)),
        None,
    ),
]
GLOBAL_CASES = [case for case in CASES if "Global" in str(case)]


def attend_pairs(case: Case, q: Tensor, q_tokens: Tokens, k: Tensor, v: Tensor, k_tokens: Tokens) -> Tensor:
    """softmax over the visible keys, row by row and head by head: [B, H, T, D]; 0 where nothing is visible.

    Empty slots are cut out before anything is computed with them."""
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    at_q, at_k = q_tokens.expand(q.shape[0]), k_tokens.expand(q.shape[0])
    at_q, at_k = (Tokens(t.index, is_global=t.globals.expand_as(t.index)) for t in (at_q, at_k))
    for b in range(q.shape[0]):
        rows, slots = (at_q.index[b] >= 0).nonzero()[:, 0], (at_k.index[b] >= 0).nonzero()[:, 0]
        i, j = at_q.index[b, rows, None], at_k.index[b, None, slots]
        gi, gj = at_q.globals[b, rows, None], at_k.globals[b, None, slots]
        for h in range(q.shape[1]):
            kv = h // (q.shape[1] // k.shape[1])
            keys, values = k[b, kv, slots].double(), v[b, kv, slots].double()
            score = q[b, h, rows].double() @ keys.T / q.shape[3] ** 0.5
            score = score.masked_fill(~case.sees(h, i, j, gi, gj), float("-inf"))
            out[b, h, rows] = torch.softmax(score, -1).nan_to_num() @ values
    return out


@dataclass(frozen=True)
class Rows:
    """Random rows of tokens: q [B, H, n, D], k and v [B, K, n, D], is_global [B, n], lengths [B]."""

    q: Tensor
    k: Tensor
    v: Tensor
    is_global: Tensor
    lengths: tuple[int, ...]

    @staticmethod
    def draw(lengths: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float64) -> Rows:
        make = torch.Generator().manual_seed(seed)
        b, n = len(lengths), max(lengths)
        q = torch.randn(b, HEADS, n, SIZE, generator=make, dtype=dtype)
        k, v = torch.randn(2, b, KV_HEADS, n, SIZE, generator=make, dtype=dtype)
        return Rows(q, k, v, torch.rand(b, n, generator=make) < 0.2, tuple(lengths))

    @property
    def tokens(self) -> Tokens:
        tokens = Tokens.from_lengths(self.lengths, total=self.q.shape[2])
        return Tokens(tokens.index, is_global=self.is_global & tokens.valid)

    def full(self, case: Case) -> Tensor:
        """One forward over whole rows."""
        return attend_pairs(case, self.q, self.tokens, self.k, self.v, self.tokens)

    def chunk(
        self, begins: Sequence[int], counts: Sequence[int], side: str = "right", extra: int = 0
    ) -> tuple[Tensor, Tensor, Tensor, Tokens, Tensor]:
        """q, k, v, tokens of a chunk of counts[b] tokens of row b, and their places [B, T] in the rows.

        Padding is NaN. `side`: where it stands, "left", "right", or "between" the tokens."""
        width = max(counts) + extra
        places = torch.full((len(counts), width), -1)
        for b, (begin, n) in enumerate(zip(begins, counts, strict=True)):
            at = {
                "right": torch.arange(n),
                "left": torch.arange(width - n, width),
                "between": torch.arange(n) * width // max(n, 1),
            }[side]
            places[b, at] = torch.arange(begin, begin + n)
        pad = places < 0

        def pick(x: Tensor) -> Tensor:
            at = places.clamp_min(0)[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
            return x.gather(2, at).masked_fill(pad[:, None, :, None], float("nan"))

        is_global = self.is_global.gather(1, places.clamp_min(0)) & ~pad
        regular = not pad.any() and len(set(begins)) == 1
        tokens = Tokens(places, is_global=is_global, start=begins[0] if regular and width else None)
        return pick(self.q), pick(self.k), pick(self.v), tokens, places


def cuts(n: int) -> list[list[int]]:
    """Ways to cut n tokens into chunks: one by one, at once, before and behind the window, in threes, long
    chunks in the middle."""
    ways = [
        [1] * n,
        [n],
        [n - 1, 1],
        [1, n - 1],
        [3] * (n // 3) + [n % 3],
        [2, W + 2] + [1] * n,
        [W, 1, W, 1, W],
        [W - 1, 2, 1, 2 * W + 3],
        [W + 1] * (n // (W + 1)) + [n % (W + 1)],
    ]
    result = []
    for way in ways:
        cut, left = [], n
        for size in way:
            size = min(size, left)
            left -= size
            cut += [size] if size else []
        cut += [left] if left else []
        if cut not in result:
            result.append(cut)
    return result
