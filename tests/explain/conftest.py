"""The report of every topic at toy size."""

import pytest

from tests.explain import toys


@pytest.fixture
def reports() -> toys.Reports:
    """Two seeds, layers trained for 10 steps, stacks up to 16 layers."""
    return toys.Reports()
