"""Paths of real data that is not part of the project; tests are skipped without it."""

import os
from pathlib import Path

import pytest

from tests.serve.others import HOME

LLAMA_CPP = "llama_cpp_python-0.3.36"


def data_path(relative: str) -> Path:
    """Returns `relative` below HEADWAY_DATA or ../shared/data; skips the test, with the reason, if it is absent."""
    root = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = root / relative
    if not path.exists():
        pytest.skip(f"needs {relative} under HEADWAY_DATA or ../shared/data (looked at {path})")
    return path


def llama_cpp_path(relative: str) -> Path:
    """Returns `relative` in llama.cpp's sources, which are part of llama-cpp-python's source distribution: from those
    that `others.py` keeps (HEADWAY_PEERS), else below `llama.cpp` in the data. Skips like `data_path`."""
    source = HOME / "src" / LLAMA_CPP / "vendor" / "llama.cpp" / relative
    return source if source.exists() else data_path(f"llama.cpp/{relative}")


def weights_path(relative: str) -> Path:
    """Returns `relative` among published weights: in the folder `weights` that `others.py` keeps (HEADWAY_PEERS), else
    of the data. Skips like `data_path`. docs/checkpoints.md says which weights these are and how to get them."""
    file = HOME / "weights" / relative
    return file if file.exists() else data_path(f"weights/{relative}")
