"""The topic cache (row 35): its counts are the closed forms of the spec, and it notices wrong ones."""

from functools import partial

import pytest
import torch

from headway.cache import PagedLayer
from headway.models import cost
from headway_lab.explain import cache
from headway_lab.explain.report import Report, Row
from headway_lab.profiling import flops
from tests.explain import toys

CONTEXT = 512
LENGTHS = [CONTEXT // 8, CONTEXT // 4, CONTEXT // 2, CONTEXT]


@pytest.fixture
def found() -> Report:
    return toys.toy("cache").report


def test_cached_equals_recomputed_and_costs_what_the_formula_says(found: Report) -> None:
    assert all(list(found.claims.values())[:-1]), found.verdict  # the last claim is about time
    spec = cache.SPEC
    each = 4 * spec.head_dim * spec.heads * spec.layers
    assert found.column("T") == LENGTHS
    assert found.column("cache (FLOPs)") == [each * t for t in LENGTHS]
    assert found.column("no cache (FLOPs)") == [each * t * t for t in LENGTHS]
    assert found.column("window (FLOPs)") == [each * min(t, cache.WINDOW) for t in LENGTHS]
    assert found.column("window slots") == [min(t, cache.WINDOW) for t in LENGTHS]


def test_the_count_of_a_step_is_the_count_of_the_spec() -> None:
    decoder = cache.model(cache.SPEC)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    with torch.no_grad():
        past = decoder.make_cache(1)
        decoder(ids[:, :63], cache=past)
        whole, _ = flops(partial(decoder, ids[:, 63:], cache=past))
    assert whole == cost.decode_flops(cache.SPEC, 64)
    assert cache.attention_flops(whole, 1) == 64 * 4 * 16 * 4 * 2


def step(length: int, **change: float) -> Row:
    right = {
        "T": length,
        "cache (FLOPs)": float(length),
        "no cache (FLOPs)": float(length**2),
        "window (FLOPs)": float(min(length, 64)),
        "window slots": 64,
    }
    return {**right, **change}


def test_it_would_notice_other_logits_other_costs_a_larger_window_and_no_time_saved() -> None:
    right, times = (
        [step(n) for n in LENGTHS],
        {"cache": [1.0, 1.1], "window": [1.0, 1.1], "no cache": [2.0, 2.1]},
    )
    assert cache.judge(right, times, 1e-7).seen
    assert not cache.judge(right, times, 2e-5).seen
    for wrong in ({"cache (FLOPs)": 562.0}, {"no cache (FLOPs)": CONTEXT**2 * 1.01}, {"window slots": 65}):
        assert not cache.judge([*right[:-1], step(CONTEXT, **wrong)], times, 1e-7).seen
    for slow in ([1.0, 1.1], [1.0, 5.0]):
        assert not cache.judge(right, {**times, "no cache": slow}, 1e-7).seen


def test_it_would_notice_a_cache_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    take = PagedLayer.update

    def forgetful(self: PagedLayer, k: torch.Tensor, v: torch.Tensor, tokens):  # type: ignore[no-untyped-def]
        keys = take(self, k, v, tokens)
        keys.v[:, :, keys.slots[0, :1] if keys.slots is not None else [0]] = 0
        return keys

    monkeypatch.setattr(PagedLayer, "update", forgetful)
    report = cache.run(context=512)
    assert not report.claims["equal"]
