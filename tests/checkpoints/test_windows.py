"""One test per row of the table of window conventions: the pairs that the foreign code allows."""

import pytest
import torch
from transformers.masking_utils import sliding_window_causal_mask_function

from headway.checkpoints.hf.windows import CONVENTIONS, from_foreign, last_keys
from headway.errors import ConfigError
from headway.patterns import Causal, Full, PerHead, Sink, Window
from headway.tokens import Tokens

N, W = 13, 4
FOREIGN = {  # the rule of the foreign source, as it is written there
    "huggingface sliding_window": lambda q, k: bool(sliding_window_causal_mask_function(W)(0, 0, q, k)),
    "huggingface attention_window": lambda q, k: abs(q - k) <= W // 2,
    "huggingface local_attention": lambda q, k: abs(q - k) <= W // 2,
    "longformer attention_window": lambda q, k: abs(q - k) <= W,
    "gpt-neo window_size": lambda q, k: k <= q and not k <= q - W,
    "flash-attn left": lambda q, k: q - W <= k <= q,
    "headway before": lambda q, k: q - W <= k <= q,
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_each_convention(name):
    tokens = Tokens.range(N)
    theirs = torch.tensor(
        [[FOREIGN[name](torch.tensor(q), torch.tensor(k)) for k in range(N)] for q in range(N)]
    )
    assert torch.equal(from_foreign(name, W).allows(tokens, tokens)[0], theirs)
    assert from_foreign(name, None) == Causal()


def test_there_is_a_rule_for_every_row():
    assert FOREIGN.keys() == CONVENTIONS.keys()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("huggingface sliding_window", 0, "sliding_window must be a whole number of at least 1"),
        ("huggingface sliding_window", True, "got True"),
        ("huggingface attention_window", 5, "attention_window must be even .*, got 5"),
        ("flash-attn left", -1, "at least 0"),
        ("hugingface sliding_window", 4, "did you mean"),
    ],
)
def test_windows_that_mean_nothing(name, value, message):
    with pytest.raises(ConfigError, match=message):
        from_foreign(name, value)


def test_back_to_sliding_window():
    assert last_keys(Causal()) is None
    assert last_keys(Window.last(7)) == 7
    assert last_keys(Causal() & Window(3, 2)) == 4
    assert last_keys(Window.last(7) & Window.last(3)) == 3
    for odd in (
        Full(),
        Window.around(2),
        Window.last(3, step=2),
        Causal() & Sink(1),
        PerHead(Causal(), Causal()),
    ):
        with pytest.raises(ConfigError, match="sliding_window cannot express it"):
            last_keys(odd)
