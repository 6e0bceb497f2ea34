"""The memory of a forward and backward beyond its inputs and outputs, measured in a process that does nothing else.

The peak of the process, less what it held just before the step, less the outputs that the step makes: for attention
the output and the gradients of q, k and v; for a training step nothing (its gradients are inside).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import hardware
from headway.attention import attend
from headway.attention.linear_attention import LinearAttentionSpec, linear_attend
from headway.patterns import Pattern
from headway.positions import Rotary
from headway_lab.bench.cases import TRAIN, named
from headway_lab.bench.inputs import OURS, Inputs, make
from headway_lab.bench.peers import PEERS
from headway_lab.bench.transformers_layers import mistral_step
from headway_lab.profiling import fastest

WARM = 256
"""Tokens of a step that is run before, so that libraries are loaded and threads started."""


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak beyond inputs and outputs; bytes of those; seconds of the step."""

    beyond: int
    inputs: int
    outputs: int
    seconds: float


def peak(
    side: str, pattern: Pattern, tokens: int, dtype: str, kind: str = "attention", backend: str = "auto"
) -> Peak:
    """Run a step once in this process, whose peak before it must not have been higher.

    Args:
        side: "headway" (with `backend`), a peer of `peers.PEERS`, "stored" (scores kept n x n); for "linear", "headway"
            is linear attention and "attend" softmax attention; for "mistral", an attention implementation of
            transformers.
    """
    if kind == "mistral":
        case = replace(named("mistral"), pattern=pattern, tokens=tokens)
        run = mistral_step(case, getattr(torch, dtype), side)
        run(min(WARM, tokens))  # the optimizer's state, too, is there before
        return _measured(run, 0)
    for length in (min(WARM, tokens), tokens):
        at = make(replace(named("causal"), pattern=pattern, tokens=length), dtype, TRAIN)
        size = sum(t.nbytes for t in (at.q, at.k, at.v, at.grad))
        found = _measured(_attention(at, side, kind, backend), size)
    return found


def _measured(run: Callable[[], object], size: int) -> Peak:
    before = hardware.peak_rss()
    seconds = fastest(run, 1)
    return Peak(max(0, hardware.peak_rss() - before - size), size, size, seconds)


def _attention(at: Inputs, side: str, kind: str, backend: str) -> Callable[[], object]:
    """The step on these inputs. What a peer prepares is part of it."""
    pattern = at.case.pattern
    if side == "stored":
        return at.run(lambda: _stored(at.q, at.k, at.v))
    if kind == "linear" and side == OURS:
        spec = LinearAttentionSpec()
        rotation = Rotary(pairing="halves").table(torch.arange(at.case.tokens), at.case.width, dtype=at.dtype)
        return at.run(lambda: linear_attend(at.q, at.k, at.v, spec, pattern, rotation=rotation))
    if side in (OURS, "attend"):
        return at.run(lambda: attend(at.q, at.k, at.v, pattern, backend=backend))
    build = PEERS[side].build
    assert build is not None
    return lambda: at.run(build(at))()


def _stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: scores and weights of every pair, kept for the backward. Causal."""
    n = q.shape[2]
    future = torch.ones(n, n, dtype=torch.bool).triu_(1)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return F.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
