"""Page tables: laws of references and prefixes, whatever texts do; no model is needed."""

from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headway.cache import PAGE, PageClass, PagePool, PageTable
from headway.cache.page_table import CHECKPOINT
from headway.cache.paged_step import places
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
    """Texts of two ids, so that many begin alike; what is written into a page is kept beside, slot by slot: a hash of
    all ids up to there."""

    kinds: list[PageClass]

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(self.kinds, budget=900)
        self.live: list[PageTable] = []
        self.store: dict[tuple[int, int], list[Any]] = {}
        self.names: dict[bytes, int] = {}  # what a page holds whose key this is: the hash at its end
        self.past: list[list[int]] = []

    @initialize(budget=st.sampled_from([900, 150]), keep=st.sampled_from([None, 200, 0]))
    def begin(self, budget: int, keep: int | None) -> None:
        self.pool.budget, self.pool.keep = budget, keep

    def write(self, table: PageTable, ids: list[int]) -> None:
        """As a cache does: copies, then stores each token in its slot; a state is the ids it has seen."""
        for of, old, new in self.pool.extend(table, ids):
            self.store[of, new] = list(self.store[of, old])
        prefixes, names = hashes(table.ids), PageTable(table.root, list(table.ids), [])
        self.names |= {names.key(p): prefixes[PAGE * (p + 1) - 1] for p in range(len(table) // PAGE)}
        for of, kind in enumerate(self.kinds):
            for i in range(len(table) - len(ids), len(table)):
                page = table.pages[of][0 if kind.state else i // PAGE]
                assert page is not None
                assert self.pool._pages[of].users[page] == 1, "written to alone"
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
        there = self.pool.available
        assert there is not None
        if self.pool.missing(table, len(ids)) > there:
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
        """Some tokens are stored and taken back, before they are settled or after, and others come; where a page is
        full, or the first of a window is no longer seen."""
        table, there = data.draw(st.sampled_from(self.live)), self.pool.available
        assert there is not None
        before = (at - len(table)) % PAGE
        if self.pool.missing(table, before + count) <= there:
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
        before, store = [dict(pages.page) for pages in self.pool._pages], self.store
        self.store = {}
        for of, old in enumerate(self.pool.compact()):
            self.store |= {(of, new): store[of, page] for new, page in enumerate(old)}
            now = self.pool._pages[of].page
            assert {key: old[page] for key, page in now.items()} == before[of]
        assert all(counts["kept"] == counts["all"] for counts in page_counts(self.pool))

    @invariant()
    def conserved(self) -> None:
        """free + used + kept = all, and users are counted."""
        used = 0
        for of, (kind, counts) in enumerate(zip(self.kinds, page_counts(self.pool), strict=True)):
            assert counts["free"] + counts["used"] + counts["kept"] == counts["all"]
            users = Counter(page for table in self.live for page in table.pages[of] if page is not None)
            assert users == {p: n for p, n in enumerate(self.pool._pages[of].users) if n}
            used += kind.nbytes * counts["used"]
        assert self.pool.budget is not None
        assert used <= self.pool.held <= self.pool.budget
        assert self.pool.available == self.pool.budget - used
        assert self.pool.keep is None or self.pool.idle <= self.pool.keep

    @invariant()
    def stored(self) -> None:
        """What a later query of a text sees is there, as it was written."""
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
        for of, (kind, pages) in enumerate(zip(self.kinds, self.pool._pages, strict=True)):
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
    """Of each token, a hash of all up to it."""
    return [*accumulate(ids, lambda before, i: hash((before, i)), initial=0)][1:]


def longest(pool: PagePool, kinds: list[PageClass], ids: list[int]) -> int:
    """By brute force: the most tokens, a multiple of 64 and fewer than all, whose pages each class has as needed."""
    probe = PageTable(pool.open().root, list(ids), [[] for _ in kinds])

    def holds(length: int) -> bool:
        for kind, pages in zip(kinds, pool._pages, strict=True):
            sinks, recent = kind.retention.sinks, kind.retention.first(length)
            for p in range(length // PAGE):
                seen = any(i < sinks or i >= recent for i in range(p * PAGE, (p + 1) * PAGE))
                wanted = p == length // PAGE - 1 if kind.state else seen
                if wanted and probe.key(p) not in pages.page:
                    return False
        return True

    return max((n for n in range(0, len(ids), PAGE) if holds(n)), default=0)


@pytest.mark.parametrize("name", KINDS)
def test_texts_may_do_what_they_like(name: str) -> None:
    """A failure is shown as it came: making it smaller takes minutes (Phase.shrink)."""
    machine = type("Machine", (Texts,), {"kinds": KINDS[name]})
    machine.TestCase.settings = settings(
        max_examples=60, stateful_step_count=30, deadline=None, phases=[Phase.generate]
    )
    machine.TestCase("runTest").debug()


def test_windows_keep_the_pages_of_checkpoints_alone() -> None:
    pool = PagePool([FULL, WINDOW], budget=10**6)
    ids = [i % 7 for i in range(CHECKPOINT + 1000)]
    table = pool.open(ids)
    table.marks.add(1024)
    for at in range(0, len(ids), 50):
        pool.extend(table, ids[at : at + 50])
        pool.settle(table)
    pool.close(table)
    hits = {length: len(pool.open(ids[: length + 1])) for length in (1024, 1088, CHECKPOINT, CHECKPOINT + 64)}
    assert hits == {1024: 1024, 1088: 1024, CHECKPOINT: CHECKPOINT, CHECKPOINT + 64: CHECKPOINT}


def test_a_prefix_of_a_window_is_found_by_one_text_after_the_other() -> None:
    """Each slides over the pages that it found, and leaves them to the next."""
    pool, common = PagePool([FULL, WINDOW], keep=10**6), [i % 7 for i in range(1024)]
    for n, end in enumerate(([], [1] * 600, [2] * 600, [3] * 600)):
        table = pool.open(common + end)
        assert len(table) == (1024 if n else 0)
        table.marks.add(len(common + end) // PAGE * PAGE)
        while rest := (common + end)[len(table) :]:
            pool.extend(table, rest[:64])
            pool.settle(table)
        pool.close(table)


def test_three_windows_beside_a_full_layer_keep_a_third_of_four_full_ones() -> None:
    """Of 8192 tokens windows of 512 hold 8 or 9 pages of 128: (128 + 3 * 9) / (4 * 128) = 0.30."""
    pool, whole = PagePool([PageClass(Retention(None), 1), PageClass(Retention(511), 3)]), 4 * 8192 // PAGE
    table = pool.open()
    for _ in range(8192 // PAGE):
        pool.extend(table, [1] * PAGE)
        pool.settle(table)
    assert pool.held - pool.idle <= 0.33 * whole


def test_the_pages_of_the_oldest_texts_go_first() -> None:
    """Of all classes, the ends of texts before their beginnings."""
    pool = PagePool([FULL, STATE], keep=4 * FULL.nbytes + 2 * STATE.nbytes)
    texts = [[n] * 129 for n in range(3)]
    for ids in texts:
        table = pool.open(ids)
        for at in range(0, 128, 64):
            pool.extend(table, ids[at : at + 64])
            pool.settle(table)
            pool.snapshot(table)
        pool.close(table)
    assert [len(pool.open(ids)) for ids in texts] == [0, 0, 128]
    kinds = PagePool([FULL, STATE])
    for number, ids in enumerate(texts[:2]):
        table = kinds.open(ids)
        kinds.extend(table, ids[:128])
        kinds.settle(table)
        if number == 1:
            kinds.snapshot(table)
        kinds.close(table)
    assert [counts["kept"] for counts in page_counts(kinds)] == [4, 1]
    kinds.keep = 2 * FULL.nbytes + STATE.nbytes
    kinds.close(kinds.open())
    assert [counts["kept"] for counts in page_counts(kinds)] == [2, 1]
    pool = PagePool([FULL], keep=3 * FULL.nbytes)
    for ids in texts[:2]:
        table = pool.open(ids)
        pool.extend(table, ids)
        pool.settle(table)
        pool.close(table)
    assert [len(pool.open(ids)) for ids in texts[:2]] == [64, 128]


def test_pages_that_are_numbered_anew_are_found_under_their_numbers() -> None:
    pool = PagePool([FULL])
    for n in (0, 1):
        table = pool.open()
        pool.extend(table, [n] * 65)
        pool.settle(table)
        pool.close(table)
    pool.close(pool.open([0] * 65))
    assert pool.compact() == [[1, 0]]
    assert [pool.open([n] * 65).pages for n in (0, 1)] == [[[1]], [[0]]]


def test_pages_in_use_are_not_numbered_anew() -> None:
    pool = PagePool([FULL])
    table = pool.open()
    pool.extend(table, [1])
    with pytest.raises(CacheError, match="close the texts"):
        pool.compact()


def test_slots_behind_the_end_of_a_text_hold_no_keys() -> None:
    pool = PagePool([FULL])
    table = pool.open()
    pool.extend(table, [1] * 70)
    found = places([table], 0, torch.device("cpu"))
    assert found.tokens.index.tolist() == [[*range(70), *[-1] * 58]]
    assert found.slots.tolist() == [[PAGE * page + slot for page in table.pages[0] for slot in range(PAGE)]]  # type: ignore[operator]


def test_texts_of_other_roots_share_nothing() -> None:
    pool = PagePool([FULL], budget=10**6)
    table = pool.open([1] * 130, root="adapter a")
    pool.extend(table, [1] * 130)
    pool.settle(table)
    assert [len(pool.open([1] * 130, root=root)) for root in ("adapter a", "adapter b", ())] == [128, 0, 0]


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    pool = PagePool([WINDOW], budget=50)
    table = pool.open()
    pool.extend(table, [1] * 300)
    pool.settle(table)
    with pytest.raises(CacheError, match=r"400 more tokens take 42 bytes of pages, and \d+ of 50 are left"):
        pool.extend(table, [1] * 400)
    with pytest.raises(CacheError, match=r"of 300 tokens cannot take back 301"):
        pool.trim(table, 301)
    with pytest.raises(
        CacheError, match=r"of 300 tokens cannot take back 150: layers that keep the last 100"
    ):
        pool.trim(table, 150)
    assert len(table) == 300
    states = PagePool([STATE])
    table = states.open()
    states.extend(table, [1])
    with pytest.raises(CacheError, match="a state of all tokens cannot take one back"):
        states.trim(table, 1)


def test_what_became_of_the_pages_of_a_text() -> None:
    """Of 5 full pages and a bit: while one reads it, while two do, when they have ended, and of another text."""
    pool, ids = PagePool([FULL, WINDOW]), list(range(5 * PAGE + 9))
    assert pool.fates(ids) == [["gone"] * 5, ["released"] * 3 + ["gone"] * 2]
    one = pool.open(ids)
    pool.extend(one, ids)
    pool.settle(one)
    assert pool.fates(ids) == [["used"] * 5, ["released"] * 3 + ["used"] * 2]
    other = pool.fork(one)
    assert pool.fates(ids) == [["shared"] * 5, ["released"] * 3 + ["shared"] * 2]
    for table in (one, other):
        pool.close(table)
    assert pool.fates(ids) == [["kept"] * 5, ["released"] * 3 + ["kept"] * 2]
    assert (
        pool.fates(ids, root="another")
        == pool.fates(ids[::-1])
        == [["gone"] * 5, ["released"] * 3 + ["gone"] * 2]
    )
    assert len(pool.fates(ids[:PAGE])[0]) == 1
