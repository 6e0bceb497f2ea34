"""Backend `flex`: torch's FlexAttention on the same patterns, with a block mask that is found without looking at pairs.

Slots are sorted into block order (`BlockOrder`), and tiles of 128 x 128 are judged by the extents of their tokens. The
kernel gets the list of tiles in which every pair is visible, the list of those in which some pairs are, and a predicate
on pairs for the latter. On CUDA torch compiles one kernel for each form of call. On other devices the same graph runs
unfused, for tests, forward only. (Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized
Attention Kernels".)

Legend: B rows, H query heads, T queries, S keys, D per head of q and k, Dv of v; b, h, m, n a row, a query head, a
query and a key in block order.
"""

from collections.abc import Callable, Hashable
from functools import lru_cache
from itertools import count
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from headway.attention.backends.base import CUDA, Backend, Capabilities, Status, first_failed
from headway.attention.backends.flex.mods import SCORES, Slots, mask_mod, score_mod
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.attention.plan import BlockOrder
from headway.attention.tile_attention import finite
from headway.partial import Partial, merge_all
from headway.patterns import Pattern, classify, visible
from headway.patterns.program import TokensMemo, simplified
from headway.tokens import Tokens

BLOCK = 128
"""Slots of a tile on each side: the block size of torch's kernels."""


def limits(call: Call, device: str) -> str | None:
    """Returns why this call cannot run on `device`, or None if it can."""
    widths = {call.q.shape[-1], *(part.v.shape[-1] for part in call.keys)}
    odd = ", ".join(type(step).__name__ for step in call.score if not isinstance(step, SCORES))
    double, fits = call.q.dtype == torch.float64, min(widths) >= 16 and max(widths) <= 256
    return first_failed(
        (odd, f"FlexAttention cannot compute score={odd} from a score and the indices of its pair"),
        (device == "cuda" and double, "FlexAttention's CUDA kernel has no float64"),
        (
            device == "cuda" and not fits,
            f"FlexAttention's CUDA kernel takes head sizes from 16 to 256, not {sorted(widths)}",
        ),
    )


def forward(call: Call, lse: bool = True) -> Partial:
    """Returns the partial over all key sets, differentiable on CUDA. Without `lse`, the lse of a single key set is
    NaN."""
    return merge_all([_one(call, part, lse or len(call.keys) > 1) for part in call.keys])


def _one(call: Call, part: KeyValues, with_lse: bool) -> Partial:
    if not (call.q.numel() and part.k.numel()):
        return Partial.empty_like(call.q.new_zeros(*call.q.shape[:-1], part.v.shape[-1]))
    pattern = simplified(call.pattern, call.q_tokens, part.tokens)
    at_q, at_k, mask = _ordered(pattern, call.q_tokens, part.tokens, call.needs_grad)
    q, (k, v) = call.clean_queries(), _clean_keys(pattern, call, part)
    q, k, v = at_q.take(q), at_k.take(k), at_k.take(v)
    mod = score_mod(call, q, Slots.of(at_q.tokens), Slots.of(at_k.tokens)) if call.score else None
    kernel = _compiled(_form(call, part, pattern, mask, with_lse), call.q.device.type == "cuda")
    out, lse = kernel(q, k, v, mod, mask, call.scale, with_lse)
    if lse is None:
        return Partial(at_q.give_back(out), out.new_full(out.shape[:-1], float("nan")))
    return Partial(at_q.give_back(out), at_q.give_back(lse.unsqueeze(-1)).squeeze(-1))


def block_mask(pattern: Pattern, q: Tokens, k: Tokens, gradient: bool = True) -> BlockMask:
    """Returns FlexAttention's mask for tokens in block order, [B|1, 1, T, S], as lists of key tiles for each query
    tile.

    The work grows with the number of tiles, T S / 128^2. `gradient` adds the lists of query tiles for each key tile,
    which the backward reads.
    """
    possible, certain = classify(pattern, q, k, BLOCK, BLOCK)
    # A short last tile is never certain: only the predicate keeps out the slots it lacks.
    whole_q, whole_k = (
        torch.arange(BLOCK, t.count + BLOCK, BLOCK, device=t.device) <= t.count for t in (q, k)
    )
    certain = certain & whole_q.unsqueeze(1) & whole_k
    partial, full = _lists(possible & ~certain), _lists(certain)
    mask: BlockMask = BlockMask.from_kv_blocks(
        *partial,
        *full,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod(pattern, Slots.of(q), Slots.of(k)),
        seq_lengths=(q.count, k.count),
        compute_q_blocks=gradient,
    )
    return mask


