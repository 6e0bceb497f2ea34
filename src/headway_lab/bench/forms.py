"""The forms that `headway bench growth` measures: the same attention computed in several ways, each step in a process
that is killed at a memory limit.

Legend: H heads, N tokens, D per head.
"""

import ctypes
import gc
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from headway import hardware
from headway.attention import attend
from headway.attention.linear_attention import LinearAttentionSpec, linear_attend
from headway.patterns import Causal, Pattern, visible
from headway.positions import Rotary
from headway_lab.bench.cases import FLOAT32, FORWARD, Case
from headway_lab.bench.inputs import Call, Inputs, make
from headway_lab.bench.peers import additive, flex, sdpa
from headway_lab.bench.subprocess_runner import forget_peak
from headway_lab.profiling import fastest

HEADS, WIDTH = 4, 64
ENOUGH = 1.0
"""Seconds of timed steps after which no further one is timed."""


@dataclass(frozen=True)
class Form:
    """One way to compute a step.

    build returns the call for the inputs; what this prepares (a compilation) is neither in the time nor in the memory
    full      whether every query sees all keys before it, instead of a window
    pairs     whether every pair of tokens is computed, allowed or not
    prepares  what it prepares for seconds and with more memory than the step holds; usually ""
    """

    build: Callable[[Inputs], Call]
    full: bool = False
    pairs: bool = False
    prepares: str = ""


def by_backend(name: str, full: bool = False, pairs: bool = False) -> Form:
    """Returns the form that calls `attend` on this backend."""
    return Form(lambda at: lambda: attend(at.q, at.k, at.v, at.case.pattern, backend=name), full, pairs)


def stored(at: Inputs) -> Call:
    """Returns the textbook form: scores and weights of every pair, kept for the backward."""

    def call() -> Tensor:
        count, width = at.q.shape[2:]
        future = torch.ones(count, count, dtype=torch.bool).triu_(1)
        scores = (at.q @ at.k.transpose(2, 3)) * width**-0.5
        return F.softmax(scores.masked_fill(future, float("-inf")), -1) @ at.v

    return call


def masked(at: Inputs) -> Call:
    """Returns torch's fused kernel with a dense mask [N, N], which is built in the step."""

    def call() -> Tensor:
        mask = additive(visible(at.case.pattern, at.tokens, at.tokens), at.q.dtype)
        return F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=mask)

    return call


def linear(at: Inputs) -> Call:
    """Returns linear attention, with rotary positions in the numerator."""
    rotation = Rotary(pairing="halves").rotation(at.tokens.index[0], at.case.width)
    spec, pattern = LinearAttentionSpec(), at.case.pattern
    return lambda: linear_attend(at.q, at.k, at.v, spec, pattern, rotation=rotation)


FORMS: Mapping[str, Form] = {
    "full": Form(stored, full=True, pairs=True),
    "sdpa": Form(sdpa, full=True, pairs=True),
    "sdpa + mask": Form(masked, pairs=True),
    "causal": by_backend("native", full=True, pairs=True),
    "linear": Form(linear, full=True),
    "loop": by_backend("diagonal"),
    "chunks": by_backend("chunks"),
    "banded": by_backend("banded"),
    "native": by_backend("native"),
    "flex": Form(flex, prepares="its mask of blocks, made from all pairs of tokens"),
}
"""full: the scores of all pairs, kept in memory. loop and chunks: Beltagy et al. 2020, section 3.2. causal: the kernels
of "native" without a window."""

WINDOWS = tuple(name for name, form in FORMS.items() if not (form.full or form.pairs))
"""The forms that compute only the pairs of a window."""

CLAIMED = ("native", "chunks", "loop")
"""From fast to slow: a kernel, batched products of chunks, a product per diagonal."""


@dataclass(frozen=True)
class Step:
    """Peak bytes of the inputs and the step, and seconds of the fastest step."""

    held: int
    seconds: float


def step(name: str, window: Pattern, tokens: int, direction: str = FORWARD) -> Step:
    """Measures one form at one length, in this process."""
    form = FORMS[name]
    case = Case(
        name=name, pattern=Causal() if form.full else window, tokens=tokens, heads=HEADS, kv_heads=HEADS
    )
    at = make(case, FLOAT32, direction)
    call = at.run(form.build(at))
    _give_back()
    bytes_before = forget_peak()
    first = fastest(call, 1)
    held = hardware.peak_rss() - bytes_before + sum(t.nbytes for t in (at.q, at.k, at.v))
    repeats = min(4, int(ENOUGH / first))
    return Step(held, min(first, fastest(call, repeats)) if repeats else first)


def _give_back() -> None:
    """Returns free memory to the system, so that it does not count as held."""
    gc.collect()
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)
