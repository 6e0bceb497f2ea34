"""A cache of repeated calls: when a model decodes, its layers make one call after the other that differ only in
numbers.

Validation, choice of the backend and memory layout follow from shapes, strides, dtypes, tokens and pattern. If all of
these are unchanged, a call goes straight to the kernels: after a long context has passed through the processor's
caches, repeating the checks would take as long as reading megabytes of keys.
"""

from collections.abc import Hashable, Sequence
from weakref import ref

import torch
from torch import Tensor

from headway.attention.backends.base import Backend, Repeated
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.patterns import Pattern
from headway.tokens import Tokens

KEPT = 64
"""Number of calls that are remembered at a time."""

FEW = 4
"""Most queries for which tokens without a static key are identified by their object: those of a decoding step."""

_known: dict[Hashable, Repeated] = {}


def key(
    q: Tensor,
    q_tokens: Tokens,
    keys: Sequence[KeyValues],
    pattern: Pattern,
    scale: float | None,
    backend: str,
    lse: bool,
) -> Hashable | None:
    """Returns a key of everything that decides how a call without scores, mask and dropout is computed; None if more
    than that decides."""
    if torch.compiler.is_compiling() or len(keys) != 1 or not isinstance(pattern, Pattern):
        return None
    part = keys[0]
    if part.slots is not None:
        return None
    tensors = (q, *part.tensors)
    if type(scale) not in (float, type(None)) or not all(map(_plain, tensors)):
        return None
    few = q.dim() == 4 and q.shape[2] <= FEW
    sides = _side(q_tokens, few), _side(part.tokens, few)
    if None in sides:
        return None
    return pattern, scale, backend, lse, sides, *((t.dtype, t.shape, t.stride()) for t in tensors)


def _plain(t: Tensor) -> bool:
    """Returns whether t is a CPU tensor without gradient whose rows the kernels can read in place."""
    if type(t) is not Tensor or not t.is_cpu or 0 in t.shape or (t.requires_grad and torch.is_grad_enabled()):
        return False
    return t.stride(-1) == 1 if t.dim() == 4 else t.is_contiguous()


def _side(tokens: Tokens, few: bool) -> Hashable | None:
    """Returns a key that identifies the tokens: their start and count or, for few queries, the object and its
    versions; None if neither does."""
    rows = tokens.index.shape[0], tokens.position is None or tokens.position.shape[0]
    if tokens.static_key is not None:
        return tokens.static_key, rows
    versions = tokens.versions if few else None
    return None if versions is None else (ref(tokens), versions, rows)


def known(call_key: Hashable | None) -> Repeated | None:
    """Returns the function that repeats calls of this key, or None if none is remembered."""
    return None if call_key is None else _known.get(call_key)


def remember(call_key: Hashable, backend: Backend, call: Call, lse: bool) -> Repeated | None:
    """Remembers how the backend repeats calls of this key, and returns that function; None if the backend cannot
    repeat them."""
    if backend.repeat is None:
        return None
    as_is = backend.capabilities.int8
    repeated = backend.repeat(call if as_is else call.dequantized(), lse)
    if repeated is None:
        return None
    if len(_known) >= KEPT:
        _known.clear()
    _known[call_key] = repeated if as_is else lambda q, keys: repeated(q, keys.dequantized(q.dtype))
    return _known[call_key]


def forget() -> None:
    """Forgets every call, because the choice of backend has changed."""
    _known.clear()
