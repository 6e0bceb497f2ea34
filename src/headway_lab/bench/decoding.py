"""Decoding: one query over a long cache that lies in memory.

Legend: H query heads, K kv heads, G heads per kv head, S cached keys, D per head.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import KeyValues, attend
from headway.patterns import Causal
from headway.quantization import dequantize
from headway.tokens import Tokens
from headway_lab.bench.cases import Case
from headway_lab.bench.peers import quickest

COLD_BYTES = 256 << 20
"""Caches that take turns in decoding hold this much, so that none is still in the processor's own cache."""
MOST_CACHES = 32

Side = Callable[[], Sequence[Tensor]]


def decode_sides(case: Case, dtype: str, backend: str) -> tuple[dict[str, Side], float]:
    """The sides of a decode case, and the bytes of keys, values and scales that headway reads in a call.

    Every call of a side takes the next of several caches. In a case of int8, headway and "dequantised" read
    int8; all others read the numbers that these stand for, rounded to `dtype` beforehand.
    """
    kind, noise = getattr(torch, dtype), torch.Generator().manual_seed(0)
    past, width, int8 = case.tokens, case.width, case.kv_dtype == "int8"
    q = torch.empty(1, case.heads, 1, width, dtype=kind).normal_(generator=noise)
    shape = (1, case.kv_heads, past, width)
    last, all_keys = Tokens.range(1, start=past - 1), Tokens.range(past)

    def cache() -> KeyValues:
        k, v = (torch.empty(shape, dtype=kind).normal_(generator=noise) for _ in range(2))
        return KeyValues(k, v, all_keys).quantized() if int8 else KeyValues(k, v, all_keys)

    first = cache()
    one = sum(t.nbytes for t in first.tensors)
    caches = [first, *(cache() for _ in range(max(2, min(MOST_CACHES, -(-COLD_BYTES // one))) - 1))]
    plain = [part.dequantized(kind) for part in caches]
    rows = q.view(case.kv_heads, case.heads // case.kv_heads, width)
    scaled = rows * width**-0.5

    def ours(part: KeyValues) -> Tensor:
        k, v, *scales = part.tensors
        k_scale, v_scale = scales or (None, None)
        return attend(
            q,
            k,
            v,
            Causal(),
            q_tokens=last,
            k_tokens=all_keys,
            backend=backend,
            k_scale=k_scale,
            v_scale=v_scale,
        )

    def gqa(part: KeyValues) -> Tensor:
        return F.scaled_dot_product_attention(q, part.k, part.v, enable_gqa=True)

    def rows_sdpa(part: KeyValues) -> Tensor:
        return F.scaled_dot_product_attention(rows.unsqueeze(0), part.k, part.v).view_as(q)

    def rows_first(part: KeyValues) -> Tensor:
        weights = torch.softmax(scaled @ part.k[0].transpose(1, 2), -1, dtype=torch.float32).to(kind)
        return (weights @ part.v[0]).view_as(q)

    def keys_first(part: KeyValues) -> Tensor:
        scores = (part.k[0] @ scaled.transpose(1, 2)).transpose(1, 2)
        weights = torch.softmax(scores, -1, dtype=torch.float32).to(kind)
        return (weights @ part.v[0]).view_as(q)

    def exact(t: Tensor, scale: Tensor) -> Tensor:
        return dequantize(t, scale, kind)

    def short(t: Tensor, scale: Tensor) -> Tensor:
        return t.to(kind).mul_(scale.to(kind).unsqueeze(-1))

    def dequantized(how: Callable[[Tensor, Tensor], Tensor]) -> Callable[[KeyValues], Tensor]:
        def step(part: KeyValues) -> Tensor:
            k, v, k_scale, v_scale = part.tensors
            return rows_sdpa(KeyValues(how(k, k_scale), how(v, v_scale), part.tokens))

        return step

    def turns(step: Callable[[KeyValues], Tensor], over: list[KeyValues] = plain) -> Side:
        endless = itertools.cycle(over)

        def call() -> Sequence[Tensor]:
            with torch.no_grad():
                return (step(next(endless)),)

        return call

    found = {"headway": turns(ours, caches)}
    for name in case.peers:
        match name:
            case "rows":
                found[name] = turns(quickest([rows_first, keys_first], turns))
            case "dequantised":
                ways = [dequantized(exact), dequantized(short)]
                found[name] = turns(quickest(ways, lambda step: turns(step, caches)), caches)
            case _:
                found[name] = turns({"rows-sdpa": rows_sdpa, "gqa": gqa}[name])
    if case.against is not None:
        found[f"headway {case.against}"] = turns(ours)
    return found, float(one)
