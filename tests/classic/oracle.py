"""Attention by four loops in float64: its definition, one number at a time."""

import math

import torch
from torch import Tensor


def loops(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Maps q [H, T, D], k, v [K, S, D], allowed bool [T, S], bias [H, T, S] to out [H, T, D], 0 if nothing is seen."""
    out = torch.zeros(q.shape[0], q.shape[1], v.shape[2], dtype=torch.float64)
    for h in range(q.shape[0]):
        group = h // (q.shape[0] // k.shape[0])
        for t in range(q.shape[1]):
            scores = {}
            for s in range(k.shape[1]):
                if allowed[t, s]:
                    dot = sum(float(q[h, t, d]) * float(k[group, s, d]) for d in range(q.shape[2]))
                    scores[s] = dot / math.sqrt(q.shape[2]) + (0.0 if bias is None else float(bias[h, t, s]))
            if scores:
                top = max(scores.values())
                total = sum(math.exp(x - top) for x in scores.values())
                for s, x in scores.items():
                    out[h, t] += math.exp(x - top) / total * v[group, s].double()
    return out


def turned(x: Tensor, start: int) -> Tensor:
    """Rotates x [H, T, D] in adjacent pairs at positions start, start + 1, ..., coordinate by coordinate."""
    out = torch.empty_like(x)
    for t in range(x.shape[1]):
        for i in range(x.shape[2] // 2):
            angle = (start + t) * 10000.0 ** (-2 * i / x.shape[2])
            a, b = x[:, t, 2 * i], x[:, t, 2 * i + 1]
            out[:, t, 2 * i] = a * math.cos(angle) - b * math.sin(angle)
            out[:, t, 2 * i + 1] = b * math.cos(angle) + a * math.sin(angle)
    return out
