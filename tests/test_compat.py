"""`headway.compat.scaled_dot_product_attention` behaves as torch's function: shapes, values, gradients, errors.

Tolerance: torch's function in float64 is the truth; ours may err at most twice as much as torch's own kernel in the
same dtype, plus a few roundings of the largest value (the two sum in different orders).
"""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headway.compat import scaled_dot_product_attention

ROUNDINGS = 8


@st.composite
def calls(draw: st.DrawFn) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """Draws a call that torch accepts: 2 to 5 axes, broadcast batches and masks, grouped heads, odd sizes."""
    lead = draw(st.sampled_from([(), (3,), (2, 4), (2, 2, 4), (1, 1), (0, 2)]))
    gqa = len(lead) > 1 and lead[-1] % 2 == 0 and draw(st.booleans())
    queries, keys = draw(st.integers(0, 9)), draw(st.integers(0, 9))
    width = draw(st.sampled_from([1, 5, 8]))
    value_width = draw(st.sampled_from([width, 3]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    kv_lead = (*lead[:-1], 2) if gqa else lead
    if draw(st.booleans()):
        kv_lead = tuple(1 if i < len(kv_lead) - 1 else n for i, n in enumerate(kv_lead))
    if draw(st.booleans()):
        keys = queries
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    q = torch.randn(*lead, queries, width, generator=generator).to(dtype)
    k = torch.randn(*kv_lead, keys, width, generator=generator).to(dtype)
    v = torch.randn(*kv_lead, keys, value_width, generator=generator).to(dtype)
    options: dict[str, Any] = {"scale": draw(st.sampled_from([None, 0.3, -1.0, 0.0])), "enable_gqa": gqa}
    kind = draw(st.sampled_from(["none", "causal", "bool", "float"]))
    if kind == "causal":
        options["is_causal"] = True
    elif kind != "none":
        full = (*lead, queries, keys)
        shape = tuple(n if draw(st.booleans()) else 1 for n in full)[draw(st.integers(0, len(lead))) :]
        mask = torch.rand(shape, generator=generator) > 0.4
        if kind == "float":
            bias = torch.randn(shape, generator=generator).to(dtype)
            mask = bias.masked_fill(~mask, -math.inf)
        options["attn_mask"] = mask
    return (q, k, v), options


def by_formula(*tensors: Tensor, **options: Any) -> Tensor:
    """Computes torch's function by its plain formula: the fused CPU kernel gives NaN for is_causal and a scale <= 0."""
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


def precise(tensors: tuple[Tensor, ...], options: dict[str, Any]) -> Tensor:
    wide = {k: v.double() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in options.items()}
    return by_formula(*(t.double() for t in tensors), **wide)


@given(calls())
def test_values_are_those_of_torch(call: tuple[tuple[Tensor, ...], dict[str, Any]]) -> None:
    tensors, options = call
    ours, theirs = (
        scaled_dot_product_attention(*tensors, **options),
        F.scaled_dot_product_attention(*tensors, **options),
    )
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert not ours.isnan().any()
    if not ours.numel():
        return
    truth = precise(tensors, options)
    largest = float(tensors[2].double().abs().max()) if tensors[2].numel() else 0.0
    allowed = (
        2 * (theirs.double() - truth).abs().nan_to_num(0.0).max()
        + ROUNDINGS * torch.finfo(ours.dtype).eps * largest
    )
    assert (ours.double() - truth).abs().max() <= allowed


@given(calls())
def test_gradients_are_those_of_torch(call: tuple[tuple[Tensor, ...], dict[str, Any]]) -> None:
    """In float64, through q, k, v and a floating-point mask."""
    tensors, options = call
    gradients = []
    for function in (scaled_dot_product_attention, by_formula):
        leaves = [t.double().requires_grad_() for t in tensors]
        given_options = dict(options)
        mask = options.get("attn_mask")
        if mask is not None and mask.is_floating_point():
            given_options["attn_mask"] = mask.double().requires_grad_()
            leaves.append(given_options["attn_mask"])
        out = function(*leaves[:3], **given_options)
        weight = torch.linspace(-1, 2, max(out.numel(), 1), dtype=torch.float64)[: out.numel()].view(
            out.shape
        )
        gradients.append(torch.autograd.grad((out * weight).sum(), leaves, materialize_grads=True))
    for ours, theirs in zip(*gradients, strict=True):
        largest = float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * (1 + largest))


def test_a_causal_mask_is_aligned_to_the_top_left() -> None:
    q, k = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4)
    out = scaled_dot_product_attention(q, k, k, is_causal=True)
    assert torch.allclose(out[0, 0, 0], k[0, 0, 0])
    top_left = torch.ones(3, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(out, scaled_dot_product_attention(q, k, k, attn_mask=top_left))


def test_what_no_query_sees_does_not_matter() -> None:
    q, k = torch.randn(2, 2, 3, 4), torch.randn(2, 2, 5, 4)
    mask = torch.tensor([True, True, False, True, False])
    spoiled = k.masked_fill(~mask[:, None], math.nan)
    out = scaled_dot_product_attention(q, spoiled, spoiled, attn_mask=mask.expand(3, 5))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, k, attn_mask=mask.expand(3, 5)))


