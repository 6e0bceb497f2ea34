"""The rules that every test runs under hold themselves."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

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
    for made in (torch.empty(3), torch.empty_like(like), like.new_empty(3), torch.empty_strided((3,), (1,))):
        assert made.isnan().all()
    assert torch.empty(3, dtype=torch.int64).dtype == torch.int64
    assert torch.empty(3, device="meta").is_meta


def test_one_thread() -> None:
    assert torch.get_num_threads() == 1


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
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert closing in done.stdout
    assert ("skipped, which --no-skips forbids: Skipped: no data" in done.stdout) == bool(options)
