"""The memory that kernels read, write and request: nothing outside of their tensors, and no more than they need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headway.errors import BuildError
from headway.native import build
from tests.native.conftest import EVERY_LEVEL


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD is for ELF")
def test_kernels_stay_in_their_memory_and_say_where_there_is_none(tmp_path: Path) -> None:
    """At every level; see `fenced.py`."""
    try:
        compiler = build.compiler()
    except BuildError as error:
        pytest.skip(str(error))
    fence = tmp_path / "fence.so"
    source = Path(__file__).with_name("fence.c")
    subprocess.run(
        [*compiler, "-x", "c", str(source), "-O1", "-shared", "-fPIC", "-o", str(fence), "-ldl"], check=True
    )
    result = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-m", "tests.native.fenced", *EVERY_LEVEL],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "LD_PRELOAD": str(fence)},
    )
    assert result.returncode == 0, result.stdout
