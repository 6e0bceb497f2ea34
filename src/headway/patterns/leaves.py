"""The elementary patterns, which are not composed of others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headway.errors import PatternError, check_whole
from headway.patterns.base import Bounds, Pattern, Retention
from headway.patterns.primitives import Kind, Primitive
from headway.patterns.tiles import Extent
from headway.tokens import Tokens

FARTHEST = 2**62
"""The largest distance that a pattern can name: positions are 64-bit integers."""


@dataclass(frozen=True, repr=False)
class Full(Pattern):
    """Every token sees every token."""

    primitive = Primitive(Kind.FULL)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        rows = max(q.rows, k.rows)
        return torch.ones(rows, q.count, k.count, dtype=torch.bool, device=q.device)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        always = q.any_token & k.any_token | True
        return always, always


@dataclass(frozen=True, repr=False)
class Causal(Pattern):
    """A query sees itself and earlier tokens: k <= q."""

    primitive = Primitive(Kind.CAUSAL)
    is_causal = True

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return k.index.unsqueeze(-2) <= q.index.unsqueeze(-1)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        return k.lo <= q.hi, k.hi <= q.lo


@dataclass(frozen=True, repr=False)
class Window(Pattern):
    """A query sees itself, `before` keys before it, and `after` keys after it, `step` positions apart.

    k = q + j * step with -before <= j <= after: before + 1 + after keys, whatever the step (a dilated window if
    greater than 1). (Beltagy et al. 2020, section 3.1; their two-sided window w is before = after = w / 2.)
    """

    before: int
    after: int = 0
    step: int = 1

    def __post_init__(self) -> None:
        for name, least in (("before", 0), ("after", 0), ("step", 1)):
            check_whole(f"Window: {name}", getattr(self, name), least, PatternError)
        if max(self.before, self.after, 1) * self.step > FARTHEST:
            raise PatternError(
                f"Window: the window reaches {max(self.before, self.after, 1) * self.step} positions, but at most "
                f"{FARTHEST} are possible; use Causal() for all earlier keys"
            )

    @staticmethod
    def last(keys: int, step: int = 1) -> "Window":
        """Returns a window over the last `keys` keys, the query itself included."""
        if not isinstance(keys, int) or isinstance(keys, bool) or keys < 1:
            raise PatternError(
                f"Window.last: keys includes the query itself, so it must be an integer of at least 1, got {keys!r}; "
                "for no window use Causal()"
            )
        return Window(keys - 1, 0, step)

    @staticmethod
    def around(others: int, step: int = 1) -> "Window":
        """Returns a window over `others` keys on either side, and the query itself."""
        return Window(others, others, step)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        away = k.index.unsqueeze(-2) - q.index.unsqueeze(-1)
        near = (away >= -self.before * self.step) & (away <= self.after * self.step)
        return near if self.step == 1 else near & (away % self.step == 0)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        least, most = k.lo - q.hi, k.hi - q.lo
        first, last = -self.before * self.step, self.after * self.step
        possible, certain = (most >= first) & (least <= last), (least >= first) & (most <= last)
        if self.step == 1:
            return possible, certain
        if self.step != q.step or self.step != k.step:
            return possible, certain & False
        meet = (q.residue_lo <= k.residue_hi) & (k.residue_lo <= q.residue_hi)
        same = (q.residue_lo == k.residue_hi) & (k.residue_lo == q.residue_hi)
        return possible & meet, certain & same

    @property
    def primitive(self) -> Primitive:
        return Primitive(Kind.WINDOW, -self.before * self.step, self.after * self.step, self.step)

    @property
    def reach(self) -> Bounds:
        return self.before * self.step, self.after * self.step

    @property
    def dilation(self) -> int:
        return self.step

    @property
    def is_causal(self) -> bool:
        return self.after == 0

    def __str__(self) -> str:
        suffix = f", step={self.step}" if self.step > 1 else ""
        if self.after == 0:
            return f"Window.last({self.before + 1}{suffix})"
        if self.after == self.before:
            return f"Window.around({self.before}{suffix})"
        return f"Window({self.before}, {self.after}{suffix})"


@dataclass(frozen=True, repr=False)
class Chunk(Pattern):
    """A query sees its own chunk: each document is divided into chunks of `size` tokens, starting with its first token.

    floor(k / size) = floor(q / size). For a decoder use `Chunk(n) & Causal()` (Llama 4's attention_chunk_size n).
    """

    size: int

    def __post_init__(self) -> None:
        check_whole("Chunk: size", self.size, 1, PatternError)
        if self.size > FARTHEST:
            raise PatternError(
                f"Chunk: size must be at most 2**62, got {self.size}; use Full() for one chunk"
            )

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return (k.index // self.size).unsqueeze(-2) == (q.index // self.size).unsqueeze(-1)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        q_lo, q_hi, k_lo, k_hi = (at // self.size for at in (q.lo, q.hi, k.lo, k.hi))
        return (k_lo <= q_hi) & (q_lo <= k_hi), (q_lo == k_hi) & (k_lo == q_hi)

    @property
    def primitive(self) -> Primitive:
        return Primitive(Kind.CHUNK, 0, self.size)

    @property
    def reach(self) -> Bounds:
        return self.size - 1, self.size - 1

    @property
    def retention(self) -> Retention:
        return Retention(self.size - 1, chunk=self.size)


@dataclass(frozen=True, repr=False)
class Sink(Pattern):
    """Every token sees the first `count` tokens of its document: 0 <= k < count.

    (Attention sinks: Xiao et al. 2023, "Efficient streaming language models", section 3.2.)
    """

    count: int

    def __post_init__(self) -> None:
        if not isinstance(self.count, int) or isinstance(self.count, bool) or not 0 <= self.count <= FARTHEST:
            raise PatternError(f"Sink: count must be a whole number in 0..2**62, got {self.count!r}")

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        sink = (k.index < self.count).unsqueeze(-2)
        return sink.expand(-1, q.count, -1)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        everywhere = q.any_token | True
        return (k.lo < self.count) & everywhere, (k.hi < self.count) & everywhere

    @property
    def primitive(self) -> Primitive:
        return Primitive(Kind.SINK, 0, self.count)

    @property
    def retention(self) -> Retention:
        return Retention(0, sinks=self.count)

    @property
    def reach(self) -> Bounds:
        return (None, None) if self.count else (0, 0)


@dataclass(frozen=True, repr=False)
class GlobalKeys(Pattern):
    """Every token sees global tokens. (Beltagy et al. 2020, section 3.1, "global attention".)"""

    primitive = Primitive(Kind.GLOBAL_KEYS)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return k.globals.unsqueeze(-2).expand(-1, q.count, -1)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        everywhere = q.any_token | True
        return k.any_global & everywhere, k.all_global & everywhere

    @property
    def retention(self) -> Retention:
        return Retention(0, globals=True)


@dataclass(frozen=True, repr=False)
class GlobalQueries(Pattern):
    """Global tokens see every token. (Beltagy et al. 2020, section 3.1, "global attention".)"""

    primitive = Primitive(Kind.GLOBAL_QUERIES)

    def allows(self, q: Tokens, k: Tokens) -> Tensor:
        return q.globals.unsqueeze(-1).expand(-1, -1, k.count)

    def judge(self, q: Extent, k: Extent) -> tuple[Tensor, Tensor]:
        everywhere = k.any_token | True
        return q.any_global & everywhere, q.all_global & everywhere


def Global() -> Pattern:
    """Returns the pattern in which global tokens see every token and are seen by every token."""
    return GlobalKeys() | GlobalQueries()
