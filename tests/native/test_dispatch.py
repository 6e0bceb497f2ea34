"""The level that a machine gets, by the flags that its system lists and by what the system lets a process use."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway import processor
from headway.native import levels

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
    """Except the portable one, which is for all."""
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


def test_arm_levels_ask_for_what_their_instructions_need() -> None:
    flags = MACHINES["AWS Graviton 3, Neoverse V1"][1]
    assert levels.runnable(flags, tiles=False) == ["i8mm", "dotprod", "neon", "portable"]
    for lacking in ("i8mm", "bf16"):
        assert levels.runnable(flags - {lacking}, tiles=False)[0] == "dotprod"
    for lacking in ("asimddp", "atomics"):
        assert levels.runnable(flags - {lacking}, tiles=False)[0] == "neon"
    assert levels.runnable(flags - {"asimd"}, tiles=False) == ["portable"]


@pytest.mark.parametrize(
    ("named", "level"),
    [
        ({"AdvSIMD"}, "neon"),
        ({"AdvSIMD", "FEAT_LSE", "FEAT_RDM", "armv8_crc32", "FEAT_DotProd"}, "dotprod"),
        ({*processor.APPLE}, "i8mm"),
    ],
)
def test_macos_names_instruction_sets_otherwise(
    named: set[str], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The levels of M1 and of M2, and one that no Mac has."""
    monkeypatch.setattr(processor.sys, "platform", "darwin")
    monkeypatch.setattr(processor.platform, "machine", lambda: "arm64")
    monkeypatch.setattr(processor, "sysctl", lambda name: name.rpartition(".")[2] in named)
    assert levels.runnable(processor.cpu_flags.__wrapped__(), tiles=False)[0] == level


def test_the_system_is_asked_and_says_why_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the CPU has tiles, Linux grants them or names an error; elsewhere nothing is requested."""
    if levels.TILES not in processor.cpu_flags():
        assert processor.tiles_refused()
    monkeypatch.setattr(processor.sys, "platform", "linux")
    monkeypatch.setattr(processor.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(processor.ctypes, "get_errno", lambda: errno.EPERM)
    for result, reason in ((0, ""), (-1, f"(arch_prctl, ARCH_REQ_XCOMP_PERM: {os.strerror(errno.EPERM)})")):
        system = SimpleNamespace(syscall=lambda *words, result=result: result)
        monkeypatch.setattr(processor.ctypes, "CDLL", lambda *_, system=system, **options: system)
        refused = processor.tiles_refused.__wrapped__()
        assert refused.endswith(reason)
        assert bool(refused) == bool(reason)
    monkeypatch.setattr(processor.sys, "platform", "darwin")
    assert "this is darwin on" in processor.tiles_refused.__wrapped__()