def test_dropped_weights_are_zero_or_scaled_up() -> None:
    q, k = torch.randn(4, 4, 32, 8), torch.randn(4, 4, 32, 8)
    identity = torch.eye(32).expand(4, 4, 32, 32)
    weights = scaled_dot_product_attention(q, k, identity)
    dropped = scaled_dot_product_attention(q, k, identity, dropout_p=0.25)
    is_dropped = dropped == 0
    torch.testing.assert_close(dropped[~is_dropped], weights[~is_dropped] / 0.75)
    # 16384 draws with rate 1/4 have a standard deviation of 0.0034
    assert abs(float(is_dropped.double().mean()) - 0.25) < 5 * 0.0034
    assert not scaled_dot_product_attention(q, k, identity, dropout_p=1.0).any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_chooses_the_dtype(dtype: torch.dtype) -> None:
    q = torch.randn(2, 2, 3, 4)
    with torch.autocast("cpu", dtype=dtype):
        ours, theirs = scaled_dot_product_attention(q, q, q), F.scaled_dot_product_attention(q, q, q)
    assert ours.dtype == theirs.dtype == dtype
    torch.testing.assert_close(ours, theirs)


def t(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


REFUSED: dict[str, tuple[tuple[Tensor, ...], dict[str, Any]]] = {
    "mask and causal": (
        (t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 5)),
        {"attn_mask": t(3, 3), "is_causal": True},
    ),
    "one axis": ((t(4), t(3, 4), t(3, 4)), {}),
    "heads": ((t(1, 6, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4)), {}),
    "grouped heads": ((t(1, 5, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4)), {"enable_gqa": True}),
    "grouped heads without heads": ((t(3, 4),) * 3, {"enable_gqa": True}),
    "batch": ((t(2, 1, 3, 4), t(3, 1, 3, 4), t(3, 1, 3, 4)), {}),
    "width": ((t(1, 2, 3, 4), t(1, 2, 3, 5), t(1, 2, 3, 5)), {}),
    "dtypes": ((t(1, 1, 3, 4), t(1, 1, 3, 4, dtype=torch.float64), t(1, 1, 3, 4)), {}),
    "integer mask": ((t(1, 1, 3, 4),) * 3, {"attn_mask": t(3, 3, dtype=torch.int64)}),
    "wide mask": ((t(1, 1, 3, 4),) * 3, {"attn_mask": t(3, 3, dtype=torch.float64)}),
    "dropout": ((t(1, 1, 3, 4),) * 3, {"dropout_p": 1.5}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(name: str) -> None:
    tensors, options = REFUSED[name]
    with pytest.raises((RuntimeError, IndexError)) as theirs:
        F.scaled_dot_product_attention(*tensors, **options)
    with pytest.raises(theirs.type) as ours:
        scaled_dot_product_attention(*tensors, **options)
    assert str(ours.value) == str(theirs.value)


def test_what_torch_documents_as_wrong_and_lets_pass_is_refused() -> None:
    """torch's fused CPU kernel reads past the end of the values, and lets a mask override `is_causal`."""
    with pytest.raises(RuntimeError, match="Explicit attn_mask should not be set when is_causal=True"):
        scaled_dot_product_attention(t(1, 2, 3, 4), t(1, 2, 3, 4), t(1, 2, 3, 4), t(3, 3), is_causal=True)
    with pytest.raises(RuntimeError, match="Expected size for first two dimensions"):
        scaled_dot_product_attention(t(1, 2, 3, 4), t(1, 2, 5, 4), t(1, 2, 4, 4))
    with pytest.raises(RuntimeError, match=r"dropout probability has to be between 0 and 1, but got -0\.1"):
        scaled_dot_product_attention(t(1, 1, 3, 4), t(1, 1, 3, 4), t(1, 1, 3, 4), dropout_p=-0.1)
