"""Without positions, full attention does not depend on the order of its tokens."""

import pytest
import torch

from headway.nn import Attention
from headway.patterns import Full
from headway.positions import NoPositions, PositionScheme, Rotary
from headway_lab.explain import judged, permutation


@pytest.mark.parametrize(
    ("positions", "same"), [(NoPositions(), True), (Rotary(pairing="halves"), False)], ids=str
)
def test_row_16_shuffled_tokens_are_shuffled_outputs(positions: PositionScheme, same: bool) -> None:
    torch.manual_seed(0)
    layer = Attention(24, 4, 2, head_dim=6, pattern=Full(), positions=positions).double()
    x, order = torch.randn(2, 11, 24, dtype=torch.float64), torch.randperm(11)
    with torch.no_grad():
        y, shuffled = layer(x), layer(x[:, order])
    difference = float((shuffled - y[:, order]).abs().max() / y.abs().max())
    assert (difference < 1e-12) is same


def test_row_16_the_topic_sees_it() -> None:
    assert judged(permutation).seen
