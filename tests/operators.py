"""Norms, gates, rotations and products computed by formulas in torch's operations."""

import pytest

from headway.native import rows
from headway.nn import products


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces fused operators by formulas; tests/native/test_rows.py compares the two."""
    monkeypatch.setattr(rows, "runs", lambda *tensors: False)
    monkeypatch.setattr(products, "_slow_mkl", lambda: False)
