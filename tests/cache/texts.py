"""Texts that open, grow, fork and close pages in any order, and a copy of what each slot holds."""

from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.cache import PAGE, PageClass, PagePool, PageTable
from headway.errors import CacheError
from headway.patterns import Retention
from tests.cache.page_counts import page_counts

FULL = PageClass(Retention(None), 10)


WINDOW = PageClass(Retention(100), 7, slack=3)


SINKS = PageClass(Retention(64, sinks=70), 3, slack=3)


CHUNKS = PageClass(Retention(159, sinks=3, chunk=160), 4, slack=3)


STATE = PageClass(Retention(None), 50, state=True)


KINDS = {
    "full": [FULL],
    "windows": [FULL, WINDOW, SINKS, CHUNKS],
    "window": [WINDOW],
    "chunks": [CHUNKS],
    "states": [STATE],
    "both": [FULL, STATE],
}


class Texts(RuleBasedStateMachine):
    """Texts of two ids, so that many share a prefix; what is written into a page is also kept here, slot by slot: a
    hash of all ids up to there."""

    kinds: list[PageClass]

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.kinds, budget=900)
        self.live: list[PageTable] = []
        self.store: dict[tuple[int, int], list[Any]] = {}
        self.names: dict[bytes, int] = {}  # what the page with this key holds: the hash at its end
        self.past: list[list[int]] = []

    @initialize(budget=st.sampled_from([900, 150]), keep=st.sampled_from([None, 200, 0]))
    def begin(self, budget: int, keep: int | None) -> None:
        self.pool.budget, self.pool.keep = budget, keep

    def write(self, table: PageTable, ids: list[int]) -> None:
        """Writes as a cache does: copies pages, then stores each token in its slot; a state is the ids it has seen."""
        for of, old, new in self.pool.extend(table, ids):
            self.store[of, new] = list(self.store[of, old])
        prefixes, names = hashes(table.ids), PageTable(table.root, list(table.ids), [])
        self.names |= {names.key(p): prefixes[PAGE * (p + 1) - 1] for p in range(len(table) // PAGE)}
        for of, kind in enumerate(self.kinds):
            for i in range(len(table) - len(ids), len(table)):
                page = table.pages[of][0 if kind.state else i // PAGE]
                assert page is not None
                assert self.pool.stored[of].users[page] == 1, "written to alone"
                if kind.state:
                    before = self.store[of, page] if i else []
                    self.store[of, page] = [*before, table.ids[i]]
                else:
                    slots = self.store.setdefault((of, page), [None] * PAGE)
                    slots[i % PAGE] = prefixes[i]

    @rule(data=st.data(), extra=st.integers(1, 150))
    def open(self, data: st.DataObject, extra: int) -> None:
        begin = data.draw(st.sampled_from(self.past)) if self.past else []
        ids = begin[: data.draw(st.integers(0, len(begin)))] + [data.draw(st.integers(0, 1))] * extra
        right = longest(self.pool, self.kinds, ids)
        table = self.pool.open(ids)
        assert len(table) == right, "the longest prefix that every class holds"
        self.live.append(table)
        self.read(table, ids[len(table) :])

    def read(self, table: PageTable, ids: list[int]) -> None:
        available = self.pool.available
        assert available is not None
        if self.pool.missing(table, len(ids)) > available:
            before = page_counts(self.pool)
            with pytest.raises(CacheError, match="more tokens take"):
                self.pool.extend(table, ids)
            assert page_counts(self.pool) == before
            return
        self.write(table, ids)
        self.settle(table)
        self.past.append(list(table.ids))

    def settle(self, table: PageTable) -> None:
        self.pool.settle(table)
        for of, old, new in self.pool.snapshot(table):
            self.store[of, new] = list(self.store[of, old])

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 70))
    def grow(self, data: st.DataObject, count: int) -> None:
        table = data.draw(st.sampled_from(self.live))
        self.read(table, [data.draw(st.integers(0, 1))] * count)

    @precondition(lambda self: self.live and not any(kind.state for kind in self.kinds))
    @rule(data=st.data(), at=st.sampled_from([62, 63, 34, 35]), count=st.integers(1, 3))
    def draft(self, data: st.DataObject, at: int, count: int) -> None:
        """Tokens are stored and taken back, before or after they are settled, and others come; at places where a page
        is full, or the first key of a window is no longer seen."""
        table, available = data.draw(st.sampled_from(self.live)), self.pool.available
        assert available is not None
        before = (at - len(table)) % PAGE
        if self.pool.missing(table, before + count) <= available:
            self.write(table, [data.draw(st.integers(0, 1))] * before)
            self.write(table, [2] * count)
            if data.draw(st.booleans()):
                self.pool.settle(table)
            self.pool.trim(table, count)
            self.read(table, [data.draw(st.integers(0, 1))] * data.draw(st.integers(0, 4)))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.live.append(self.pool.fork(data.draw(st.sampled_from(self.live))))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        table = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.close(table)
        with pytest.raises(CacheError, match="closed"):
            self.pool.fork(table)

    @precondition(lambda self: not self.live)
    @rule()
    def compact(self) -> None:
        before, store = [dict(pages.page) for pages in self.pool.stored], self.store
        self.store = {}
        for of, old in enumerate(self.pool.compact()):
            self.store |= {(of, new): store[of, page] for new, page in enumerate(old)}
            now = self.pool.stored[of].page
            assert {key: old[page] for key, page in now.items()} == before[of]
        assert all(counts["kept"] == counts["all"] for counts in page_counts(self.pool))

    @invariant()
    def conserved(self) -> None:
        """free + used + kept = all, and the numbers of users are right."""
        used = 0
        for of, (kind, counts) in enumerate(zip(self.kinds, page_counts(self.pool), strict=True)):
            assert counts["free"] + counts["used"] + counts["kept"] == counts["all"]
            users = Counter(page for table in self.live for page in table.pages[of] if page is not None)
            assert users == {p: n for p, n in enumerate(self.pool.stored[of].users) if n}
            used += kind.nbytes * counts["used"]
        assert self.pool.budget is not None
        assert used <= self.pool.held <= self.pool.budget
        assert self.pool.available == self.pool.budget - used
        assert self.pool.keep is None or self.pool.idle <= self.pool.keep

    @invariant()
    def stored(self) -> None:
        """What a later query of a text sees is stored, as it was written."""
        for table in self.live:
            prefixes = hashes(table.ids)
            for of, kind in enumerate(self.kinds):
                if kind.state:
                    assert not len(table) or self.store[of, table.pages[of][0] or 0] == table.ids
                    continue
                for i in range(len(table)):
                    if i < kind.retention.sinks or i >= kind.retention.first(len(table)):
                        page = table.pages[of][i // PAGE]
                        assert page is not None, (of, i, len(table))
                        assert self.store[of, page][i % PAGE] == prefixes[i]

    @invariant()
    def named(self) -> None:
        """A page that is found by a key holds the tokens of that key, whatever became of the text that wrote it."""
        for of, (kind, pages) in enumerate(zip(self.kinds, self.pool.stored, strict=True)):
            for key, page in pages.page.items():
                slots = self.store[of, page]
                assert self.names[key] == (hashes(slots) if kind.state else slots)[-1]

    def teardown(self) -> None:
        for table in self.live:
            self.pool.close(table)
        assert not any(counts["used"] for counts in page_counts(self.pool)), (
            "nothing is used when all have ended"
        )


def hashes(ids: list[int]) -> list[int]:
    """Returns for each token a hash of all ids up to it."""
    return [*accumulate(ids, lambda before, i: hash((before, i)), initial=0)][1:]


def longest(pool: PagePool, kinds: list[PageClass], ids: list[int]) -> int:
    """Returns, by brute force, the most tokens, a multiple of 64 and fewer than all, whose pages each class has as
    needed."""
    probe = PageTable(pool.open().root, list(ids), [[] for _ in kinds])

    def holds(length: int) -> bool:
        for kind, pages in zip(kinds, pool.stored, strict=True):
            sinks, recent = kind.retention.sinks, kind.retention.first(length)
            for p in range(length // PAGE):
                seen = any(i < sinks or i >= recent for i in range(p * PAGE, (p + 1) * PAGE))
                wanted = p == length // PAGE - 1 if kind.state else seen
                if wanted and probe.key(p) not in pages.page:
                    return False
        return True

    return max((n for n in range(0, len(ids), PAGE) if holds(n)), default=0)
