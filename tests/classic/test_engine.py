"""headway.nn.Attention equals the documents' class: outputs and gradients with the same weights."""

import pytest
import torch

from headway.classic import MultiHeadMaskedSelfAttention, precompute_freqs_cis
from headway.nn import Attention, RotaryEmbedding
from headway.positions import Rotary
from headway.tokens import Tokens

D, H, S = 32, 4, 11
RENAMED = {"W_q": "q_proj", "W_k": "k_proj", "W_v": "v_proj", "W_o": "o_proj"}


def pair(g, dtype):
    # in float32 the scores are kept near 1, so that 1e-6 is about ten roundings of the largest numbers
    std = 0.3 if dtype == torch.float64 else 0.1
    torch.manual_seed(g)
    classic = MultiHeadMaskedSelfAttention(D, H, g, max_len=8).to(dtype)
    for p in classic.parameters():
        torch.nn.init.normal_(p, std=std)
    engine = Attention(D, H, g, positions=Rotary(pairing="adjacent")).to(dtype)
    engine.load_state_dict({n.replace(n[:3], RENAMED[n[:3]]): w for n, w in classic.state_dict().items()})
    return classic, engine


def gradients(module, x, out):
    module.zero_grad()
    x.grad = None
    (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [x.grad, *(p.grad for p in module.parameters())]


def close(ours, theirs, limit):
    for a, b in zip(ours, theirs, strict=True):
        a, b = a.detach(), b.detach()
        assert (a - b).abs().max() <= limit * max(1.0, float(b.abs().max()))


@pytest.mark.parametrize("g", [4, 2, 1])
@pytest.mark.parametrize("chunks", [[11], [1] * 11, [4, 7], [7, 3, 1]], ids=str)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_outputs_and_gradients(g, chunks, dtype, limit):
    classic, engine = pair(g, dtype)
    x = torch.randn(2, S, D, dtype=dtype).requires_grad_()
    freqs = precompute_freqs_cis(D // H, S, dtype=torch.complex128)
    k, v, outs, start = None, None, [], 0
    for n in chunks:
        out, k, v = classic(x[:, start : start + n], freqs[start : start + n], True, k, v)
        outs.append(out)
        start += n
    whole = torch.cat(outs, 1)
    y = engine(x)
    close([whole], [y], limit)
    close(gradients(classic, x, whole), gradients(engine, x, y), limit)


@pytest.mark.parametrize("g", [4, 2, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_tokens(g, side):
    classic, engine = pair(g, torch.float64)
    x, lengths = torch.randn(2, S, D, dtype=torch.float64), [S, 4]
    tokens = Tokens.from_lengths(lengths, total=S, side=side)
    real = tokens.valid
    out, _, _ = classic(x, precompute_freqs_cis(D // H, S, dtype=torch.complex128), padding_mask=real)
    close([out[real]], [engine(x, tokens=tokens)[real]], 1e-12)


def test_the_other_pairing_differs():
    """The comparison notices the other pairing."""
    classic, engine = pair(2, torch.float64)
    engine.rotary = RotaryEmbedding(Rotary(pairing="halves"), D // H)
    x = torch.randn(2, S, D, dtype=torch.float64)
    out, _, _ = classic(x, precompute_freqs_cis(D // H, S, dtype=torch.complex128))
    assert (engine(x) - out).abs().max() > 1e-3
