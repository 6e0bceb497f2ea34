"""A native step rotates by the same table as the model's layers, to the bit."""

import pytest
import torch

from headway.models import rotated
from headway.models.rotated import Rotated
from headway.nn import RotaryEmbedding
from headway.positions import Rotary, RotaryTable
from headway.tokens import Tokens


@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("pairing", ["halves", "adjacent"])
def test_its_rows_are_those_of_the_tokens(
    pairing: str, trainable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are equal within the rows that are kept, at their end and beyond it, also with frequencies that are
    trained between two steps."""
    monkeypatch.setattr(rotated, "KEPT", 100)
    rotary = RotaryEmbedding(Rotary(100.0, pairing=pairing, trainable=trainable), 12)
    step = Rotated(rotary, torch.float32)
    with torch.no_grad():
        for index in ([0], [1], [63, 2, 64], [5, 99], [100, 3], [98]):
            if rotary.frequency_offset is not None:
                rotary.frequency_offset += 0.01
            tokens = Tokens(torch.tensor([index]))
            step.turn(tokens)
            table = rotary(tokens, torch.float32)
            assert isinstance(table, RotaryTable)
            assert torch.equal(step.cos[: len(index)], table.cos[0])
            assert torch.equal(step.sin[: len(index)], table.sin[0])
