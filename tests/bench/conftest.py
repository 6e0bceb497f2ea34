"""Fixtures of the bench's tests."""

import pytest

from tests.bench import listed


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    listed.steady(monkeypatch)
