"""Patterns: small predicates on (query, key) pairs, which compose with & and |."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass
from functools import reduce
from math import lcm
from typing import Any, ClassVar

import torch
from torch import Tensor

from headway.errors import PatternError
from headway.patterns.primitives import Primitive
from headway.patterns.tiles import Extent
from headway.tokens import Tokens

Bounds = tuple[int | None, int | None]
"""(before, after): number of positions to either side of a query; None is unbounded."""


@dataclass(frozen=True)
class Retention:
    """Which past keys a later query may still see, after the query at index t has been answered.

    These are the keys with index > t - reach (all of them if reach is None), those with index < sinks, and with
    `globals` the global ones: the `reach` most recent keys and the pinned ones. With a `chunk`, recent keys count only
    if they lie in the same chunk of that many tokens as the next query.
    """

    reach: int | None
    sinks: int = 0
    globals: bool = False
    chunk: int | None = None

    def first(self, length: int) -> int:
        """Returns the first recent key that the query after `length` tokens, or a later one, may see; `length` if
        there is none. For Retention(3, chunk=4) it is 4 after 6 tokens, and 8 after 8."""
        recent = 0 if self.reach is None else max(0, length - self.reach)
        return recent if self.chunk is None else max(recent, length // self.chunk * self.chunk)

    def __or__(self, other: "Retention") -> "Retention":
        reach = None if self.reach is None or other.reach is None else max(self.reach, other.reach)
        some = {r.chunk for r in (self, other) if r.reach != 0}  # with reach 0 no recent key is retained
        chunk = None if None in some or not some else lcm(*(n for n in some if n is not None))
        return Retention(reach, max(self.sinks, other.sinks), self.globals or other.globals, chunk)

    def __and__(self, other: "Retention") -> "Retention":
        """Returns an upper bound of the keys that both retain (A & B sees no more than either)."""
        return Retention(
            min((r.reach for r in (self, other) if r.reach is not None), default=None),
            max(self.sinks, other.sinks),
            self.globals or other.globals,
            min((r.chunk for r in (self, other) if r.chunk is not None), default=None),
        )


class Pattern(ABC):
    """Base class of all patterns: static, hashable and printable.

    A leaf must define `allows`, the exact predicate on pairs that everything is tested against. The other methods make
    it faster or smaller; each has a default that is safe for any pattern:

        judge        the same for two tiles at once; by default every pair of tiles is checked pair by pair
        primitive    the test that compiled kernels know it by; by default none, and those kernels do not support it
        is_causal    whether it may be used with a cache; by default no
        reach        how far a query sees; by default unbounded
        retention    the keys that a cache must keep; by default those within `reach`
        dilation     the step by which slots are best sorted; by default they are not sorted
    """

    @abstractmethod
    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        """Returns the predicate for every pair: bool [B|1, T, S] (`PerHead`: [B|1, H, T, S]).

        Reads only `index` and `is_global`; `visible` adds the rules for documents and empty slots.
        """

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        """Returns (possible, certain) for every pair of tiles: whether some pair may be allowed (an upper bound),
        and whether all pairs are (a lower bound)."""
        possible = q.any_token & k.any_token
        return possible, torch.zeros_like(possible)

    @property
    def primitive(self) -> Primitive | None:
        """The primitive that allows exactly the same pairs as this leaf; None if there is none."""
        return None

    @property
    def is_causal(self) -> bool:
        """True only if the pattern implies k.index <= q.index, which every cache requires."""
        return False

    @property
    def reach(self) -> Bounds:
        """(before, after): the largest distance that a query sees to either side; None is unbounded."""
        return None, 0 if self.is_causal else None

    @property
    def retention(self) -> Retention:
        """The keys that later queries may still see, whichever tokens are global."""
        return Retention(self.reach[0])

    @property
    def dilation(self) -> int:
        """The largest step of a window in the pattern, by which blocked backends sort slots (index modulo step);
        steps that constrain keys alone do not count."""
        return 1

    @property
    def heads(self) -> "tuple[Pattern, ...]":
        """The pattern of each head if heads differ (`PerHead`); otherwise this pattern alone."""
        return (self,)

    def __and__(self, other: "Pattern") -> "Pattern":
        return _combine(And, self, other)

    def __or__(self, other: "Pattern") -> "Pattern":
        return _combine(Or, self, other)

    def __str__(self) -> str:
        numbers = (repr(getattr(self, f.name)) for f in fields(self)) if is_dataclass(self) else ()
        return f"{type(self).__name__}({', '.join(numbers)})"

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True, repr=False)
class _Joined(Pattern):
    """Base class of patterns that consist of parts; by default a pair is allowed if any part allows it."""

    parts: tuple[Pattern, ...]
    sign: ClassVar[str]

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        result: Tensor = reduce(self._join, (p.allows(q, k) for p in self.parts))
        return result

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        possible, certain = zip(*(p.judge(q, k) for p in self.parts), strict=True)
        return reduce(self._join, possible), reduce(self._join, certain)

    @property
    def retention(self) -> Retention:
        result: Retention = reduce(self._join, (p.retention for p in self.parts))
        return result

    @property
    def reach(self) -> Bounds:
        before, after = zip(*(p.reach for p in self.parts), strict=True)
        return None if None in before else max(before), None if None in after else max(after)

    @property
    def is_causal(self) -> bool:
        return all(p.is_causal for p in self.parts)

    @property
    def dilation(self) -> int:
        return max(p.dilation for p in self.parts)

    @staticmethod
    def _join(a: Any, b: Any) -> Any:
        return a | b

    def __str__(self) -> str:
        inner = (f"({p})" if isinstance(self, And) and isinstance(p, Or) else str(p) for p in self.parts)
        return f" {self.sign} ".join(inner)


class Or(_Joined):
    """Allows the pairs that any part allows."""

    sign = "|"


class And(_Joined):
    """Allows the pairs that every part allows."""

    sign = "&"

    @property
    def reach(self) -> Bounds:
        before, after = (
            [n for n in side if n is not None] for side in zip(*(p.reach for p in self.parts), strict=True)
        )
        return min(before, default=None), min(after, default=None)

    @property
    def is_causal(self) -> bool:
        return any(p.is_causal for p in self.parts)

    @staticmethod
    def _join(a: Any, b: Any) -> Any:
        return a & b


class PerHead(_Joined):
    """A separate pattern for each query head, in order; & and | apply to every head."""

    def __init__(self, *parts: Pattern) -> None:
        if not parts or any(isinstance(p, PerHead) or not isinstance(p, Pattern) for p in parts):
            names = ", ".join(type(p).__name__ for p in parts)
            raise PatternError(
                f"PerHead takes one pattern per query head, none of them a PerHead; got ({names})"
            )
        super().__init__(parts)

    @property
    def heads(self) -> tuple[Pattern, ...]:
        return self.parts

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return torch.stack(torch.broadcast_tensors(*(p.allows(q, k) for p in self.parts)), dim=1)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        some, every = zip(*(p.judge(q, k) for p in self.parts), strict=True)
        possible, certain = torch.broadcast_tensors(*some), torch.broadcast_tensors(*every)
        return torch.stack(possible).any(0), torch.stack(certain).all(0)

    def __str__(self) -> str:
        return f"PerHead({', '.join(str(p) for p in self.parts)})"


def _combine(kind: type[And] | type[Or], a: Pattern, b: Pattern) -> Pattern:
    """Returns a & b or a | b: flattens nested joins of the same kind, drops duplicates, and joins `PerHead` head by
    head."""
    if not isinstance(b, Pattern):
        got = f"the class {b.__name__}; use an instance of it" if isinstance(b, type) else repr(b)
        raise PatternError(f"{kind.sign} joins two patterns, but to the right of {a} is {got}")
    if isinstance(a, PerHead) or isinstance(b, PerHead):
        count = len((a if isinstance(a, PerHead) else b).heads)
        left, right = (p.heads if isinstance(p, PerHead) else (p,) * count for p in (a, b))
        if len(left) != len(right):
            raise PatternError(
                f"{kind.sign} cannot join a PerHead of {len(left)} heads and one of {len(right)} heads"
            )
        return PerHead(*(_combine(kind, x, y) for x, y in zip(left, right, strict=True)))
    parts = [q for p in (a, b) for q in (p.parts if isinstance(p, kind) else (p,))]
    unique = tuple(dict.fromkeys(parts))
    return unique[0] if len(unique) == 1 else kind(unique)


def visible(pattern: Pattern, q: Tokens, k: Tokens) -> Tensor:
    """Returns which keys each query sees, with all rules applied: bool [B|1, H|1, T, S].

    `pattern.allows`, restricted to pairs of tokens of one document, neither of them an empty slot. This is the
    specification of every backend; it costs T x S and is meant for small calls.
    """
    allowed = pattern.allows(q, k)
    if allowed.dim() == 3:
        allowed = allowed.unsqueeze(1)
    real = q.valid.unsqueeze(-1) & k.valid.unsqueeze(-2)
    if q.document is not None or k.document is not None:
        real = real & (q.documents.unsqueeze(-1) == k.documents.unsqueeze(-2))
    return allowed & real.unsqueeze(1)


def judge(pattern: Pattern, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
    """Returns (possible, certain) for pairs of tiles, with all rules applied: whether some pair may be visible, and
    whether all are.

    Conservative: `possible` may be True for tiles without a visible pair, and `certain` may be False for tiles in
    which every pair is visible; never the other way round. The extents broadcast against each other.
    """
    possible, certain = pattern.judge(q, k)
    overlap = (q.document_lo <= k.document_hi) & (k.document_lo <= q.document_hi)
    same = (q.document_lo == k.document_hi) & (k.document_lo == q.document_hi)
    possible = possible & q.any_token & k.any_token & overlap
    return possible, certain & possible & q.all_tokens & k.all_tokens & same


def classify(pattern: Pattern, q: Tokens, k: Tokens, q_tile: int, k_tile: int) -> tuple[Tensor, Tensor]:
    """Returns `judge` for every pair of a query tile and a key tile: bool [B|1, query tiles, key tiles] each."""
    step = pattern.dilation
    return judge_pairs(pattern, Extent.of(q, q_tile, step), Extent.of(k, k_tile, step))


def judge_pairs(pattern: Pattern, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
    """Returns `judge` for every pair of tiles of two extents [B|1, query tiles] and [B|1, key tiles]."""
    return judge(pattern, q.map(lambda t: t.unsqueeze(2)), k.map(lambda t: t.unsqueeze(1)))
