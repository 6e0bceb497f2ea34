"""Sizes that other libraries crash on or mix up: longer queries, empty sides, windows, groups, scales, strides."""

import pytest
import torch
from torch import Tensor

from headway.attention import attend
from headway.cache import BatchCache, CacheSpec, PagedCache
from headway.patterns import Causal, Full, Window
from headway.scores import ALiBi, Bias, RelativeBias, RelativeKey, Score, SoftCap
from headway.tokens import Tokens
from tests.attention.small import BACKENDS, EXACT, qkv
from tests.cache.layers import attended
from tests.naive import by_mask, with_gradients


@pytest.mark.parametrize("backend", BACKENDS[:4])
@pytest.mark.parametrize(("queries", "keys"), [(9, 4), (130, 70), (4, 9)])
def test_tokens_align_a_causal_mask_whichever_side_is_longer(backend: str, queries: int, keys: int) -> None:
    """Queries and keys end at the same token (a "bottom-right" mask elsewhere); early queries see nothing."""
    q, k, v = qkv(queries, keys)
    end = max(queries, keys)
    at_q, at_k = Tokens.range(queries, start=end - queries), Tokens.range(keys, start=end - keys)
    keep = torch.ones(end, end, dtype=torch.bool).tril()[end - queries :, end - keys :]
    grad = torch.randn(q.shape, dtype=torch.float64)
    ours = with_gradients(
        lambda *t: attend(*t, Causal(), q_tokens=at_q, k_tokens=at_k, backend=backend), grad, q, k, v
    )
    for a, b in zip(ours, with_gradients(lambda *t: by_mask(*t, keep), grad, q, k, v), strict=True):
        torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_0_others_is_the_token_itself(backend: str) -> None:
    q, k, v = qkv(9)
    for window in (Window(0), Window.last(1), Window.around(0), Window.last(1, step=5)):
        torch.testing.assert_close(
            attend(q, k, v, window, backend=backend), v.repeat_interleave(2, 1), rtol=1e-14, atol=1e-14
        )


@pytest.mark.parametrize("backend", BACKENDS)
def test_query_head_h_reads_kv_head_h_div_group(backend: str) -> None:
    """Query head h reads kv head h // group, not h % kv_heads, with and without a cache."""
    q, k, v = qkv(7)
    out = attend(q, k, v, Causal(), backend=backend)
    for h in range(4):
        g = h // 2
        alone = attend(q[:, h : h + 1], k[:, g : g + 1], v[:, g : g + 1], Causal(), backend="dense")
        torch.testing.assert_close(out[:, h : h + 1], alone, **EXACT)
    flipped = attend(q, k.flip(1), v.flip(1), Causal(), backend=backend)
    torch.testing.assert_close(flipped, attend(q.unflatten(1, (2, 2)).flip(1).flatten(1, 2), k, v, Causal())
                               .unflatten(1, (2, 2)).flip(1).flatten(1, 2), **EXACT)  # fmt: skip
    interleaved = torch.cat(
        [
            attend(q[:, h : h + 1], k[:, h % 2 : h % 2 + 1], v[:, h % 2 : h % 2 + 1], Causal())
            for h in range(4)
        ],
        1,
    )
    assert (interleaved - out).abs().max() > 0.1
    cache = BatchCache(PagedCache(CacheSpec(kv_heads=2, head_dim=6, dtype=torch.float64), [Causal()]), 2)
    attended(cache, Tokens.range(6), *(x[:, :, :6] for x in (q, k, v)), Causal())
    last = attended(cache, Tokens.range(1, start=6), *(x[:, :, 6:] for x in (q, k, v)), Causal())
    torch.testing.assert_close(last, out[:, :, 6:], **EXACT)


