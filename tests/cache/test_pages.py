"""Page tables: laws of references and prefixes, whatever texts do; no model is needed."""

import pytest
import torch
from hypothesis import Phase, settings

from headway.cache import PAGE, PageClass, PagePool
from headway.cache.page_table import CHECKPOINT
from headway.cache.paged_step import places
from headway.errors import CacheError
from headway.patterns import Retention
from tests.cache.page_counts import page_counts
from tests.cache.texts import FULL, KINDS, STATE, WINDOW, Texts
from tests.checkpoints.shares import share


@share("name", KINDS, 1, 2)
def test_texts_may_do_what_they_like(name: str) -> None:
    """A failure is shown as it was drawn: shrinking it takes minutes (Phase.shrink)."""
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
    """Each text slides over the pages that it found, and leaves them to the next text."""
    pool, common = PagePool([FULL, WINDOW], keep=10**6), [i % 7 for i in range(1024)]
    for n, end in enumerate(([], [1] * 600, [2] * 600, [3] * 600)):
        table = pool.open(common + end)
        assert len(table) == (1024 if n else 0)
        table.marks.add(len(common + end) // PAGE * PAGE)
        while remaining := (common + end)[len(table) :]:
            pool.extend(table, remaining[:64])
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
    """Over all classes, and the ends of texts before their beginnings."""
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
    at = places([table], 0, torch.device("cpu"))
    assert at.tokens.index.tolist() == [[*range(70), *[-1] * 58]]
    assert at.slots.tolist() == [[PAGE * page + slot for page in table.pages[0] for slot in range(PAGE)]]  # type: ignore[operator]


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
    with pytest.raises(CacheError, match=r"400 more tokens take 42 bytes of pages, but \d+ of 50 are left"):
        pool.extend(table, [1] * 400)
    with pytest.raises(CacheError, match=r"cannot trim 301 tokens of a text of 300"):
        pool.trim(table, 301)
    with pytest.raises(
        CacheError, match=r"cannot trim 150 tokens of a text of 300: layers that keep the last 100"
    ):
        pool.trim(table, 150)
    assert len(table) == 300
    states = PagePool([STATE])
    table = states.open()
    states.extend(table, [1])
    with pytest.raises(CacheError, match="a recurrent state cannot be trimmed"):
        states.trim(table, 1)


def test_what_became_of_the_pages_of_a_text() -> None:
    """Of 5 full pages and a part: while one text uses them, while two do, after both have ended, and for another
    text."""
    pool, ids = PagePool([FULL, WINDOW]), list(range(5 * PAGE + 9))
    assert pool.fates(ids) == [["gone"] * 5, ["released"] * 3 + ["gone"] * 2]
    first = pool.open(ids)
    pool.extend(first, ids)
    pool.settle(first)
    assert pool.fates(ids) == [["used"] * 5, ["released"] * 3 + ["used"] * 2]
    second = pool.fork(first)
    assert pool.fates(ids) == [["shared"] * 5, ["released"] * 3 + ["shared"] * 2]
    for table in (first, second):
        pool.close(table)
    assert pool.fates(ids) == [["kept"] * 5, ["released"] * 3 + ["kept"] * 2]
    assert (
        pool.fates(ids, root="another")
        == pool.fates(ids[::-1])
        == [["gone"] * 5, ["released"] * 3 + ["gone"] * 2]
    )
    assert len(pool.fates(ids[:PAGE])[0]) == 1
