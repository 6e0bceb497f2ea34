"""Backend `triton`: a few queries against many keys, with the keys split into chunks whose results are merged (CUDA,
forward only).

One program processes one chunk of the keys for all query heads of a kv head, so that every key is read once, whatever
the group; the pattern is evaluated on the tokens of the slots, and slots that no query sees are not read. The chunks
are disjoint key sets and are merged like any others. (Dao et al. 2023, "Flash-Decoding for long-context inference"; the
merge is `Partial.merge`.) Keys in pages of a cache are read in place.

Legend: B rows, H query heads, G group, T queries, S keys, D per head of q and k, Dv of v.
"""

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor

from headway.attention.backends.base import CUDA, Backend, Capabilities, Status, first_failed
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.partial import Partial, merge_all
from headway.patterns.program import simplified, terms
from headway.tokens import Tokens

QUERIES = 16
"""Most queries of a call: beyond them, reading the keys no longer dominates the cost."""


def limits(call: Call, device: str) -> str | None:
    """Returns why this call cannot run here, or None if it can."""
    count, width = call.q.shape[2:]
    widest = max(width, *(part.v.shape[-1] for part in call.keys))
    return first_failed(
        (not has_triton(), "Triton is not installed here (pip install triton)"),
        (count > QUERIES, f"it takes at most {QUERIES} queries per call, not {count}"),
        (widest > 256, f"it takes head sizes up to 256, not {widest}"),
    )


@cache
def has_triton() -> bool:
    """Returns whether Triton is installed; it is imported only when a kernel runs."""
    return find_spec("triton") is not None


def forward(call: Call, lse: bool = True, chunk: int | None = None) -> Partial:
    """Returns the partial over all key sets; each program takes `chunk` keys, by default as many as fill the device."""
    return merge_all([_partial(call, keys, chunk) for keys in call.keys])


def _partial(call: Call, part: KeyValues, chunk: int | None) -> Partial:
    launch = import_module("headway.attention.backends.triton.kernel").launch
    if not (call.q.numel() and part.count):
        return Partial.empty_like(call.q.new_zeros(*call.q.shape[:-1], part.v.shape[-1]))
    pattern = simplified(call.pattern, call.q_tokens, part.tokens)
    marks, block = Marks.of(call.q_tokens, part.tokens), 64 if call.q.element_size() == 2 else 32
    if chunk is None:
        chunk = _share(part, call.q.device)
    chunk = -(-chunk // block) * block
    out, lse = launch(call.q, part, marks, terms(pattern), call.scale, chunk, block)
    merged = merge_all([Partial(o, s) for o, s in zip(out, lse, strict=True)])
    return Partial(merged.out.to(call.q.dtype), merged.lse)


def _share(part: KeyValues, device: torch.device) -> int:
    """Returns the number of keys of a chunk such that there are about two programs for each multiprocessor of the
    device."""
    processors = (
        torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    )
    batch, kv_heads, _, _ = part.k.shape
    return max(256, -(-part.count * batch * kv_heads // (2 * processors)))


@dataclass(frozen=True, eq=False)
class Marks:
    """The token fields of both sides that the kernel reads: int32 [rows, slots], with a single row if it serves the
    whole batch.

    The tensors of one side have equally many rows. If there are no documents or no global tokens, the index takes their
    place and is not read.
    """

    pointers: tuple[Tensor, ...]
    row_strides: tuple[int, int]
    documents: bool
    globals: bool

    @staticmethod
    def of(q: Tokens, k: Tokens) -> "Marks":
        documents = q.document is not None or k.document is not None
        marked = q.is_global is not None or k.is_global is not None
        sides = [side.expand(side.rows) for side in (q, k)]
        index = [s.index for s in sides]
        document = [s.documents for s in sides] if documents else index
        is_global = [s.globals for s in sides] if marked else index
        steps = [0 if s.rows == 1 else s.count for s in sides]
        pointers = tuple(t.to(torch.int32).contiguous() for t in (*index, *document, *is_global))
        return Marks(pointers, (steps[0], steps[1]), documents, marked)


ABOUT = "a few queries against a long cache, on CUDA"
TRITON = Backend(
    name="triton",
    about=ABOUT,
    forward=forward,
    capabilities=Capabilities(
        devices=CUDA,
        dtypes=(torch.float32, torch.bfloat16, torch.float16),
        gradient=(),
        dropout=False,
        scores=False,
        any_pattern=False,
        stores=True,
    ),
    limits=limits,
    status=lambda: Status(torch.cuda.is_available() and has_triton(), ABOUT),
)
