"""What a forward and backward holds beyond its inputs and outputs, measured in a process that does nothing else.

The most that the process ever held, less what it held just before the step, less the outputs that the step makes:
for attention the output and the gradients of q, k and v; for a training step nothing (its gradients are inside).
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
from headway_lab.bench.cases import TRAIN, Case, named
from headway_lab.bench.inputs import make
from headway_lab.bench.layers import mistral_step
from headway_lab.bench.peers import PEERS

WARM = 256
"""Tokens of a step that is run before, so that libraries are loaded and threads started."""


@dataclass(frozen=True)
class Ask:
    """Which step: `side` is "headway" (with `backend`), a peer of `peers.PEERS`, "stored" (scores kept n x n); for
    "linear", "headway" is linear attention and "attend" is the other; for "mistral", an attention implementation of
    transformers."""

    side: str
    pattern: str
    tokens: int
    dtype: str
    kind: str = "attention"
    backend: str = "auto"


@dataclass(frozen=True)
class Held:
    """What it held, in bytes, beyond inputs and outputs; those; and how long it took."""

    beyond: int
    inputs: int
    outputs: int
    seconds: float


def step(ask: Ask) -> Held:
    """Run the step once in this process, which must not have held more before."""
    if ask.kind == "mistral":
        return _training(ask)
    _once(ask, min(WARM, ask.tokens))
    return _once(ask, ask.tokens)


def _once(ask: Ask, tokens: int) -> Held:
    case = replace(named("causal"), pattern=parse(ask.pattern), tokens=tokens)
    run, inputs, outputs = _attention(ask, case)
    before = hardware.peak_rss()
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    return Held(max(0, hardware.peak_rss() - before - outputs), inputs, outputs, seconds)


def _attention(ask: Ask, case: Case) -> tuple[Callable[[], object], int, int]:
    """(the step, bytes of its inputs, bytes of its outputs). What a peer prepares counts as held by it."""
    at = make(case, ask.dtype, TRAIN)
    inputs = sum(t.nbytes for t in (at.q, at.k, at.v, at.grad))
    outputs = inputs
    if ask.side == "stored":
        return at.run(lambda: _stored(at.q, at.k, at.v)), inputs, outputs
    if ask.kind == "linear" and ask.side == "headway":
        rotation = Rotary(pairing="halves").table(torch.arange(case.tokens), case.width, dtype=at.dtype)
        return (
            at.run(
                lambda: linear_attend(
                    at.q, at.k, at.v, LinearAttentionSpec(), case.pattern, rotation=rotation
                )
            ),
            inputs,
            outputs,
        )
    if ask.side in ("headway", "attend"):
        return (
            at.run(lambda: attend(at.q, at.k, at.v, case.pattern, backend=ask.backend)),
            inputs,
            outputs,
        )
    return (lambda: at.run(PEERS[ask.side].build(at))()), inputs, outputs


def _stored(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The textbook: scores and weights of every pair, kept for the backward. Causal."""
    n = q.shape[2]
    future = torch.ones(n, n, dtype=torch.bool).triu_(1)
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return F.softmax(scores.masked_fill(future, float("-inf")), -1) @ v


def _training(ask: Ask) -> Held:
    case = replace(named("mistral"), pattern=parse(ask.pattern), tokens=ask.tokens)
    run = mistral_step(case, getattr(torch, ask.dtype), ask.side)
    run(min(WARM, ask.tokens))  # the optimizer's state, too, is there before
    before = hardware.peak_rss()
    begin = time.perf_counter()
    run()
    return Held(hardware.peak_rss() - before, 0, 0, time.perf_counter() - begin)
