"""The peers of headway's attention, each built from the same inputs and none of them helped or hindered.

What can be prepared (masks in the dtype that the kernel wants, block masks, compilation) is prepared outside of the
time. Where torch offers several formulations, the quickest on this machine is taken.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from headway.patterns import Causal, Window, visible
from headway_lab.bench.chunks import forms
from headway_lab.bench.inputs import Inputs

Call = Callable[[], Tensor]
T = TypeVar("T")
MASK_TOKENS = 8192
"""Tokens up to which a dense mask is built: 256 MiB of float32 there."""


class Unfit(Exception):
    """This peer does not do this case; says why."""


@dataclass(frozen=True)
class Peer:
    """One way to the same result.

    says     what it is
    build    its call for these inputs; raises Unfit
    floors   useful work by dtype, as a share of the limit, that it must reach for a row to count: about half of what
             it reached on an idle two-core Zen 5. A peer below its floor was held up by something else.
    backward whether it has one on CPUs
    """

    says: str
    build: Callable[[Inputs], Call]
    floors: Mapping[str, float] = field(default_factory=dict)
    backward: bool = True


def quickest(calls: Sequence[T], run: Callable[[T], Callable[[], object]]) -> T:
    """The call that is quickest when run as `run` says, of two tries each after a warm-up."""
    best: tuple[float, int] = (float("inf"), 0)
    for number, call in enumerate(calls):
        whole = run(call)
        whole()
        for _ in range(2):
            begin = time.perf_counter()
            whole()
            best = min(best, (time.perf_counter() - begin, number))
    return calls[best[1]]


def sdpa(at: Inputs) -> Call:
    """torch's fused kernel, `is_causal`."""
    if at.case.pattern != Causal() or not at.plain:
        raise Unfit("it knows no other pattern than causal without a mask")
    return lambda: F.scaled_dot_product_attention(at.q, at.k, at.v, is_causal=True, enable_gqa=at.grouped)


def mask(at: Inputs) -> Call:
    """torch's fused kernel with a dense mask, additive and in the inputs' dtype as the kernel wants it."""
    if at.case.tokens > MASK_TOKENS:
        raise Unfit(f"a mask of {at.case.tokens} x {at.case.tokens} is not built (up to {MASK_TOKENS})")
    if not at.plain and at.case.layout != "global":
        raise Unfit("rows that see nothing are not defined there")
    seen = visible(at.case.pattern, at.tokens, at.tokens)
    bias = torch.zeros(seen.shape, dtype=at.dtype).masked_fill_(~seen, float("-inf"))
    del seen
    return lambda: F.scaled_dot_product_attention(at.q, at.k, at.v, attn_mask=bias, enable_gqa=at.grouped)


def chunks(at: Inputs) -> Call:
    """Overlapping chunks through the fused kernel: the best of several sizes and formulations."""
    pattern = at.case.pattern
    if not isinstance(pattern, Window) or pattern.step > 1 or not at.plain:
        raise Unfit("chunks are for plain windows")
    return quickest(forms(at.q, at.k, at.v, pattern), at.run)


def flex(at: Inputs) -> Call:
    """Compiled FlexAttention; its block mask and its compilation are not in the time."""
    pattern, n = at.case.pattern, at.case.tokens
    if not isinstance(pattern, Window) or not at.plain:
        raise Unfit("written for plain windows only")
    before, after, step = pattern.before * pattern.step, pattern.after * pattern.step, pattern.step

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        near = (k - q >= -before) & (k - q <= after)
        return near & ((k - q) % step == 0) if step > 1 else near

    torch._dynamo.reset()
    logging.getLogger("torch._inductor").setLevel(logging.ERROR)
    blocks = create_block_mask(seen, None, None, n, n, device="cpu")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Tensor:
        out = compiled(at.q, at.k, at.v, block_mask=blocks, enable_gqa=at.grouped)
        assert isinstance(out, Tensor)
        return out

    try:
        with torch.no_grad():
            call()
    except Exception as error:  # whatever a compiler may say
        raise Unfit(f"it does not compile here: {str(error).splitlines()[0]}") from error
    return call


PEERS: dict[str, Peer] = {
    "sdpa": Peer("torch SDPA, is_causal", sdpa, {"float32": 0.16, "bfloat16": 0.08}),
    "mask": Peer("torch SDPA with a dense mask", mask, {"float32": 0.008, "bfloat16": 0.004}),
    "chunks": Peer("overlapping chunks + torch SDPA", chunks, {"float32": 0.04, "bfloat16": 0.03}),
    "flex": Peer("compiled FlexAttention", flex, {"float32": 0.10, "bfloat16": 0.03}, backward=False),
}

OTHERS: dict[str, tuple[str, Mapping[str, float]]] = {
    "rows": (
        "two matrix products, the query heads of a kv head stacked as rows",
        {"float32": 0.06, "bfloat16": 0.06},
    ),
    "rows-sdpa": ("the same rows through torch SDPA", {"float32": 0.02, "bfloat16": 0.02}),
    "dequantised": (
        "the int8 cache made numbers again in every call, then rows-sdpa",
        {"bfloat16": 0.03},
    ),
    "gqa": ("torch SDPA, enable_gqa", {"float32": 0.005, "bfloat16": 0.005}),
    "transformers": ("the layer or model of transformers", {"float32": 0.01, "bfloat16": 0.005}),
}
"""Peers of other kinds of case, built by `problems`: (what it is, floors)."""


def floor(peer: str, dtype: str) -> float:
    """The share of the limit that `peer` must reach; 0 where none is known."""
    floors = PEERS[peer].floors if peer in PEERS else OTHERS[peer][1] if peer in OTHERS else {}
    return floors.get(dtype, 0.0)
