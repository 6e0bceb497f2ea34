"""The memory of a forward and backward beyond its inputs and outputs, measured in a process that does nothing else.

The peak of the process, less what it held just before the step, less the outputs that the step makes: for attention
the output and the gradients of q, k and v; for a training step nothing (its gradients are inside).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import hardware
from headway.attention import attend
from headway.attention.linear_attention import LinearAttentionSpec, linear_attend
from headway.patterns import parse
from headway.positions import Rotary
from headway_lab.bench.cases import TRAIN, named
from headway_lab.bench.inputs import OURS, Inputs, make
from headway_lab.bench.peers import PEERS
from headway_lab.bench.transformers_layers import mistral_step

WARM = 256
"""Tokens of a step that is run before, so that libraries are loaded and threads started."""


@dataclass(frozen=True)
class Step:
    """Which step: `side` is "headway" (with `backend`), a peer of `peers.PEERS`, "stored" (scores kept n x n); for
    "linear", "headway" is linear attention and "attend" softmax attention; for "mistral", an attention
    implementation of transformers."""

    side: str
    pattern: str
    tokens: int
    dtype: str
    kind: str = "attention"
    backend: str = "auto"


@dataclass(frozen=True)
class Peak:
    """Bytes at the peak beyond inputs and outputs; bytes of those; seconds of the step."""

    beyond: int
    inputs: int
    outputs: int
    seconds: float


def peak(step: Step) -> Peak:
    """Run the step once in this process, whose peak before it must not have been higher."""
    if step.kind == "mistral":
        case = replace(named("mistral"), pattern=parse(step.pattern), tokens=step.tokens)
        run = mistral_step(case, getattr(torch, step.dtype), step.side)
        run(min(WARM, step.tokens))  # the optimizer's state, too, is there before
        return _measured(run, 0, 0)
    for tokens in (min(WARM, step.tokens), step.tokens):
        case = replace(named("causal"), pattern=parse(step.pattern), tokens=tokens)
        at = make(case, step.dtype, TRAIN)
        size = sum(t.nbytes for t in (at.q, at.k, at.v, at.grad))
        found = _measured(_attention(step, at), size, size)
    return found


def _measured(run: Callable[[], object], inputs: int, outputs: int) -> Peak:
    before = hardware.peak_rss()
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return Peak(max(0, hardware.peak_rss() - before - outputs), inputs, outputs, seconds)


def _attention(step: Step, at: Inputs) -> Callable[[], object]:
    """The step on these inputs. What a peer prepares is part of it."""
    pattern = at.case.pattern
    if step.side == "stored":
        return at.run(lambda: _stored(at.q, at.k, at.v))
    if step.kind == "linear" and step.side == OURS:
        spec = LinearAttentionSpec()
        rotation = Rotary(pairing="halves").table(torch.arange(at.case.tokens), at.case.width, dtype=at.dtype)
        return at.run(lambda: linear_attend(at.q, at.k, at.v, spec, pattern, rotation=rotation))
    if step.side in (OURS, "attend"):
        return at.run(lambda: attend(at.q, at.k, at.v, pattern, backend=step.backend))
    build = PEERS[step.side].build
    assert build is not None
    return lambda: at.run(build(at))()


def _stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: scores and weights of every pair, kept for the backward. Causal."""
    n = q.shape[2]
    future = torch.ones(n, n, dtype=torch.bool).triu_(1)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return F.softmax(scores.masked_fill(future, float("-inf")), -1) @ v
