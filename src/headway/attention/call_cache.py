"""Calls that repeat: when a model decodes, its layers make one call after the other that differ in numbers only.

What is checked, chosen and laid out follows from shapes, strides, types, tokens and pattern. A call in which all of
these are as they were goes straight to the kernels: when a long context has just passed through the processor's caches,
looking at everything again takes as long as reading megabytes of keys.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from headway.attention.backends.native.backend import Prepared
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.patterns import Pattern
from headway.tokens import Tokens

KEPT = 64
"""Forms remembered at a time."""

_known: dict[Hashable, Prepared] = {}


def form(
    q: Tensor,
    q_tokens: Tokens | None,
    keys: Sequence[KeyValues],
    pattern: Pattern,
    scale: float | None,
    backend: str,
    lse: bool,
) -> Hashable | None:
    """All that decides how a call without scores, masks and dropout is computed; None where more would."""
    if (
        torch.compiler.is_compiling()
        or len(keys) != 1
        or q_tokens is None
        or not isinstance(pattern, Pattern)
    ):
        return None
    part = keys[0]
    tensors, sides = (q, *part.tensors), (_side(q_tokens), _side(part.tokens))
    if None in sides or type(scale) not in (float, type(None)) or not all(map(_plain, tensors)):
        return None
    return pattern, scale, backend, lse, sides, *((t.dtype, t.shape, t.stride()) for t in tensors)


def _plain(t: Tensor) -> bool:
    """A tensor on the CPU without gradient whose rows the kernels read where they are."""
    if type(t) is not Tensor or not t.is_cpu or 0 in t.shape or (t.requires_grad and torch.is_grad_enabled()):
        return False
    return t.stride(-1) == 1 if t.dim() == 4 else t.is_contiguous()


def _side(tokens: Tokens) -> Hashable | None:
    """Tokens that are known without looking at data."""
    if tokens.start is None or not (tokens.document is tokens.is_global is tokens.position is None):
        return None
    return tokens.start, tokens.index.shape


def known(found: Hashable) -> Prepared | None:
    """How calls of this form are computed, if one was made before."""
    return _known.get(found)


def remember(found: Hashable, call: Call) -> Prepared:
    """That the kernels compute calls of this form, and how."""
    if len(_known) >= KEPT:
        _known.clear()
    _known[found] = prepared = Prepared(call)
    return prepared
