"""Where tests find real data that is not part of the project."""

import os
from pathlib import Path

import pytest

from tests.serve.others import HOME

LLAMA_CPP = "llama_cpp_python-0.3.36"


def data_path(relative: str) -> Path:
    """`relative` below HEADWAY_DATA or ../shared/data; skips the test, with the reason, when it is absent."""
    root = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = root / relative
    if not path.exists():
        pytest.skip(f"needs {relative} under HEADWAY_DATA or ../shared/data (looked at {path})")
    return path


def llama_cpp_path(relative: str) -> Path:
    """`relative` in llama.cpp's sources, which the source distribution of llama-cpp-python has: among the sources that
    `others.py` keeps (HEADWAY_PEERS), else below `llama.cpp` of the data; skips as `data_path`."""
    kept = HOME / "src" / LLAMA_CPP / "vendor" / "llama.cpp" / relative
    return kept if kept.exists() else data_path(f"llama.cpp/{relative}")


def weights_path(relative: str) -> Path:
    """Published weights: `relative` in the folder `weights` of what `others.py` keeps (HEADWAY_PEERS), else of the
    data; skips as `data_path`. docs/checkpoints.md says what they are and how they come there."""
    kept = HOME / "weights" / relative
    return kept if kept.exists() else data_path(f"weights/{relative}")
