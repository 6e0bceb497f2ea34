"""Page tables: the pages of one text, and those of one class of layers, which the pool (`headway.cache.pages`) manages.

Keys and values of layers that retain the same tokens lie in pages of 64 slots: token i of a text is in slot i % 64 of
page i // 64 of its table. This module holds page numbers only, no tensors.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from headway.patterns import Retention

PAGE = 64
"""Slots of a page: a page is one block of keys of the kernels, so that a block belongs to one text."""
CHECKPOINT = 2048
"""Distance in tokens of the lengths at which classes that forget keep the pages that a prefix of that length needs."""


@dataclass(frozen=True)
class PageClass:
    """Layers that share page numbers.

    retention: which past tokens they keep.   nbytes: of a page, in all of the layers.   state: they keep, instead of
    tokens, one state of the whole text, which is their only page.
    """

    retention: Retention
    nbytes: int
    state: bool = False
    slack: int = 0

    def kept(self, page: int, length: int, marked: Collection[int] = ()) -> bool:
        """Whether a text of `length` tokens, of which those in `marked` are global, may still be asked for a token of
        this page, up to `slack` tokens back."""
        return sees(self.retention, page, length - self.slack) or (
            self.retention.globals and any(i // PAGE == page for i in marked)
        )

    def held(self, length: int) -> int:
        """How many pages a text of `length` tokens holds, none of which is global."""
        pages = -(-length // PAGE)  # rounded up: 65 tokens are 2 pages
        if self.state:
            return 1
        first = self.retention.first(max(0, length - self.slack)) // PAGE
        return pages - first + min(first, -(-self.retention.sinks // PAGE))

    def most(self, length: int, step: int) -> int:
        """The most pages that a text holds until it has `length` tokens, of which a step reads `step` at most."""
        reach, pages = self.retention.reach, -(-length // PAGE)
        if self.state:
            return 1
        if reach is None:
            return pages
        return min(pages, -(-self.retention.sinks // PAGE) + -(-(reach + self.slack + step) // PAGE) + 1)

    def needed(self, length: int) -> list[int]:
        """The pages that the query after `length` tokens, a multiple of 64, may see."""
        return [p for p in range(length // PAGE) if sees(self.retention, p, length)]

    def checkpoints(self, page: int, marks: set[int]) -> list[int]:
        """The lengths, multiples of 2048 and those in `marks`, whose next query may need this page, forgotten later."""
        # page 31 ends at 2048: with reach 100, lengths 2048 .. 2147 need it
        begin, end = (page + 1) * PAGE, (page + 1) * PAGE + (self.retention.reach or 0)
        regular = range(-(-begin // CHECKPOINT) * CHECKPOINT, end, CHECKPOINT)
        return [*regular, *(mark for mark in marks if begin <= mark < end)]


def sees(retention: Retention, page: int, length: int) -> bool:
    """Whether the query after `length` tokens may see a token of this page."""
    return page * PAGE < retention.sinks or (page + 1) * PAGE > retention.first(length)


class Copy(NamedTuple):
    """Page `old` of a class is to be copied to page `new`, before anything is written."""

    of: int
    old: int
    new: int


class Pages:
    """The pages of one class."""

    def __init__(self) -> None:
        self.free: list[int] = []
        self.users: list[int] = []
        self.key: dict[int, bytes] = {}  # of pages that hold a prefix
        self.page: dict[bytes, int] = {}
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Pages with a key and without users, and when each lost its last user, in that order."""

    def take(self) -> int:
        if self.free:
            page = self.free.pop()
        else:
            page = len(self.users)
            self.users.append(0)
        self.users[page] = 1
        return page

    def share(self, page: int) -> None:
        self.users[page] += 1
        self.idle.pop(page, None)

    def drop(self, page: int, now: int, keep: bool = True) -> None:
        """Removes one user. A page without users stays idle where it holds a prefix, unless `keep` is False."""
        self.users[page] -= 1
        if self.users[page]:
            return
        if page in self.key and keep:
            self.idle[page] = now
            return
        self.forget(page)
        self.free.append(page)

    def forget(self, page: int) -> None:
        key = self.key.pop(page, None)
        if key is not None:
            del self.page[key]

    def publish(self, page: int, key: bytes) -> None:
        """Makes a page findable by its key, unless another page of the same tokens already is."""
        if key not in self.page and page not in self.key:
            self.key[page], self.page[key] = key, page

    def fate(self, kind: PageClass, table: "PageTable", page: int) -> str:
        """See `PagePool.fates`."""
        stored = self.page.get(table.key(page))
        if stored is not None:
            return ("kept", "used", "shared")[min(sum(self.users[stored : stored + 1]), 2)]
        return "gone" if kind.state or kind.kept(page, len(table)) else "released"

    def hold(self, kind: PageClass, table: "PageTable", count: int) -> bool:
        """Whether the class holds what the query after `count` pages of a text may see; with an unbounded reach the
        caller has checked that all of them are held."""
        if kind.state:
            return table.key(count - 1) in self.page
        return kind.retention.reach is None or all(
            table.key(p) in self.page for p in kind.needed(count * PAGE)
        )

    def touch(self, key: bytes, now: int) -> None:
        """Marks the idle page with this key as used now."""
        page = self.page.get(key)
        if page is not None and page in self.idle:
            self.idle[page] = now
            self.idle.move_to_end(page)

    def evict(self) -> None:
        """Frees the idle page that was used longest ago."""
        page, _ = self.idle.popitem(last=False)
        self.forget(page)
        self.free.append(page)

    def compact(self) -> list[int]:
        """Numbers the idle pages anew, 0, 1, ..., and returns their old numbers. None may be in use."""
        old = list(self.idle)
        number = {page: new for new, page in enumerate(old)}
        self.idle = OrderedDict((number[page], since) for page, since in self.idle.items())
        self.key = {number[page]: key for page, key in self.key.items()}
        self.page = {key: page for page, key in self.key.items()}
        self.free, self.users = [], [0] * len(old)
        return old

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Holds only idle pages 0, 1, ... of these keys, the least recently used first."""
        self.free, self.users = [], [0] * len(keys)
        self.key = dict(enumerate(keys))
        self.page = {key: page for page, key in self.key.items()}
        self.idle = OrderedDict.fromkeys(self.key, 0)

    @property
    def held(self) -> int:
        """Pages that are not free."""
        return len(self.users) - len(self.free)


def root_key(root: Hashable) -> bytes:
    """Hashes what else keys depend on, adapters for example: the start of a text's chain of keys."""
    return blake2b(repr(root).encode(), digest_size=16).digest()


