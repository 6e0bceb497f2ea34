"""The cache follows from the pattern, and says why."""

import pytest

from headway.cache import CacheSpec, Growing, Ring, choose_cache, make_cache
from headway.errors import CacheError
from headway.patterns import Causal, Full, Global, GlobalKeys, GlobalQueries, PerHead, Sink, Window
from tests.cache.oracle import CASES, Case

SIZES = {"batch": 1, "kv_heads": 2, "head_dim": 4}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_each_pattern_gets_its_cache(case: Case) -> None:
    choice, cache = choose_cache(case.pattern), make_cache(case.pattern, CacheSpec(**SIZES))
    assert choice.what == ("growing" if case.slots is None else "ring")
    assert type(cache.table.policy) is (Growing if case.slots is None else Ring)
    assert cache.bound == case.slots


def test_reasons_name_what_is_kept() -> None:
    pattern = Window.last(512) | (Causal() & (Sink(4) | GlobalKeys()))
    assert str(choose_cache(pattern)) == (
        "ring: by Window.last(512) | Causal() & (Sink(4) | GlobalKeys()) later queries see no earlier keys but "
        "the last 511 and the first 4 and global ones: 516 slots and one per global token are enough; "
        "not growing: it would hold keys that no later query sees"
    )


def test_reasons_name_what_cannot_be_forgotten() -> None:
    choice = choose_cache(Window.last(8) | (Causal() & GlobalQueries()))
    assert choice.why == "by Causal() & GlobalQueries() a later query may see any earlier key"
    assert choice.rejected == (("ring", "it would forget keys that may still be seen"),)
    assert choose_cache(PerHead(Window.last(2), Causal())).why.startswith("by Causal() a later")


@pytest.mark.parametrize("pattern", [Full(), Window.around(3), Window.last(4) | Global(), Sink(2)], ids=str)
def test_patterns_that_look_ahead_have_no_cache(pattern: object) -> None:
    for refuse in (lambda: choose_cache(pattern), lambda: make_cache(pattern, CacheSpec(**SIZES))):
        with pytest.raises(CacheError, match=r"no cache for .*: its queries may see later tokens"):
            refuse()


def test_a_ring_is_refused_where_nothing_may_be_forgotten() -> None:
    with pytest.raises(
        CacheError, match=r'kind="ring" was asked for, but by Causal\(\) a later query may see any'
    ):
        make_cache(Causal(), CacheSpec(**SIZES), kind="ring")


def test_kinds_and_slack() -> None:
    assert make_cache(Window.last(4), CacheSpec(**SIZES), kind="growing").table.policy == Growing()
    ring = make_cache(Window.last(4), CacheSpec(**SIZES), kind="ring", slack=3)
    assert (type(ring.table.policy), ring.bound) == (Ring, 7)
    with pytest.raises(CacheError, match=r"kind is .* got 'paged'"):
        make_cache(Causal(), CacheSpec(**SIZES), kind="paged")
    with pytest.raises(CacheError, match=r"count tokens, got .*slack=-1"):
        make_cache(Window.last(4), CacheSpec(**SIZES), slack=-1)
