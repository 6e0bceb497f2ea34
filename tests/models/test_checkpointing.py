"""Gradient checkpointing of blocks and of their parts: the same gradients, less kept."""

from typing import Any, get_args

import pytest
import torch

from headway.errors import ConfigError
from headway.models import ModelSpec, build, cost
from headway.nn.block import Checkpointing
from tests.saved import saved_tensors, storage_sizes

VOCAB = 61
ROWS = torch.randint(VOCAB, (2, 26), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("order", ["pre", "post", "parallel"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_checkpointed_blocks_give_the_same_gradients(dropout: float, order: Any) -> None:
    spec = ModelSpec.of_depth(2, VOCAB, context=64, attention_dropout=dropout, dropout=dropout, order=order)
    model = build(spec, seed=0)
    gradients = []
    for mode in get_args(Checkpointing):
        model.gradient_checkpointing = mode
        model.zero_grad()
        torch.manual_seed(5)
        model(ROWS).pow(2).sum().backward()
        gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(list(model.parameters()))
    for expected, *recomputed in zip(*gradients, strict=True):
        assert all(torch.equal(expected, actual) for actual in recomputed)


def test_checkpointed_blocks_keep_less() -> None:
    model = build(ModelSpec.of_depth(4, VOCAB, context=64), seed=0)
    kept_bytes = {}
    for mode in get_args(Checkpointing):
        model.gradient_checkpointing = mode
        with saved_tensors() as saved:
            model.hidden(ROWS)
        kept_bytes[mode] = sum(storage_sizes(saved, model.parameters()))
    assert kept_bytes["block"] * 5 < kept_bytes["none"]
    assert kept_bytes["block"] < min(kept_bytes["attention"], kept_bytes["feed_forward"])
    for part, cause in (("attention", "attention"), ("feed_forward", "feed-forward")):
        expected = cost.activation_bytes(model.spec, ROWS.shape[1], 2)[cause]
        assert kept_bytes["none"] - kept_bytes[part] == pytest.approx(expected, rel=0.1)


def test_another_part_to_be_computed_again_is_refused() -> None:
    model = build(ModelSpec.of_depth(2, VOCAB, context=64), seed=0)
    model.gradient_checkpointing = True  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="no gradient_checkpointing True; there are none, block"):
        model(ROWS)