@dataclass(eq=False)
class PageTable:
    """The pages of one text.

    ids: its tokens that are stored, or are about to be.   pages: of each class, page numbers, None where one was
    released; of a class of states its only page.   keys: of its full pages, chained.   marks: lengths at which a prefix
    is worth keeping in classes that forget, multiples of 64.   globals: the tokens that are global, by their indices.
    """

    root: bytes
    ids: list[int]
    pages: list[list[int | None]]
    keys: list[bytes] = field(default_factory=list)
    marks: set[int] = field(default_factory=set)
    globals: set[int] = field(default_factory=set)
    closed: bool = False
    version: int = 0
    """Changes whenever `pages` does."""
    room: int = 0
    """Up to so many tokens its pages are allocated and not shared; a lower bound."""

    def __len__(self) -> int:
        return len(self.ids)

    def key(self, page: int) -> bytes:
        """The key of a full page: a hash of all tokens up to its end, under the root."""
        # key(1) = H(tokens 64 .. 127, key=key(0)), key(0) = H(tokens 0 .. 63, key=root)
        while len(self.keys) <= page:
            at = len(self.keys) * PAGE
            before = self.keys[-1] if self.keys else self.root
            tokens = b"".join(i.to_bytes(4, "little") for i in self.ids[at : at + PAGE])
            self.keys.append(blake2b(tokens, key=before, digest_size=16).digest())
        return self.keys[page]
