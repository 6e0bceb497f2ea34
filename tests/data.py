"""Where tests find real data that is not part of the project."""

import os
from pathlib import Path

import pytest


def data_path(relative: str) -> Path:
    """`relative` below HEADWAY_DATA or ../shared/data; skips the test, with the reason, when it is absent."""
    root = Path(os.environ.get("HEADWAY_DATA") or Path(__file__).parents[2] / "shared" / "data")
    path = root / relative
    if not path.exists():
        pytest.skip(f"needs {relative} under HEADWAY_DATA or ../shared/data (looked at {path})")
    return path
