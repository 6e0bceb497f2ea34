"""Weights of linear attention that are recorded for inspection, with packed, padded and reordered slots."""

import pytest
import torch

from headway.attention.linear_attention import LinearAttentionSpec, prepare
from headway.nn.record import LinearAttended
from headway.patterns import Causal, Full, Pattern
from tests.linear_attention.oracle import table, tensors
from tests.linear_attention.test_forms import LAYOUTS, LINEARS, N


@pytest.mark.parametrize("linear", LINEARS[:4], ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_recorded_weights_give_the_result(layout: str, pattern: Pattern, linear: LinearAttentionSpec) -> None:
    tokens, (q, k, v) = LAYOUTS[layout], tensors(3, N)
    rotation = None if linear.rotary == "none" else table(tokens.index.clamp_min(0), 6)
    attended = LinearAttended(prepare(q, k, v, linear, pattern, tokens, tokens, rotation), tokens)
    slots = tokens.index[0].ge(0).nonzero()[:, 0].flip(0)
    for head in range(4 if len(slots) else 0):
        weights_NS, result = attended.weights(slots, head), attended.result(slots, head)
        assert torch.allclose(weights_NS @ attended.values(head), result, rtol=0, atol=1e-12)
        assert not weights_NS[:, tokens.index[0] < 0].any()
