"""Each row of the table of window conventions allows the pairs that the foreign code allows."""

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from headway.checkpoints import unsupported_by_transformers
from headway.checkpoints.hf.windows import CONVENTIONS, from_foreign, last_keys
from headway.models import ModelSpec
from headway.patterns import Causal, PerHead, Sink, Window
from headway.tokens import Tokens

N, W = 13, 4
FOREIGN = {  # the rule of the foreign source, as it is written there
    "sliding_window": lambda q, k: bool(sliding_window_causal_mask_function(W)(0, 0, q, k)),
    "attention_window": lambda q, k: abs(q - k) <= W // 2,
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_each_convention(name):
    tokens = Tokens.range(N)
    theirs = torch.tensor(
        [[FOREIGN[name](torch.tensor(q), torch.tensor(k)) for k in range(N)] for q in range(N)]
    )
    assert torch.equal(from_foreign(name, W).allows(tokens, tokens)[0], theirs)
    assert from_foreign(name, None) == Causal()


def test_back_to_sliding_window():
    assert last_keys(Causal()) is None
    assert last_keys(Window.last(7)) == 7
    assert last_keys(Causal() & Window(3, 2)) == 4
    assert last_keys(Window.last(7) & Window.last(3)) == 3
    for pattern in (Window.last(3, step=2), Causal() & Sink(1), PerHead(Causal(), Window.last(3))):
        spec = ModelSpec.of(
            "mistral", vocab=8, width=16, layers=1, heads=2, kv_heads=2, hidden=8, patterns=pattern
        )
        assert unsupported_by_transformers(spec) in ("patterns", "windows")
