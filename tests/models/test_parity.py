"""Logits and gradients equal those of `transformers`, family by family, and small mistakes in a spec are noticed."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.models import Decoder, ModelSpec, build, cost
from headway.patterns import Causal, Window
from headway.positions import Rotary
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models import oracle

LOGITS, GRADIENTS = 1e-5, 1e-4
"""fp32, relative to the largest value: about 80 and 800 roundings of 2^-23."""

IDS = torch.randint(oracle.VOCAB, (2, 23), generator=torch.Generator().manual_seed(3))


def check(reference: Any, model: Decoder) -> None:
    """Raises AssertionError if logits or gradients differ: parity tests must pass this, and mutants must not."""
    logits, gradients = oracle.differences(reference, model, IDS)
    assert logits < LOGITS, f"logits differ by {logits:.1e}"
    assert gradients < GRADIENTS, f"gradients differ by {gradients:.1e}"


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("family", oracle.FAMILY_NAMES)
def test_logits_and_gradients_equal_transformers(family: str, kv_heads: int, tied: bool) -> None:
    reference = oracle.random_model(oracle.config(family, kv_heads, tied))
    check(reference, oracle.ours(reference, oracle.spec(family, kv_heads, tied)))


def test_dropping_a_part_is_seen() -> None:
    """The comparison can fail: norms of queries and keys, and windows, matter with these weights."""
    reference = oracle.random_model(oracle.config("qwen3", 2, False))
    with torch.no_grad():
        expected = reference(IDS).logits
    for change in ({"qk_norm": "none"}, {"patterns": Causal()}):
        model = build(oracle.spec("qwen3", 2, False, **change), seed=1).eval()
        model.load_state_dict({k: v for k, v in reference.state_dict().items() if k in model.state_dict()})
        with torch.no_grad():
            assert off(model(IDS), expected) > 100 * LOGITS


ROTARY = Rotary(1000.0, pairing="halves")
MUTANTS: dict[str, dict[str, Any]] = {
    "window + 1": {"patterns": (Causal(), Window.last(oracle.WINDOW + 1), Causal())},
    "window - 1": {"patterns": (Causal(), Window.last(oracle.WINDOW - 1), Causal())},
    "layers swapped": {"patterns": (Window.last(oracle.WINDOW), Causal(), Causal())},
    "the other pairing": {"positions": replace(ROTARY, pairing="adjacent")},
    "theta x 1.1": {"positions": replace(ROTARY, theta=1100.0)},
    "half of the dims": {"positions": replace(ROTARY, dims=oracle.HEAD_DIM // 2)},
    "another eps": {"norm_eps": 1e-6},
    "another activation": {"activation": "gelu_pytorch_tanh"},
}


@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_mutants_fail_the_comparison(family: str, mutant: str) -> None:
    reference = oracle.random_model(oracle.config(family, 2, False))
    if mutant == "another eps":  # eps matters for small inputs: shrink the embedding
        with torch.no_grad():
            reference.model.embed_tokens.weight.mul_(0.01)
    check(reference, oracle.ours(reference, oracle.spec(family, 2, False)))
    with pytest.raises(AssertionError, match="differ by"):
        check(reference, oracle.ours(reference, oracle.spec(family, 2, False, **MUTANTS[mutant])))


def test_bfloat16_is_as_near_to_the_truth_as_transformers() -> None:
    """Against the same bf16 weights in float64: at most twice the error that `transformers` makes in bf16."""
    reference = oracle.random_model(oracle.config("qwen3", 2, False)).bfloat16()
    model = build(oracle.spec("qwen3", 2, False), dtype=torch.bfloat16, seed=1)
    model.load_state_dict(reference.state_dict())
    with torch.no_grad():
        their_logits, our_logits = reference(IDS).logits.double(), model.eval()(IDS).double()
        exact = model.double()(IDS)
    rms = [float((x - exact).pow(2).mean().sqrt()) for x in (their_logits, our_logits)]
    assert rms[1] <= 2 * rms[0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_transformers(side: str) -> None:
    reference = oracle.random_model(oracle.config("qwen2", 2, False))
    model = oracle.ours(reference, oracle.spec("qwen2", 2, False))
    lengths, total = [23, 9, 1], 23
    tokens = Tokens.from_lengths(lengths, total, side)
    ids = torch.randint(oracle.VOCAB, (3, total))
    position = tokens.index.clamp(min=0)
    with torch.no_grad():
        expected = reference(ids, attention_mask=tokens.valid.long(), position_ids=position).logits
        actual = model(ids, tokens=tokens)
    assert off(actual[tokens.valid], expected[tokens.valid]) < LOGITS


def test_spec_is_what_the_state_dict_says() -> None:
    spec: ModelSpec = oracle.spec("qwen3", 2, False)
    reference = oracle.random_model(oracle.config("qwen3", 2, False))
    assert cost.parameter_count(spec) == sum(p.numel() for p in reference.parameters())
