"""Helpers of tests of the native kernels: a skip where there are none, and a pretence that there are some, or none."""

import ctypes
from pathlib import Path

import pytest

from headway.native import loader

needs_kernels = pytest.mark.skipif(
    loader.library() is None, reason=f"no native kernels: {loader.why_missing()}"
)


def pretend(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Makes the native kernels present, as far as a choice can see (nothing can run), or missing."""
    library = loader.Library("portable", Path("nowhere"), ctypes.CDLL(None)) if there else None
    search_result = loader.Found(library, None if there else "none were built")
    monkeypatch.setattr(loader, "search", lambda: search_result)
