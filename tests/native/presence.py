"""Tests that state what is chosen with the native kernels, and what without them."""

import ctypes
from pathlib import Path

import pytest

from headway.native import loader


def pretend(monkeypatch: pytest.MonkeyPatch, there: bool) -> None:
    """The native kernels are there, as far as a choice can see (nothing can be run), or they are not."""
    library = loader.Library("portable", Path("nowhere"), ctypes.CDLL(None)) if there else None
    found = loader.Found(library, None if there else "none were built")
    monkeypatch.setattr(loader, "search", lambda: found)