STEPS: dict[str, Score] = {
    "bias": Bias(torch.randn(1, 4, 11, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(1))),
    "ALiBi": ALiBi((0.5, 0.25, 0.125, 1.0)),
    "relative bias": RelativeBias(torch.randn(8, 4, dtype=torch.float64), max_distance=20),
    "relative key": RelativeKey(torch.randn(9, 6, dtype=torch.float64)),
    "cap": SoftCap(1.5),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("scale", [None, 0.7, 1.0, -0.3, 0.0])
def test_a_scale_and_a_finite_bias_are_both_applied(name: str, scale: float | None) -> None:
    """The scale multiplies the product and the relative keys; the bias is added after it, unscaled; with gradients."""
    q, k, v = qkv()
    step = STEPS[name]
    distance, factor = torch.arange(11) - torch.arange(11).unsqueeze(1), 6**-0.5 if scale is None else scale

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = q @ k.repeat_interleave(2, 1).transpose(-1, -2) * factor
        if isinstance(step, Bias):
            s = s + step.parameters[0]
        elif isinstance(step, ALiBi):
            slopes = torch.tensor([0.5, 0.25, 0.125, 1.0], dtype=torch.float64)
            s = s - slopes.view(1, 4, 1, 1) * distance.abs()
        elif isinstance(step, RelativeKey):
            s = s + torch.einsum("bhtd,tsd->bhts", q, step.parameters[0][distance.clamp(-4, 4) + 4]) * factor
        elif isinstance(step, RelativeBias):
            bucket = torch.tensor([0, 1, 2, 2, 2, 2, 2, 3, 3, 3, 3])[distance.abs()] + 4 * (distance > 0)
            s = s + step.table[bucket].movedim(
                -1, 0
            )  # distances below 2 alone, then up to 2 sqrt(10), and beyond
        else:
            s = 1.5 * torch.tanh(s / 1.5)
        return s.softmax(-1) @ v.repeat_interleave(2, 1)

    grad = torch.randn(q.shape, dtype=torch.float64)
    truth = with_gradients(formula, grad, q, k, v)
    for backend in ("dense",) if step.by_slot else ("dense", "banded"):
        ours = with_gradients(
            lambda *t, b=backend: attend(*t, score=step, scale=scale, backend=b), grad, q, k, v
        )
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, **EXACT)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_on_either_side_gives_nothing_and_zero_gradients(backend: str) -> None:
    for queries, keys, rows in ((0, 5, 2), (4, 0, 2), (0, 0, 2), (3, 3, 0)):
        if backend == "diagonal" and queries != keys:
            continue
        grad = torch.randn(rows, 4, queries, 6, dtype=torch.float64)
        for pattern in (Full(), Window.last(2)):
            at_q, at_k = Tokens.range(queries), Tokens.range(keys)
            results = with_gradients(
                lambda *t, p=pattern, a=at_q, b=at_k: attend(*t, p, q_tokens=a, k_tokens=b, backend=backend),
                grad,
                *qkv(queries, keys, rows),
            )
            assert results[0].shape == (rows, 4, queries, 6)
            assert not any(t.any() for t in results)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strides_do_not_matter_for_gradients_either(backend: str) -> None:
    """Queries in [B, T, H, D] memory, keys broadcast over rows (stride 0), and an expanded number as gradient."""
    q, k, v = qkv(66)
    grad = torch.tensor(0.5, dtype=torch.float64).expand(q.shape)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, Window.last(5), backend=backend)

    plain = with_gradients(run, grad.contiguous(), q, k[:1].expand(2, -1, -1, -1).contiguous(), v)
    leaves = [q.transpose(1, 2).contiguous(), k[:1].clone(), v.flip(-1).contiguous()]
    for leaf in leaves:
        leaf.requires_grad_()
    views = (leaves[0].transpose(1, 2), leaves[1].expand(2, -1, -1, -1), leaves[2].flip(-1))
    assert not views[0].is_contiguous()
    out = run(*views)
    dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    for a, b in (
        (out.detach(), plain[0]),
        (dq.transpose(1, 2), plain[1]),
        (dk, plain[2].sum(0, keepdim=True)),
        (dv.flip(-1), plain[3]),
    ):
        torch.testing.assert_close(a, b, **EXACT)
