"""Which level a machine gets: of the flags that its system lists, and of what that lets a process use."""

import platform
from pathlib import Path

import pytest

from headway import processor
from headway.native import levels

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="levels of x86-64")
_LINES = Path(__file__).with_name("processors.txt").read_text().splitlines()[1:]
MACHINES = {
    name.rpartition(": ")[0]: (name.rpartition(": ")[2], frozenset(flags.split()))
    for name, flags in zip(_LINES[::2], _LINES[1::2], strict=True)
}
SAPPHIRE_RAPIDS = MACHINES["Intel Xeon, Sapphire Rapids, 96 cores"][1]


@pytest.mark.parametrize("machine", MACHINES)
def test_each_machine_gets_its_level(machine: str) -> None:
    level, flags = MACHINES[machine]
    assert levels.runnable(flags, tiles=True)[0] == level


def test_every_level_is_the_best_of_some_machine() -> None:
    """But the portable one, which is for all."""
    assert {level for level, _ in MACHINES.values()} == {*levels.LEVELS} - {"portable"}


@pytest.mark.parametrize("machine", MACHINES)
def test_without_tiles_a_machine_gets_the_best_of_the_others(machine: str) -> None:
    _, flags = MACHINES[machine]
    with_tiles, without = (levels.runnable(flags, tiles=tiles) for tiles in (True, False))
    assert without == [level for level in with_tiles if level != "amx"]
    assert without[0] == ("avx512bf16" if with_tiles[0] == "amx" else with_tiles[0])


def test_what_a_virtual_machine_turns_off_is_not_used() -> None:
    masked = {flag for flag in SAPPHIRE_RAPIDS if not flag.startswith(("avx512", "amx"))}
    assert levels.runnable(masked, tiles=True) == ["avxvnni", "avx2", "portable"]
    assert levels.runnable(masked - {"avx_vnni"}, tiles=True) == ["avx2", "portable"]
    assert levels.runnable(masked - {"avx_vnni", "fma"}, tiles=True) == ["portable"]
    assert levels.runnable(set(), tiles=True) == ["portable"]


def test_the_system_is_asked_and_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the CPU has tiles, Linux gives them or names an error; elsewhere nothing has to be asked."""
    assert processor.tiles_refused() == processor.tiles_refused.__wrapped__()
    if levels.TILES not in processor.cpu_flags():
        assert processor.tiles_refused()
    monkeypatch.setattr(processor.sys, "platform", "darwin")
    assert "not of darwin on" in processor.tiles_refused.__wrapped__()