def _lists(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """Returns FlexAttention's lists of the True tiles [B, rows, columns]: how many each row has, int32 [B, 1, rows],
    and the columns of each row, those of True tiles first, int32 [B, 1, rows, columns].

    A row 0 1 0 1 has count 2 and columns 1 3 0 2."""
    order = tiles.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(-1, dtype=torch.int32).unsqueeze(1), order.to(torch.int32).unsqueeze(1)


def _order(
    pattern: Pattern, q: Tokens, k: Tokens, gradient: bool
) -> tuple[BlockOrder, BlockOrder, BlockMask]:
    """Returns queries and keys in block order, and the block mask of these slots."""
    at_q, at_k = (BlockOrder(tokens, pattern.dilation) for tokens in (q, k))
    return at_q, at_k, block_mask(pattern, at_q.tokens, at_k.tokens, gradient)


_ordered = TokensMemo(_order)


def _clean_keys(pattern: Pattern, call: Call, part: KeyValues) -> tuple[Tensor, Tensor]:
    """Returns k and v, with the slots that no query sees set to 0 if any slot holds NaN or infinity."""
    if finite(part.k.detach()) and finite(part.v.detach()):
        return part.k, part.v
    q, k = call.q_tokens, part.tokens
    tiles = (q.slice(begin, min(begin + BLOCK, q.count)) for begin in range(0, q.count, BLOCK))
    unseen = ~torch.stack([visible(pattern, tile, k).any(-2) for tile in tiles]).any(0).unsqueeze(-1)
    return part.k.masked_fill(unseen, 0.0), part.v.masked_fill(unseen, 0.0)


# -- compilation ---------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mod: Any, mask: BlockMask, scale: float, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    gqa = q.shape[1] != k.shape[1]
    options: dict[str, Any] = {"score_mod": mod, "block_mask": mask, "scale": scale, "enable_gqa": gqa}
    if not with_lse:
        return flex_attention(q, k, v, **options), None
    out, aux = flex_attention(q, k, v, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _form(call: Call, part: KeyValues, pattern: Pattern, mask: BlockMask, with_lse: bool) -> Hashable:
    """Returns the cache key of a compiled kernel. T and S are not part of it: torch guards them (fixed at first,
    symbolic once they vary)."""
    sides = tuple(Slots.form(t) for t in (call.q_tokens, part.tokens))
    steps = tuple(
        (type(s), *(v.shape if isinstance(v, Tensor) else v for v in vars(s).values())) for s in call.score
    )
    shape = (*call.q.shape[:2], part.k.shape[1], call.q.shape[-1], part.v.shape[-1], mask.shape[0])
    return pattern, sides, steps, shape, call.q.dtype, call.scale, call.needs_grad, with_lse


_numbers = count()


@lru_cache(maxsize=256)
def _compiled(form: Hashable, fused: bool) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Returns the kernel for calls of one form, compiled from a code object of its own.

    torch counts recompilations for each code object and, past its limit, silently runs the unfused T x S form. Hence
    one code object for each form, and `fullgraph`, which turns that fallback into an error. torch also records by the
    code's name which lengths vary: hence one name for each form.
    """
    code = _attend.__code__.replace(co_name=f"flex_{next(_numbers)}")
    copy = FunctionType(code, _attend.__globals__)
    return torch.compile(copy, fullgraph=True, backend="inductor" if fused else "eager")


ABOUT = "sparse patterns on CUDA through torch's FlexAttention"
FLEX = Backend(
    name="flex",
    about=ABOUT,
    forward=forward,
    capabilities=Capabilities(dropout=False, gradient=CUDA, any_pattern=False),
    limits=limits,
    status=lambda: Status(torch.cuda.is_available(), ABOUT),
)
