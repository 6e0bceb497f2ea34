"""A helper of tests of what is chosen with the native kernels, and what without them."""

import ctypes
from pathlib import Path

import pytest

from headway.native import loader


def pretend(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """Makes the native kernels present, as far as a choice can see (nothing can run), or missing."""
    library = loader.Library("portable", Path("nowhere"), ctypes.CDLL(None)) if there else None
    search_result = loader.Found(library, None if there else "none were built")
    monkeypatch.setattr(loader, "search", lambda: search_result)
