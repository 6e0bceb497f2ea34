"""The table of cases, and what is measured of it."""

from dataclasses import replace

import pytest

from headway.errors import BackendError, ConfigError
from headway.patterns import Causal, GlobalKeys, Sink, Window
from headway_lab.bench.attention import Request, _planned, scaling
from headway_lab.bench.cases import BOTH, CASES, FORWARD, NAMES, SLOW, TRAIN, chosen, named, narrowed
from headway_lab.bench.peers import PEERS, floor


def test_the_table_holds_together() -> None:
    assert len(set(NAMES)) == len(CASES)
    for case in CASES:
        assert case.heads % case.kv_heads == 0
        assert set(case.dtypes) <= set(BOTH)
        assert set(case.passes) <= {FORWARD, TRAIN}
        assert all((PEERS[peer].build is not None) == (case.kind == "attention") for peer in case.peers)
        assert case.against is None or named(case.against).tokens
        assert case.peers or case.against, f"{case.name} is set beside nothing"
        for peer in case.peers:
            assert all(0 < floor(peer, dtype) < 1 for dtype in case.dtypes)


def test_a_window_shrinks_with_the_length_and_the_rest_stays() -> None:
    pattern = Window.last(512) | Causal() & GlobalKeys() | Sink(4)
    assert narrowed(pattern, 16) == Window(16) | Causal() & GlobalKeys() | Sink(4)
    assert narrowed(Window(511, 0, 4), 16) == Window(4, 0, 4)
    assert narrowed(Window.around(8), 16) == Window.around(8)
    case = named("window").at(64)
    assert (case.tokens, case.pattern) == (64, Window(16))
    assert case.label(FORWARD) == "window n=64 forward"
    assert named("window").at(65536).pattern == Window.last(512)
    assert named("global").at(64).globals == 8


def test_an_unknown_case_lists_the_cases() -> None:
    with pytest.raises(ConfigError, match=r"no case 'windw' \(did you mean \"window\"\?\); known: causal, "):
        chosen(["windw"])
    with pytest.raises(BackendError, match=r"unknown backend 'bandde' .*known: auto, dense"):
        Request(cases=CASES, backend="bandde")


def test_quick_takes_its_own_sizes_and_leaves_out_what_is_slow() -> None:
    quick = chosen(quick=True)
    assert 0 < len(quick) < len(CASES)
    assert not any(set(case.peers) & set(SLOW) for case in quick)
    assert {case.name: case.tokens for case in quick}["causal"] == named("causal").quick
    assert [case.name for case in chosen(["packed"], quick=True)] == ["packed"]
    assert {case.tokens for case in chosen(tokens=64)} == {64}
    assert chosen() == list(CASES)


def test_rows_come_case_by_case_and_with_a_deadline_breadth_first() -> None:
    cases = [named("causal"), named("decode-4")]
    request = Request(cases=cases)
    names = [(case.name, dtype, direction) for case, dtype, direction in _planned(request)]
    assert names[:4] == [("causal", dtype, direction) for dtype in BOTH for direction in (FORWARD, TRAIN)]
    broad = [case.name for case, _, _ in _planned(replace(request, seconds=1.0))]
    assert broad == ["causal", "decode-4", "causal", "decode-4", "causal", "causal"]
    only = _planned(replace(request, dtypes=("bfloat16",), passes=(TRAIN,)))
    assert [(case.name, dtype) for case, dtype, _ in only] == [("causal", "bfloat16")]


def test_scaling_doubles_up_to_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, numbers in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        monkeypatch.setattr("headway_lab.bench.attention.cores", lambda cores=cores: cores)
        assert scaling() == numbers
