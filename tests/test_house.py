"""Tests of the test setup: fresh memory, threads, mutants, options, and stale native libraries."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.native import build
from tests.mutants import __main__ as mutants

REPOSITORY = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
"""PYTHONPATH with which a copy of conftest.py finds the package `tests`."""
CASES = """
import pytest
def test_passes(): pass
def test_has_no_data(): pytest.skip("no data")
@pytest.mark.slow
def test_takes_long(): pass
@pytest.mark.xfail
def test_is_known_to_fail(): assert False
"""


def test_fresh_memory_is_nan_and_integers_are_left_alone() -> None:
    like = torch.ones(3)
    for tensor in (
        torch.empty(3),
        torch.empty_like(like),
        like.new_empty(3),
        torch.empty_strided((3,), (1,)),
    ):
        assert tensor.isnan().all()
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert torch.empty(3, device="meta").is_meta


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1


def test_kept_mutants_are_of_this_code_and_name_tests_that_are_there() -> None:
    """`make mutants` shows whether the tests kill them."""
    for mutant in mutants.read(mutants.TABLES):
        assert mutant.stale is None, f"{mutant.name} is {mutant.stale}; move it along"
        for test in mutant.tests:
            file, _, name = test.partition("::")
            name = name.partition("[")[0]
            assert name in (mutants.ROOT / file).read_text(), f"{mutant.name}: there is no {test}"


def test_tests_of_mutants_are_collected(collected: list[str], pytestconfig: pytest.Config) -> None:
    """Checks the files that this session collects as a whole: with `make test`, all of them."""
    in_part = {argument.partition("::")[0] for argument in pytestconfig.args if "::" in argument}
    files = {test.partition("::")[0] for test in collected} - in_part
    all_mutants = mutants.read(mutants.TABLES)
    checked = [m for m in all_mutants if {test.partition("::")[0] for test in m.tests} <= files]
    assert mutants.not_collected(checked, collected) == []


MUTANT = mutants.Mutant("m", "a.py", ("tests/test_a.py::test_b[c]",), "x", "y")


def test_a_test_that_is_not_collected_is_noticed() -> None:
    assert mutants.not_collected([MUTANT], ["tests/test_a.py::test_b[c]"]) == []
    for collected in (
        [],
        ["tests/test_a.py::test_b[d]"],
        ["tests/test_a.py::test_bc[c]"],
        ["tests/test_a.py: 3"],
    ):
        assert mutants.not_collected([MUTANT], collected) == ["m: tests/test_a.py::test_b[c]"]
    kernels = replace(MUTANT, file="a.cpp")
    assert mutants.not_collected([kernels], ["tests/test_a.py::test_b[avx2]"]) == []
    whole = replace(MUTANT, tests=("tests/test_a.py", "tests/test_a.py::TestB"))
    assert mutants.not_collected([whole], ["tests/test_a.py::TestB::runTest"]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("def test_a(): assert False", "killed by test_a"),
        ("def test_a(): assert True", "lived"),
        ("import pytest\ndef test_a(): pytest.skip('no data')", "broken"),
        ("import nothing_of_that_name\ndef test_a(): pass", "broken"),
        ("import pytest\n@pytest.fixture\ndef made(): assert False\ndef test_a(made): pass", "broken"),
        ("import pytest\n@pytest.mark.slow\ndef test_a(): assert False", "killed by test_a"),
        ("def test_b(): assert False", "broken"),
    ],
)
def test_a_mutant_is_killed_by_a_test_that_fails_and_by_nothing_else(
    test: str, outcome: str, tmp_path: Path
) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\nmarkers = ['slow', 'peers']\n")
    shutil.copy(Path(__file__).with_name("conftest.py"), tmp_path)
    (tmp_path / "test_m.py").write_text(test)
    process = subprocess.run(
        [sys.executable, *mutants.PYTEST, *mutants.TRIED, "test_m.py::test_a"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": REPOSITORY},
        capture_output=True,
        text=True,
    )
    assert mutants.verdict(MUTANT, process.returncode, process.stdout).startswith(outcome)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "closing"),
    [
        ([], "1 passed, 1 skipped, 1 deselected, 1 xfailed"),
        (["--slow", "--no-skips"], "1 failed, 2 passed, 1 xfailed"),
    ],
)
def test_slow_tests_and_skips_are_decided_on_the_command_line(
    options: list[str], closing: str, tmp_path: Path
) -> None:
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_cases.py").write_text(CASES)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    command = [sys.executable, "-m", "pytest", "-q", *options]
    environment = {**os.environ, "PYTHONPATH": REPOSITORY}
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert closing in process.stdout
    assert ("skipped, which --no-skips forbids: Skipped: no data" in process.stdout) == bool(options)


@pytest.mark.slow
@pytest.mark.parametrize(("wanted", "code"), [("", 2), ("0", 0)])
def test_a_stale_native_library_is_said_once_and_before_any_test(
    wanted: str, code: int, tmp_path: Path
) -> None:
    """With HEADWAY_NATIVE set, the tests run all the same."""
    shutil.copy(Path(__file__).parent / "conftest.py", tmp_path)
    (tmp_path / "test_cases.py").write_text("def test_passes(): pass\n")
    (tmp_path / build.file_name("portable")).write_bytes(b"headway-source-hash:0123456789abcdef\0")
    environment = {**os.environ, "PYTHONPATH": REPOSITORY, "HEADWAY_NATIVE": wanted}
    environment["HEADWAY_NATIVE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert process.returncode == code, process.stdout + process.stderr
    message = "the native library is stale (portable): python -m headway.native.build"
    assert (message in process.stdout + process.stderr) == ("passed" not in process.stdout) == (code == 2)
