"""MultiHeadMaskedSelfAttention: requirements 1, 3-14, 36, 60 and slips E5-E8, E12, E18 (docs/requirements.md)."""

import pytest
import torch

from headway.classic import MultiHeadMaskedSelfAttention, masked_softmax, precompute_freqs_cis
from tests.classic.oracle import loops, turned

D, H, S = 16, 4, 7
KINDS = [4, 2, 1]  # MHA, GQA, MQA


def made(g, seed=0, dtype=torch.float64, max_len=32, **options):
    torch.manual_seed(seed)
    layer = MultiHeadMaskedSelfAttention(D, H, g, max_len, **options).to(dtype)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return layer


def freqs(end, dtype=torch.complex128):
    return precompute_freqs_cis(D // H, end, dtype=dtype)


def inputs(b=2, s=S, seed=1, dtype=torch.float64):
    return torch.randn(b, s, D, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def reference(layer, x, allowed):
    """Computes the layer by four loops over heads, queries, keys and coordinates, with rotated queries and keys."""
    outs = []
    for row, seen in zip(x.double(), allowed, strict=True):
        q, k, v = (
            (row @ w.weight.double().T).unflatten(-1, (-1, D // H)).transpose(0, 1)
            for w in (layer.W_q, layer.W_k, layer.W_v)
        )
        out = loops(turned(q, 0), turned(k, 0), v, seen)
        outs.append(out.transpose(0, 1).flatten(1) @ layer.W_o.weight.double().T)
    return torch.stack(outs)


def causal(s=S):
    return torch.ones(s, s, dtype=torch.bool).tril()


@pytest.mark.parametrize("g", KINDS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@torch.no_grad()
def test_equals_four_loops_in_float64(g, dtype, limit):
    layer, x = made(g, dtype=dtype), inputs(dtype=dtype)
    expected = reference(layer, x, [causal()] * 2)
    out, k, v = layer(x, freqs(S))
    assert (out - expected).abs().max() < limit * max(1.0, expected.abs().max())
    assert k is None
    assert v is None
    wrong = reference(layer, x, [torch.ones(S, S, dtype=torch.bool)] * 2)
    assert (out - wrong).abs().max() > 1e-2


def test_weights_are_distributions():
    layer, seen = made(2), []
    layer.softmax.register_forward_hook(lambda _m, _a, out: seen.append(out))
    layer(inputs(), freqs(S))
    assert (seen[0] >= 0).all()
    torch.testing.assert_close(seen[0].sum(-1), torch.ones(2, H, S, dtype=torch.float64), rtol=0, atol=1e-15)
    assert not seen[0].triu(1).any()


@pytest.mark.parametrize("g", KINDS)
def test_every_shape_of_the_document(g):
    """Requirement 7: shapes are recorded by hooks."""
    layer, shapes = made(g), {}

    def note(name):
        def hook(_module, args, out):
            shapes.setdefault(name, []).append((tuple(args[0].shape), tuple(out.shape)))

        return hook

    for name, module in layer.named_children():
        module.register_forward_hook(note(name))
    out, k, v = layer(inputs(), freqs(S), use_kv_cache=True)
    b, s, hd = 2, S, D // H
    assert shapes == {
        "W_q": [((b, s, D), (b, s, D))],
        "split_q": [((b, s, D), (b, s, H, hd))],
        "W_k": [((b, s, D), (b, s, g * hd))],
        "W_v": [((b, s, D), (b, s, g * hd))],
        "split_kv": [((b, s, g * hd), (b, s, g, hd))] * 2,
        "repeat_kv": [((b, s, g, hd), (b, s, H, hd))] * 2,
        "softmax": [((b, H, s, s), (b, H, s, s))],
        "dropout_attention": [((b, H, s, s), (b, H, s, s))],
        "W_o": [((b, s, D), (b, s, D))],
        "dropout_output": [((b, s, D), (b, s, D))],
    }
    assert out.shape == (b, s, D)
    assert k.shape == v.shape == (b, s, g, hd)


def test_parameters_are_four_matrices_without_bias():
    assert {n: tuple(p.shape) for n, p in made(4).named_parameters()} == {
        f"W_{n}.weight": (D, D) for n in "qkvo"
    }
    assert sum(p.numel() for p in made(4).parameters()) == 4 * D * D
    assert set(made(1).state_dict()) == {f"W_{n}.weight" for n in "qkvo"}
    assert made(1).W_k.weight.shape == (D // H, D)


def test_groups_share_their_own_keys():
    """Slip E5, requirement 9: query head i reads key/value head i // (h/g), which equals MHA with repeated heads."""
    few, many = made(2), made(4)
    many.load_state_dict(
        {
            n: w if n[2] in "qo" else w.unflatten(0, (2, -1)).repeat_interleave(2, 0).flatten(0, 1)
            for n, w in few.state_dict().items()
        }
    )
    torch.testing.assert_close(few(inputs(), freqs(S))[0], many(inputs(), freqs(S))[0], rtol=0, atol=1e-13)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("g", [4, 2])
def test_padded_batch_equals_each_row_alone(side, form, g):
    """Requirements 12, 13; slip E8: padding gets -inf."""
    layer, lengths, alone = made(g), [7, 4, 1], []
    x = torch.full((3, S, D), 100.0, dtype=torch.float64)
    real = torch.zeros(3, S, dtype=torch.bool)
    for row, n in enumerate(lengths):
        at = slice(S - n, S) if side == "left" else slice(0, n)
        x[row, at], real[row, at] = inputs(1, n, seed=row)[0], True
        alone.append(layer(inputs(1, n, seed=row), freqs(n))[0][0])
    mask = (
        real if form == "bool" else torch.zeros(3, S, dtype=torch.float64).masked_fill(~real, float("-inf"))
    )
    x.requires_grad_()
    out, _, _ = layer(x, freqs(S), padding_mask=mask)
    torch.testing.assert_close(out[real], torch.cat(alone), rtol=0, atol=1e-12)
    out.square().sum().backward()
    grads = [x.grad, *(p.grad for p in layer.parameters())]
    assert all(torch.isfinite(g).all() for g in grads)
    if side == "left":
        assert (out[~real] == 0).all()  # padding on the left sees only padding
        assert (x.grad[~real] == 0).all()


def test_a_row_of_padding_only():
    layer, x = made(2, dtype=torch.float32), inputs(dtype=torch.float32).requires_grad_()
    mask = torch.tensor([[True] * S, [False] * S])
    out, _, _ = layer(x, freqs(S), padding_mask=mask)
    out.sum().backward()
    assert (out[1] == 0).all()
    assert (x.grad[1] == 0).all()
    assert torch.isfinite(x.grad).all()
    assert x.grad[0].abs().max() > 0


@pytest.mark.parametrize("g", KINDS)
def test_no_leakage_of_the_future(g):
    """Requirement 14: bitwise, and by gradients."""
    layer, x = made(g), inputs(1)
    out = layer(x, freqs(S))[0]
    for t in range(S):
        other = x.clone()
        other[:, t:] = torch.randn_like(other[:, t:])
        assert torch.equal(layer(other, freqs(S))[0][:, :t], out[:, :t])
    jacobian = (
        torch.autograd.functional.jacobian(lambda x: layer(x, freqs(S))[0][0].sum(-1), x)[:, 0].abs().sum(-1)
    )
    assert not jacobian.triu(1).any()
    assert (jacobian.diagonal() > 0).all()  # slip E12: a token sees itself


def test_gradcheck():
    layer, x = made(2), inputs(1, 4).requires_grad_()
    mask = torch.tensor([[False, True, True, True]])
    assert torch.autograd.gradcheck(lambda x: layer(x, freqs(4), padding_mask=mask)[0], x)


@pytest.mark.parametrize(("where", "at"), [("dropout_attention", 0.25), ("dropout_output", 0.5)])
def test_each_dropout_acts_in_its_own_place(where, at):
    """Requirement 6: zeros at rate p on the weights, or on the output, and nowhere else; none in eval mode."""
    layer, seen = made(4, **{where: at}), {}
    for name in ("dropout_attention", "dropout_output"):
        getattr(layer, name).register_forward_hook(
            lambda _m, args, out, name=name: seen.update({name: (args[0], out)})
        )
    x = inputs(24, 20)
    layer(x, freqs(20))
    for name, (before, after) in seen.items():
        nonzero = before != 0
        n, dropped = int(nonzero.sum()), float((after[nonzero] == 0).double().mean())
        if name == where:
            assert abs(dropped - at) < 5 * (at * (1 - at) / n) ** 0.5
            torch.testing.assert_close(after[after != 0], before[after != 0] / (1 - at))
        else:
            assert dropped == 0
    layer.eval()
    assert torch.equal(layer(x, freqs(20))[0], layer(x, freqs(20))[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_near_float64(dtype):
    layer, x = made(2, dtype=dtype).requires_grad_(False), inputs(dtype=dtype)
    out, k, _ = layer(x, freqs(S, torch.complex64), use_kv_cache=True)
    assert out.dtype == k.dtype == dtype
    exact = reference(layer, x, [causal()] * 2)
    low = torch.finfo(dtype).eps
    assert (out.double() - exact).abs().max() < 8 * low * exact.abs().max()


def test_freqs_cis():
    """Slip E7, requirement 60: shape (s, d // h // 2); results do not depend on where positions start."""
    table = precompute_freqs_cis(8, 5, dtype=torch.complex128)
    assert table.shape == (5, 4)
    assert table[3, 1].angle().item() == pytest.approx(3 * 10000 ** (-2 / 8))
    assert precompute_freqs_cis(8, 5).dtype == torch.complex64
    layer, x = made(2), inputs()
    for start in (1, 1000):
        moved = layer(x, freqs(S + start)[start:])[0]
        torch.testing.assert_close(moved, layer(x, freqs(S))[0], rtol=0, atol=1e-11)
    with pytest.raises(ValueError, match="head width must be even and at least 2, got 5"):
        precompute_freqs_cis(5, 3)


def test_masked_softmax_of_nothing_is_zero():
    scores = torch.tensor([[float("-inf")] * 3, [0.0, float("-inf"), 0.0]], requires_grad=True)
    out = masked_softmax(scores)
    assert out.tolist() == [[0, 0, 0], [0.5, 0, 0.5]]
    (out * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert scores.grad.tolist() == [[0, 0, 0], [-0.5, 0, 0.5]]


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"d = 10 must be a multiple of the h = 4"):
        MultiHeadMaskedSelfAttention(10, 4, 2, 8)
    with pytest.raises(ValueError, match=r"h = 4 query heads cannot share g = 3"):
        MultiHeadMaskedSelfAttention(16, 4, 3, 8)
    with pytest.raises(ValueError, match=r"cannot share g = 8"):
        MultiHeadMaskedSelfAttention(16, 4, 8, 8)
    with pytest.raises(ValueError, match=r"must be even, got 3"):
        MultiHeadMaskedSelfAttention(12, 4, 4, 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"x": inputs()[0]}, r"x must be \(b, s, 16\), got \(7, 16\)"),
        ({"x": inputs()[..., :8]}, r"x must be \(b, s, 16\)"),
        (
            {"freqs_cis": freqs(S + 1)},
            r"complex \(7, 2\) = \(s, d // h // 2\).*got torch.complex128 \(8, 2\)",
        ),
        ({"freqs_cis": freqs(S).real}, r"must be complex.*got torch.float64"),
        ({"cache_k": torch.zeros(2, 3, 2, 4)}, r"one of cache_k and cache_v is None"),
        (
            {"cache_k": torch.zeros(2, 2, 3, 4), "cache_v": torch.zeros(2, 2, 3, 4)},
            r"\(2, n, 2, 4\) each, got \(2, 2",
        ),
        ({"cache_k": torch.zeros(2, 3, 2, 4), "cache_v": torch.zeros(2, 5, 2, 4)}, r"and \(2, 5, 2, 4\)"),
        (
            {"padding_mask": torch.ones(2, S, dtype=torch.long)},
            r"got torch.int64; pass a 0/1 mask as mask.bool",
        ),
        ({"padding_mask": torch.ones(2, S)}, r"holds 0 \(real token\) and -inf \(padding\) only"),
        ({"padding_mask": torch.full((2, S), torch.finfo(torch.float32).min)}, r"and -inf \(padding\) only"),
        ({"padding_mask": torch.ones(2, 1, 1, S, dtype=torch.bool)}, r"\(2, 7\).*got \(2, 1, 1, 7\)"),
    ],
)
def test_calls_that_do_not_fit_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        made(2)(**{"x": inputs(), "freqs_cis": freqs(S), **change})


def test_package_stands_alone():
    """headway.classic imports nothing else of headway, and its files are short."""
    import ast
    from pathlib import Path

    import headway.classic

    folder = Path(headway.classic.__file__).parent
    for file in folder.glob("*.py"):
        assert len(file.read_text().splitlines()) <= 150, file
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] in {"torch", "headway"}
                assert not name.startswith("headway") or name.startswith("headway.classic")
