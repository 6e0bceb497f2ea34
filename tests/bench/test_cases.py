"""The table of bench cases, and the sizes that are measured."""

import pytest

from headway.patterns import Causal, GlobalKeys, Sink, Window
from headway_lab.bench.attention import scaling
from headway_lab.bench.cases import BOTH, CASES, FORWARD, SLOW, TRAIN, narrowed
from headway_lab.bench.peers import PEERS


def test_the_table_holds_together() -> None:
    for case in CASES.values():
        assert case.heads % case.kv_heads == 0
        assert set(case.dtypes) <= set(BOTH)
        assert set(case.passes) <= {FORWARD, TRAIN}
        assert all((peer in PEERS) == (case.kind == "attention") for peer in case.peers)
        assert case.against is None or CASES[case.against].tokens
        assert case.peers or case.against, f"{case.name} is set beside nothing"


def test_a_window_shrinks_with_the_length_and_the_rest_stays() -> None:
    pattern = Window.last(512) | Causal() & GlobalKeys() | Sink(4)
    assert narrowed(pattern, 16) == Window(16) | Causal() & GlobalKeys() | Sink(4)
    assert narrowed(Window(511, 0, 4), 16) == Window(4, 0, 4)
    assert narrowed(Window.around(8), 16) == Window.around(8)
    case = CASES["window"].at(64)
    assert (case.tokens, case.pattern) == (64, Window(16))
    assert case.label(FORWARD) == "window n=64 forward"
    assert CASES["window"].at(65536).pattern == Window.last(512)
    assert CASES["global"].at(64).globals == 8


def test_quick_takes_its_own_sizes_and_leaves_out_what_is_slow() -> None:
    quick = {name: case.sized(quick=True) for name, case in CASES.items()}
    assert not any(set(case.peers) & set(SLOW) for case in quick.values())
    assert quick["causal"].tokens == CASES["causal"].quick != CASES["causal"].tokens
    assert quick["packed"] == CASES["packed"]
    assert {case.sized(quick=True, tokens=64).tokens for case in CASES.values()} == {64}
    assert [case.sized() for case in CASES.values()] == [*CASES.values()]


def test_scaling_doubles_up_to_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, numbers in ((1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))):
        monkeypatch.setattr("headway_lab.bench.attention.cores", lambda cores=cores: cores)
        assert scaling() == numbers
