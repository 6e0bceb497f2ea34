"""LLaMA's RMSNorm (requirement 29) and rotary embedding (40), against the document's listing and transformers."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama as peer

from headway.classic import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb, rotate_half
from headway.positions import Rotary


def listed_norm(weight, hidden_states, eps):
    """Computes the forward as printed in the document's listing."""
    input_dtype = hidden_states.dtype
    variance = hidden_states.to(torch.float32).pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + eps)
    return (weight * hidden_states).to(input_dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_row_29_norm_is_the_listing_and_the_peer_bit_for_bit(dtype, eps):
    torch.manual_seed(0)
    x = (torch.randn(4, 33, 64) * 3).to(dtype)
    theirs = peer.LlamaRMSNorm(64, eps).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    listed, today = (LlamaRMSNorm(64, eps, cast_before_weight=c).to(dtype) for c in (False, True))
    listed.load_state_dict(theirs.state_dict())
    today.load_state_dict(theirs.state_dict())
    assert torch.equal(listed(x), listed_norm(theirs.weight, x, eps))
    assert torch.equal(today(x), theirs(x))
    assert listed(x).dtype == today(x).dtype == dtype
    if dtype == torch.bfloat16:
        assert not torch.equal(listed(x), today(x))  # the two differ in where they round
    if dtype == torch.float32:
        assert torch.equal(listed(x), today(x))


def test_row_29_norm_rescales_and_does_not_recentre():
    torch.manual_seed(0)
    norm, x = LlamaRMSNorm(64, eps=0.0).double(), torch.randn(5, 64, dtype=torch.float64)
    torch.testing.assert_close(norm(7.5 * x), norm(x), rtol=1e-13, atol=0)
    assert (norm(x + 3.0) - norm(x)).abs().max() > 0.1
    torch.testing.assert_close(norm(x).square().mean(-1), torch.ones(5).double(), rtol=1e-13, atol=0)
    by_variance = x / x.var(
        -1, keepdim=True, unbiased=False
    )  # slip E13: the formula that the document gives in words
    assert (norm(2 * x) - norm(x)).abs().max() < 1e-12 < (by_variance - norm(x)).abs().max()


def test_norm_bias_is_learnable():
    norm = LlamaRMSNorm(4, bias=True)
    norm(torch.randn(3, 4)).sum().backward()
    assert set(norm.state_dict()) == {"weight", "bias"}
    assert norm.bias.grad.tolist() == [3.0] * 4
    assert set(LlamaRMSNorm(4).state_dict()) == {"weight"}


def test_tables_are_rebuilt_when_longer():
    """Requirement 40: a table grown from 2048 to 3000 equals one of 3000; angles stay float32 for every dtype."""
    built = LlamaRotaryEmbedding(16)
    assert built.max_seq_len_cached == 2048
    for dtype in (
        torch.float16,
        torch.bfloat16,
    ):  # the listed code would keep a half-precision table from here on
        cos, _ = built(torch.zeros(1, 1, 1, 16, dtype=dtype), seq_len=3000)
        assert cos.dtype == dtype
        assert cos.shape == (1, 1, 3000, 16)
    assert built.max_seq_len_cached == 3000
    fresh = LlamaRotaryEmbedding(16, max_position_embeddings=3000)
    x = torch.zeros(1, 1, 1, 16)
    for module in (built, built.half()):
        for ours, theirs in zip(module(x, seq_len=3000), fresh(x, seq_len=3000), strict=True):
            assert ours.dtype == torch.float32
            assert torch.equal(ours, theirs)
    short, _ = built(x, seq_len=5)
    assert short.shape == (1, 1, 5, 16)
    assert not built.state_dict()


def test_rotation_equals_the_peer_bit_for_bit():
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=2048)
    position_ids = torch.randint(0, 2048, (2, 9))
    for dtype in (torch.float32, torch.bfloat16):
        q, k = torch.randn(2, 4, 9, 16).to(dtype), torch.randn(2, 2, 9, 16).to(dtype)
        cos, sin = LlamaRotaryEmbedding(16)(q, seq_len=2048)
        ours = apply_rotary_pos_emb(q, k, cos, sin, position_ids)
        theirs = peer.apply_rotary_pos_emb(q, k, *peer.LlamaRotaryEmbedding(config)(q, position_ids))
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == dtype
            assert torch.equal(a, b)


def test_rotation_equals_the_engines_in_float32():
    """Each table of float32 angles errs by up to position * 2^-24; those of Rotary do not."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 9, 16)
    position_ids = torch.randint(0, 300, (2, 9))
    cos, sin = LlamaRotaryEmbedding(16)(q, seq_len=300)
    rotary = Rotary(pairing="halves")
    for ours, x in zip(apply_rotary_pos_emb(q, k, cos, sin, position_ids), (q, k), strict=True):
        limit = 4 * 300 * 2**-24 * x.abs().max()
        torch.testing.assert_close(ours, rotary.rotate(x, position_ids), rtol=0, atol=float(limit))


def test_rotate_half_is_a_quarter_turn():
    x = torch.arange(6.0)
    assert rotate_half(x).tolist() == [-3, -4, -5, 0, 1, 2]
    assert torch.equal(rotate_half(rotate_half(x)), -x)


def test_positions_outside_the_tables_are_refused():
    q = torch.zeros(1, 1, 2, 4)
    cos, sin = LlamaRotaryEmbedding(4)(q, seq_len=10)
    with pytest.raises(
        ValueError, match=r"position_ids 3..10 lie outside tables of 10 rows; call .* seq_len"
    ):
        apply_rotary_pos_emb(q, q, cos, sin, torch.tensor([[3, 10]]))
    with pytest.raises(ValueError, match=r"position_ids -1..3"):
        apply_rotary_pos_emb(q, q, cos, sin, torch.tensor([[-1, 3]]))
    with pytest.raises(ValueError, match="dim must be even and at least 2, got 5"):
        LlamaRotaryEmbedding(5)
