"""Norms, gates, rotations and products as formulas in torch's operations."""

import pytest

from headway.native import rows
from headway.nn import products


def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formulas in place of fused operators, which tests/native/test_rows.py compares with them."""
    monkeypatch.setattr(rows, "runs", lambda *tensors: False)
    monkeypatch.setattr(products, "_slow_mkl", lambda: False)
