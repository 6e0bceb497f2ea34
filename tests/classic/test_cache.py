"""The cache of the classic layer: any chunking equals one call; padding masks cover cached keys."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.classic.test_attention import KINDS, S, causal, freqs, inputs, made


def test_mask_is_a_buffer_that_grows():
    layer = made(2, max_len=5)
    assert layer.mask.shape == (1, 1, 5, 5)
    assert not layer.mask.requires_grad
    assert "mask" in dict(layer.named_buffers())
    assert (layer.mask[0, 0].diagonal() == 0).all()
    assert torch.equal(layer.mask[0, 0] == 0, causal(5))
    big, x = made(2, max_len=64), inputs(s=23)
    big.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x, freqs(23))[0], big(x, freqs(23))[0])
    assert layer.mask.shape == (1, 1, 23, 23)
    _, k, v = layer(x, freqs(23), use_kv_cache=True)
    layer(x[:, :1], freqs(24)[23:], cache_k=k, cache_v=v)
    assert layer.mask.shape == (1, 1, 46, 46)
    assert "mask" in dict(layer.named_buffers())


@pytest.mark.parametrize("g", KINDS)
@given(cuts=st.lists(st.integers(1, S - 1), unique=True, max_size=S - 1).map(sorted))
def test_any_chunking_equals_one_shot_with_gradients(g, cuts):
    """Requirement 36; gradients flow through caches, so they are equal, too."""
    results = []
    for edges in ([0, S], [0, *cuts, S]):
        layer, x, k, v, outs = made(g), inputs().requires_grad_(), None, None, []
        for a, b in pairwise(edges):
            out, k, v = layer(x[:, a:b], freqs(S)[a:b], use_kv_cache=True, cache_k=k, cache_v=v)
            outs.append(out)
        whole = torch.cat(outs, 1)
        (whole * torch.arange(1.0, 1 + whole.numel()).view_as(whole)).sum().backward()
        results.append([whole, k, v, x.grad, *(p.grad for p in layer.parameters())])
    for one_shot, chunked in zip(*results, strict=True):
        torch.testing.assert_close(chunked, one_shot, rtol=1e-11, atol=1e-11)


def test_use_kv_cache_false_leaves_caches_untouched():
    layer, x = made(2), inputs()
    full, k, _ = layer(x, freqs(S), use_kv_cache=True)
    _, k5, v5 = layer(x[:, :5], freqs(S)[:5], use_kv_cache=True)
    copies = k5.clone(), v5.clone()
    out, k_back, v_back = layer(x[:, 5:], freqs(S)[5:], use_kv_cache=False, cache_k=k5, cache_v=v5)
    assert k_back is k5
    assert v_back is v5
    assert torch.equal(k5, copies[0])
    assert torch.equal(v5, copies[1])
    torch.testing.assert_close(out, full[:, 5:], rtol=0, atol=1e-13)  # the layer still attends over the cache
    assert k.shape[1] == S
    assert torch.equal(k[:, :5], k5)


def test_padding_mask_covers_the_cache():
    layer, x = made(2), inputs()
    real = torch.tensor([[False, False] + [True] * 5, [True] * S])
    full, _, _ = layer(x, freqs(S), padding_mask=real)
    _, k, v = layer(x[:, :4], freqs(S)[:4], True, padding_mask=real[:, :4])
    out, _, _ = layer(x[:, 4:], freqs(S)[4:], True, k, v, padding_mask=real)
    torch.testing.assert_close(out, full[:, 4:], rtol=0, atol=1e-13)
    with pytest.raises(
        ValueError, match=r"must be \(batch, keys\) = \(2, 7\), cached keys first, got \(2, 3\)"
    ):
        layer(x[:, 4:], freqs(S)[4:], True, k, v, padding_mask=real[:, 4:])
