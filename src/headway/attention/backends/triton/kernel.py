"""The Triton kernel of the backend: one chunk of the keys for all query heads of a kv head.

Imported only when it runs, since it needs Triton. If TRITON_INTERPRET=1 is set before the import it runs on a CPU, in
Triton's interpreter, for tests.

Legend: B rows, H query heads, K kv heads, G group, T queries, S keys, D per head of q and k, Dv of v, C chunks.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.attention.backends.triton.backend import Marks
from headway.attention.key_values import KeyValues
from headway.patterns.primitives import Kind
from headway.patterns.program import Terms

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs, which multiplies the bits of bfloat16 as integers: products are then in
float32."""

_FULL = tl.constexpr(int(Kind.FULL))
_CAUSAL = tl.constexpr(int(Kind.CAUSAL))
_WINDOW = tl.constexpr(int(Kind.WINDOW))
_SINK = tl.constexpr(int(Kind.SINK))
_CHUNK = tl.constexpr(int(Kind.CHUNK))
_GLOBAL_KEYS = tl.constexpr(int(Kind.GLOBAL_KEYS))


@triton.jit
def _leaf(kind: tl.constexpr, first: tl.constexpr, last: tl.constexpr, step: tl.constexpr, qi, ki, qg, kg):
    """Returns which pairs one leaf of the pattern allows, [R, N]."""
    seen = (qi >= 0) & (ki >= 0)
    if kind == _CAUSAL:
        seen = seen & (ki <= qi)
    elif kind == _WINDOW:
        away = ki - qi
        seen = seen & (away >= first) & (away <= last) & (away % step == 0)
    elif kind == _SINK:
        seen = seen & (ki < last)
    elif kind == _CHUNK:
        seen = seen & (ki // last == qi // last)
    elif kind == _GLOBAL_KEYS:
        seen = seen & (kg != 0)
    elif kind != _FULL:
        seen = seen & (qg != 0)
    return seen


@triton.jit
def _allowed(TERMS: tl.constexpr, qi, ki, qg, kg):
    """Returns which pairs the pattern allows, [R, N]: those of any term, where a term is a conjunction of leaves. qi
    [R, 1], ki [1, N].

    TERMS has five numbers for each leaf, of which the fifth says whether it is the last of its term.
    """
    seen = (qi < -1) & (ki < -1)
    term = (qi >= 0) & (ki >= 0)
    for i in tl.static_range(0, len(TERMS), 5):
        term = term & _leaf(TERMS[i], TERMS[i + 1], TERMS[i + 2], TERMS[i + 3], qi, ki, qg, kg)
        if TERMS[i + 4]:
            seen = seen | term
            term = (qi >= 0) & (ki >= 0)
    return seen


@triton.jit
def _chunk(
    q,
    k,
    v,
    out,
    lse,
    q_index,
    k_index,
    q_document,
    k_document,
    q_global,
    k_global,
    order,
    scale,
    T,
    S,
    KV,
    G,
    CHUNK,
    q_b,
    q_h,
    q_t,
    q_d,
    k_b,
    k_h,
    k_s,
    k_d,
    v_b,
    v_h,
    v_s,
    v_d,
    q_row,
    k_row,
    TERMS: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    GLOBALS: tl.constexpr,
    STORED: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_V: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Writes out [C, B, H, T, Dv] and lse [C, B, H, T], float32: the partial over keys CHUNK c .. CHUNK (c + 1) - 1.

    A program takes ROWS of the G T query rows of one kv head. Key slots that none of them sees are not loaded. If keys
    are STORED, the key of token n is in slot order[n].
    """
    b = tl.program_id(0) // KV
    kv = tl.program_id(0) % KV
    c = tl.program_id(1)
    B = tl.num_programs(0) // KV
    row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    valid = row < G * T
    t = row % T
    h = kv * G + row // T
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, WIDTH_V)
    qi = tl.load(q_index + b * q_row + t, mask=valid, other=-1)
    qd = qi
    qg = qi * 0
    if DOCUMENTS:
        qd = tl.load(q_document + b * q_row + t, mask=valid, other=0)
    if GLOBALS:
        qg = tl.load(q_global + b * q_row + t, mask=valid, other=0)
    at = q + b.to(tl.int64) * q_b + h[:, None] * q_h + t[:, None] * q_t + d[None, :] * q_d
    x = tl.load(at, mask=(qi >= 0)[:, None] & (d < D)[None, :], other=0.0)
    if WIDEN:
        x = x.to(tl.float32)
    k += b.to(tl.int64) * k_b + kv * k_h
    v += b.to(tl.int64) * v_b + kv * v_h

    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, WIDTH_V], tl.float32)
    for begin in range(c * CHUNK, min(c * CHUNK + CHUNK, S), KEYS):
        n = begin + tl.arange(0, KEYS)
        inside = n < S
        ki = tl.load(k_index + b * k_row + n, mask=inside, other=-1)
        kg = ki * 0
        if GLOBALS:
            kg = tl.load(k_global + b * k_row + n, mask=inside, other=0)
        seen = _allowed(TERMS, qi[:, None], ki[None, :], qg[:, None], kg[None, :])
        if DOCUMENTS:
            kd = tl.load(k_document + b * k_row + n, mask=inside, other=0)
            seen = seen & (qd[:, None] == kd[None, :])
        some = tl.max(seen.to(tl.int32), 0)
        if tl.max(some, 0) > 0:
            needed = some > 0
            slot = n.to(tl.int64)
            if STORED:
                slot = tl.load(order + n, mask=inside, other=0).to(tl.int64)
            y = tl.load(
                k + slot[None, :] * k_s + d[:, None] * k_d, mask=needed[None, :] & (d < D)[:, None], other=0.0
            )
            if WIDEN:
                y = y.to(tl.float32)
            s = tl.where(seen, tl.dot(x, y, input_precision="ieee") * scale, float("-inf"))
            new = tl.maximum(top, tl.max(s, 1))
            safe = tl.where(new == float("-inf"), 0.0, new)
            p = tl.exp(s - safe[:, None])
            shrink = tl.exp(top - safe)
            z = tl.load(
                v + slot[:, None] * v_s + e[None, :] * v_d,
                mask=needed[:, None] & (e < DV)[None, :],
                other=0.0,
            )
            total = total * shrink + tl.sum(p, 1)
            p = p.to(z.dtype)
            if WIDEN:
                p = p.to(tl.float32)
                z = z.to(tl.float32)
            sums = sums * shrink[:, None] + tl.dot(p, z, input_precision="ieee")
            top = new

    place = (c * B + b).to(tl.int64) * KV * G * T + h * T + t
    nothing = total == 0.0
    mean = sums / tl.where(nothing, 1.0, total)[:, None]
    tl.store(out + place[:, None] * DV + e[None, :], mean, mask=valid[:, None] & (e < DV)[None, :])
    tl.store(
        lse + place,
        tl.where(nothing, float("-inf"), top + tl.log(tl.where(nothing, 1.0, total))),
        mask=valid,
    )


def launch(
    q: Tensor, part: KeyValues, marks: Marks, terms: Terms, scale: float, chunk: int, keys: int
) -> tuple[Tensor, Tensor]:
    """Runs the kernel on chunks of `chunk` keys, `keys` at a time; returns (out [C, B, H, T, Dv], lse [C, B, H, T]),
    float32."""
    batch, heads, count, width = q.shape
    k, v, order = part.k, part.v, part.slots
    kv_heads, slots, value = k.shape[1], part.count, v.shape[-1]
    rows = heads // kv_heads * count
    tile = min(64, max(16, triton.next_power_of_2(rows)))
    chunks = triton.cdiv(slots, chunk)
    out = torch.empty(chunks, batch, heads, count, value, dtype=torch.float32, device=q.device)
    lse = torch.empty(chunks, batch, heads, count, dtype=torch.float32, device=q.device)
    _chunk[(batch * kv_heads, chunks, triton.cdiv(rows, tile))](
        q,
        k,
        v,
        out,
        lse,
        *marks.pointers,
        marks.pointers[0] if order is None else order,
        scale,
        count,
        slots,
        kv_heads,
        heads // kv_heads,
        chunk,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *marks.row_strides,
        TERMS=tuple(n for term in terms for leaf in term for n in (*map(int, leaf), int(leaf is term[-1]))),
        DOCUMENTS=marks.documents,
        GLOBALS=marks.globals,
        STORED=order is not None,
        D=width,
        DV=value,
        WIDTH=max(16, triton.next_power_of_2(width)),
        WIDTH_V=max(16, triton.next_power_of_2(value)),
        ROWS=tile,
        KEYS=keys,
        WIDEN=INTERPRETED and q.dtype == torch.bfloat16,
    )
    return out, lse
