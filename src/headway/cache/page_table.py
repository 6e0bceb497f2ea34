"""Page tables: the pages of one sequence, and the pages of one class of layers, which the pool (`headway.cache.pages`)
manages.

Keys and values of layers that retain the same tokens lie in pages of 64 slots: token i of a sequence is in slot i % 64
of page i // 64 of its table. This module holds page numbers only, no tensors.
"""

from collections import OrderedDict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from headway.patterns import Retention

PAGE = 64
"""Slots per page. A page is one key block of the kernels, so that every key block belongs to a single sequence."""
CHECKPOINT = 2048
"""Every this many tokens of a sequence, classes that release keys keep the pages that a prefix of that length needs."""


@dataclass(frozen=True)
class PageClass:
    """Layers that share page numbers.

    retention: which past tokens they keep.   nbytes: bytes of a page, in all of these layers.   state: they keep one
        state of the whole sequence instead of tokens; it is their only page.   slack: tokens that can always be
        trimmed.
    """

    retention: Retention
    nbytes: int
    state: bool = False
    slack: int = 0

    def kept(self, page: int, length: int, marked: Collection[int] = ()) -> bool:
        """Returns whether a sequence of `length` tokens may still need this page: for a later query, after trimming at
        most `slack` tokens, or because it holds one of the global tokens in `marked`."""
        return sees(self.retention, page, length - self.slack) or (
            self.retention.globals and any(i // PAGE == page for i in marked)
        )

    def held(self, length: int) -> int:
        """Returns how many pages a sequence of `length` tokens without global tokens holds."""
        pages = -(-length // PAGE)  # rounded up: 65 tokens are 2 pages
        if self.state:
            return 1
        first = self.retention.first(max(0, length - self.slack)) // PAGE
        return pages - first + min(first, -(-self.retention.sinks // PAGE))

    def most(self, length: int, step: int) -> int:
        """Returns the most pages that a sequence holds until it has `length` tokens, if a step reads at most `step` of
        them."""
        reach, pages = self.retention.reach, -(-length // PAGE)
        if self.state:
            return 1
        if reach is None:
            return pages
        return min(pages, -(-self.retention.sinks // PAGE) + -(-(reach + self.slack + step) // PAGE) + 1)

    def needed(self, length: int) -> list[int]:
        """Returns the pages that the query after `length` tokens, a multiple of 64, may attend to."""
        return [p for p in range(length // PAGE) if sees(self.retention, p, length)]

    def checkpoints(self, page: int, marks: set[int]) -> list[int]:
        """Returns the prefix lengths to keep for reuse, multiples of 2048 and `marks`, whose next query may need this
        page."""
        # page 31 ends at token 2048: with reach 100, prefixes of 2048 .. 2147 tokens need it
        begin, end = (page + 1) * PAGE, (page + 1) * PAGE + (self.retention.reach or 0)
        regular = range(-(-begin // CHECKPOINT) * CHECKPOINT, end, CHECKPOINT)
        return [*regular, *(mark for mark in marks if begin <= mark < end)]


def sees(retention: Retention, page: int, length: int) -> bool:
    """Returns whether the query after `length` tokens may attend to a token of this page."""
    return page * PAGE < retention.sinks or (page + 1) * PAGE > retention.first(length)


class Copy(NamedTuple):
    """An order to copy page `old` of class `of` to page `new`, before anything is written to it."""

    of: int
    old: int
    new: int


class Pages:
    """The pages of the class `kind`: which are free, how many sequences use each, and which prefixes they hold."""

    def __init__(self, kind: PageClass) -> None:
        self.kind = kind
        self.free: list[int] = []
        self.users: list[int] = []
        self.key: dict[int, bytes] = {}  # keys of the pages that can be shared as prefixes
        self.page: dict[bytes, int] = {}
        self.idle: OrderedDict[int, int] = OrderedDict()
        """Pages with a key and without users, and the time when each was last used, in that order."""

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
        """Removes one user. A page without users stays idle if it has a key, unless `keep` is False; else it is
        freed."""
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
        """Makes a page findable by its key, unless it has one or another page with the same tokens is findable
        already."""
        if key not in self.page and page not in self.key:
            self.key[page], self.page[key] = key, page

    def may_be_read(self, page: int | None) -> bool:
        """Returns whether other sequences may read a page that one has, so that it must not be written to."""
        assert page is not None
        return self.users[page] > 1 or page in self.key

    def fate(self, table: "PageTable", page: int) -> str:
        """Returns the state of a sequence's page; see `PagePool.fates`."""
        stored = self.page.get(table.key(page))
        if stored is not None:
            return ("kept", "used", "shared")[min(sum(self.users[stored : stored + 1]), 2)]
        return "gone" if self.kind.state or self.kind.kept(page, len(table)) else "released"

    def hold(self, table: "PageTable", count: int) -> bool:
        """Returns whether the class holds what the query after the first `count` pages of a sequence may attend to.

        With an unbounded reach the caller has checked already that all of them are held."""
        if self.kind.state:
            return table.key(count - 1) in self.page
        return self.kind.retention.reach is None or all(
            table.key(p) in self.page for p in self.kind.needed(count * PAGE)
        )

    def touch(self, key: bytes, now: int) -> None:
        """Marks the idle page with this key as used now."""
        page = self.page.get(key)
        if page is not None and page in self.idle:
            self.idle[page] = now
            self.idle.move_to_end(page)

    def evict(self) -> None:
        """Frees the least recently used idle page."""
        page, _ = self.idle.popitem(last=False)
        self.forget(page)
        self.free.append(page)

    def compact(self) -> list[int]:
        """Renumbers the idle pages 0, 1, ..., and returns their old numbers. No page may be in use."""
        old = list(self.idle)
        new_number = {page: new for new, page in enumerate(old)}
        self.idle = OrderedDict((new_number[page], since) for page, since in self.idle.items())
        self.key = {new_number[page]: key for page, key in self.key.items()}
        self.page = {key: page for page, key in self.key.items()}
        self.free, self.users = [], [0] * len(old)
        return old

    def adopt(self, keys: Sequence[bytes]) -> None:
        """Replaces all pages by idle pages 0, 1, ... with these keys, the least recently used first."""
        self.free, self.users = [], [0] * len(keys)
        self.key = dict(enumerate(keys))
        self.page = {key: page for page, key in self.key.items()}
        self.idle = OrderedDict.fromkeys(self.key, 0)

    @property
    def held(self) -> int:
        """Bytes of the pages that are not free."""
        return self.kind.nbytes * (len(self.users) - len(self.free))

    @property
    def kept(self) -> int:
        """Bytes of the idle pages."""
        return self.kind.nbytes * len(self.idle)


def root_key(root: Hashable) -> bytes:
    """Returns a hash of what keys and values depend on besides the tokens, such as adapters: the root of a sequence's
    keys."""
    return blake2b(repr(root).encode(), digest_size=16).digest()


@dataclass(eq=False)
class PageTable:
    """The pages of one sequence.

    ids: its tokens that are stored, or are about to be.
    pages: its page numbers in each class, None if a page was released; a class of states has one page.
    keys: keys of its full pages, chained.
    marks: prefix lengths, multiples of 64, that are worth keeping in classes that release keys.
    globals: indices of its global tokens.
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
    """Up to this many tokens its pages are allocated and not shared; a lower bound."""

    def __len__(self) -> int:
        return len(self.ids)

    def key(self, page: int) -> bytes:
        """Returns the key of a full page: a hash of the root and all tokens up to the page's end."""
        # key(1) = H(tokens 64 .. 127, key=key(0)), key(0) = H(tokens 0 .. 63, key=root)
        while len(self.keys) <= page:
            at = len(self.keys) * PAGE
            before = self.keys[-1] if self.keys else self.root
            tokens = b"".join(i.to_bytes(4, "little") for i in self.ids[at : at + PAGE])
            self.keys.append(blake2b(tokens, key=before, digest_size=16).digest())
        return self.keys[page]
