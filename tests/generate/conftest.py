"""Small models with random weights, large enough for a wrong token to show."""

from collections.abc import Sequence

import pytest
import torch

from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, Pattern, Sink, Window
from headway.text import Tokenizer
from tests.text.conftest import byte_level

MIXED = (Window.last(5) | (Causal() & Sink(2)), Causal())


def small(patterns: Pattern | Sequence[Pattern] = MIXED, *, vocab: int = 330, context: int = 64) -> Decoder:
    """Returns a decoder of two layers with grouped heads; weights of standard deviation 0.3, so that every token
    matters."""
    spec = ModelSpec.of(
        "llama", vocab=vocab, width=32, layers=2, heads=4, kv_heads=2, hidden=48, patterns=patterns,
        trained_context=context,
    )  # fmt: skip
    model = build(spec, seed=1).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="session")
def model() -> Decoder:
    return small(MIXED)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return byte_level()
