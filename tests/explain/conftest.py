"""The report of every topic at toy size."""

import pytest

from tests.explain import toys


@pytest.fixture
def reports() -> toys.Reports:
    """Returns reports of two seeds, layers trained for 10 steps, and stacks of up to 16 layers."""
    return toys.Reports()
