"""Every form of linear attention equals the quadratic one, which equals the definition (requirements 78, 80, 81)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.attention.linear_attention import (
    FORMS,
    LinearAttentionSpec,
    choose_form,
    linear_attend,
    linear_state,
    linear_weights,
    prepare,
)
from headway.attention.linear_attention.algorithms import chunked
from headway.errors import BackendError
from headway.patterns import Causal, Full, Pattern
from headway.tokens import Tokens
from tests.linear_attention.oracle import sees, table, tensors, weights
from tests.tolerance import assert_within_reference

N = 9
LINEARS = [
    LinearAttentionSpec("elu+1"),
    LinearAttentionSpec("elu+1", rotary="none"),
    LinearAttentionSpec("relu", "exp"),
    LinearAttentionSpec("square", rotary="none"),
    LinearAttentionSpec("softmax"),
    LinearAttentionSpec("cosine"),
    LinearAttentionSpec("cosine", rotary="none"),
]
SHUFFLED = Tokens(torch.tensor([[4, -1, 0, 2, 1, 3, -1, 6, 5]]))
HOLES = Tokens.from_attention_mask(torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0, 0], [0] * 9]))
LAYOUTS = {
    "range": Tokens.range(N),
    "left": Tokens.from_lengths([5, 9], N, "left"),
    "right": Tokens.from_lengths([0, 3], N),
    "packed": Tokens.packed([[3, 4], [2, 1, 6]], N),
    "packed alike": Tokens.packed([[3, 4, 2]], N),
    "holes": HOLES,
    "shuffled": SHUFFLED,
    "documents interleaved": Tokens(
        torch.tensor([[0, 0, 1, 1, 2, -1, 2, 3, 4]]), torch.tensor([[3, 1, 3, 1, 3, 0, 1, 1, 1]])
    ),
}


def run(
    form: str, linear: LinearAttentionSpec, pattern: Pattern, tokens: Tokens, size: int, *qkv: Tensor
) -> tuple[Tensor, ...]:
    """Returns the output and the gradients for q, k and v in one form; `size` is the block size."""
    rotation = None if linear.rotary == "none" else table(tokens.index.clamp_min(0), qkv[0].shape[-1])
    call = prepare(*qkv, linear, pattern, tokens, tokens, rotation)
    sums = chunked(call.sums(None), size) if form == "chunked" else None
    out = call.attend(form=form) if sums is None else call.divided(*sums)
    grad = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(7))
    return out, *torch.autograd.grad(out, qkv, grad)


@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_78_row_80_row_81_the_quadratic_form_is_the_double_loop(
    layout: str, pattern: Pattern, linear: LinearAttentionSpec
) -> None:
    tokens = LAYOUTS[layout]
    q, k, v = tensors(1, N)
    turned = linear.rotary != "none"
    positions = tokens.index.clamp_min(0)
    expected = weights(
        q.detach(),
        k.detach(),
        linear.feature,
        str(linear.rotary),
        sees(tokens, pattern == Causal()),
        positions.expand(2, -1),
        linear.key_feature,
    )
    options = {
        "q_tokens": tokens,
        "k_tokens": tokens,
        "rotation": table(positions, 6) if turned else None,
    }
    actual = linear_weights(q, k, linear, pattern, **options)  # type: ignore[arg-type]
    assert torch.allclose(actual, expected, rtol=0, atol=1e-12)
    out = linear_attend(q, k, v, linear, pattern, form="parallel", **options)  # type: ignore[arg-type]
    assert torch.allclose(out, expected @ v.repeat_interleave(2, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_78_row_80_row_81_linear_time_equals_the_quadratic_form_with_its_gradients(
    layout: str, pattern: Pattern, linear: LinearAttentionSpec
) -> None:
    qkv = tensors(2, N)
    expected = run("parallel", linear, pattern, LAYOUTS[layout], 0, *qkv)
    variants = [("chunked", size) for size in (1, 2, 4, N, 64)]
    for form, size in variants:
        for a, b in zip(run(form, linear, pattern, LAYOUTS[layout], size, *qkv), expected, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-11), (form, size)


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 9),
    st.booleans(),
)
def test_row_78_blocks_of_any_size_and_documents_of_any_length(
    lengths: list[list[int]], size: int, causal: bool
) -> None:
    total = max(map(sum, lengths))
    tokens = Tokens.packed(lengths, total)
    qkv = tensors(3, total, batch=len(lengths), heads=2, kv_heads=1, d=4, e=3)
    pattern = Causal() if causal else Full()
    expected = run("parallel", LinearAttentionSpec(), pattern, tokens, 0, *qkv)
    for a, b in zip(
        run("chunked", LinearAttentionSpec(), pattern, tokens, size, *qkv), expected, strict=True
    ):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "linear",
    [
        LinearAttentionSpec("softmax", "softmax over tokens"),
        LinearAttentionSpec("elu+1", "softmax over tokens"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_row_78_keys_may_be_normalised_over_the_tokens_of_their_document(
    layout: str, linear: LinearAttentionSpec
) -> None:
    tokens, (q, k, v) = LAYOUTS[layout], tensors(4, N)
    expected = run("parallel", linear, Full(), tokens, 0, q, k, v)
    for a, b in zip(run("chunked", linear, Full(), tokens, 4, q, k, v), expected, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-11)
    allowed = sees(tokens, False).expand(2, -1, -1)
    expected_weights = torch.zeros(2, 4, N, N, dtype=torch.float64)
    for row, i in (allowed.any(-1)).nonzero().tolist():
        seen = allowed[row, i].nonzero()[:, 0]
        phi = torch.softmax(k[row, :, seen].detach(), 1)
        x = q[row, :, i].detach()
        phi_q = torch.softmax(x, -1) if linear.feature == "softmax" else torch.nn.functional.elu(x) + 1
        sims = (phi.repeat_interleave(2, 0) @ phi_q[..., None])[..., 0]
        if linear.feature == "softmax":
            assert torch.allclose(sims.sum(-1), torch.ones(4, dtype=torch.float64)), (
                "no denominator is needed"
            )
        expected_weights[row, :, i, seen] = sims / sims.sum(-1, keepdim=True)
    unrotated = LinearAttentionSpec(linear.feature, linear.key_feature, rotary="none")
    actual = linear_weights(q, k, unrotated, Full(), q_tokens=tokens, k_tokens=tokens)
    assert torch.allclose(actual, expected_weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("linear", LINEARS, ids=str)
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
def test_without_a_rotation_weights_are_a_distribution(pattern: Pattern, linear: LinearAttentionSpec) -> None:
    q, k, _ = tensors(5, N)
    weights = linear_weights(q, k, linear, pattern)
    assert weights.min() >= 0
    lost = (q <= 0).all(-1) if linear.feature == "relu" else torch.zeros(2, 4, N)
    assert torch.allclose(weights.sum(-1), 1 - lost.double()), "a query without features gives 0"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("form", "pattern"),
    [(form, Causal()) for form in FORMS] + [(form, Full()) for form in ("parallel", "chunked")],
)
def test_empty_slots_neither_see_nor_are_seen_nor_pass_a_gradient(
    form: str, pattern: Pattern, layout: str
) -> None:
    """Also if they hold NaN."""
    tokens, qkv = LAYOUTS[layout], tensors(6, N)
    empty = ~tokens.valid.expand(2, -1)[:, None, :, None]
    poisoned = [t.detach().masked_fill(empty, float("nan")).requires_grad_() for t in qkv]
    clean = run(form, LinearAttentionSpec(), pattern, tokens, 4, *qkv)
    for actual, expected in zip(
        run(form, LinearAttentionSpec(), pattern, tokens, 4, *poisoned), clean, strict=True
    ):
        assert torch.equal(actual, expected)
        assert not actual.masked_select(empty).any()


def test_documents_of_memory_are_those_of_the_queries() -> None:
    q, _, _ = tensors(8, 7, batch=1)
    _, k, v = tensors(9, 11, batch=1)
    at_q, at_k = Tokens.packed([[2, 3, 2]]), Tokens.packed([[4, 5]], 11)
    for form in ("parallel", "chunked"):
        out = linear_attend(q, k, v, LinearAttentionSpec(), q_tokens=at_q, k_tokens=at_k, form=form)
        for d, (a, b), (c, e) in ((0, (0, 2), (0, 4)), (1, (2, 5), (4, 9))):
            alone = linear_attend(q[:, :, a:b], k[:, :, c:e], v[:, :, c:e], LinearAttentionSpec())
            assert torch.allclose(out[:, :, a:b], alone, rtol=0, atol=1e-12), d
        assert not out[:, :, 5:].any(), "its document has no keys"


@pytest.mark.parametrize("count", [0, 1])
@pytest.mark.parametrize("form", ["parallel", "chunked", "auto"])
def test_rows_without_tokens_and_of_one(form: str, count: int) -> None:
    q, k, v = tensors(10, count)
    out = linear_attend(q, k, v, LinearAttentionSpec(), Causal(), form=form)
    assert out.shape == (2, 4, count, 5)
    assert torch.allclose(out, v.repeat_interleave(2, 1), rtol=0, atol=1e-12), "a weight of 1 on itself"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [Causal(), Full()], ids=str)
@pytest.mark.parametrize("linear", [LinearAttentionSpec(), LinearAttentionSpec("cosine")], ids=str)
def test_low_precision_errs_no_more_than_the_formula_in_it(
    linear: LinearAttentionSpec, pattern: Pattern, dtype: torch.dtype
) -> None:
    qkv = [t.detach().to(dtype) for t in tensors(11, 150, heads=2, kv_heads=1, d=16, e=16)]
    exact, low = (
        linear_attend(
            *(t.to(kind) for t in qkv),  # type: ignore[arg-type]
            linear,
            pattern,
            rotation=table(torch.arange(150), 16, kind),
            form="parallel",
        )
        for kind in (torch.float64, torch.float32)
    )
    actual = linear_attend(
        *qkv, linear, pattern, rotation=table(torch.arange(150), 16, dtype), form="chunked"
    )
    assert actual.dtype == dtype
    assert_within_reference(actual, exact, low.to(dtype))


@given(st.lists(st.integers(0, 7), min_size=1, max_size=6))
def test_states_of_disjoint_keys_add(sizes: list[int]) -> None:
    total = sum(sizes)
    _, k, v = tensors(16, total)
    whole = linear_state(k, v)
    states = [linear_state(a, b) for a, b in zip(k.split(sizes, 2), v.split(sizes, 2), strict=True)]
    merged = states[0]
    for state in states[1:]:
        merged = merged.merge(state)
    for a, b in zip(merged.tensors, whole.tensors, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)
    assert whole.count.tolist() == [total, total]
    assert whole.nbytes == 2 * (2 * 6 * (5 + 1) * 8 + 8)


@pytest.mark.parametrize("form", ["parallel", "chunked"])
def test_queries_over_a_past_are_the_later_queries_of_the_whole(form: str) -> None:
    q, k, v = (t.detach() for t in tensors(17, 20))
    at = torch.arange(20)
    whole = linear_attend(q, k, v, LinearAttentionSpec(), Causal(), rotation=table(at, 6), form=form)
    past = linear_state(k[:, :, :13], v[:, :, :13], rotation=table(at[:13], 6))
    late = Tokens.range(7, start=13)
    actual = linear_attend(
        q[:, :, 13:],
        k[:, :, 13:],
        v[:, :, 13:],
        LinearAttentionSpec(),
        Causal(),
        q_tokens=late,
        k_tokens=late,
        rotation=table(at[13:], 6),
        past=past,
        form=form,
    )
    assert torch.allclose(actual, whole[:, :, 13:], rtol=0, atol=1e-12)


def test_second_derivatives_are_of_the_parallel_form() -> None:
    q, k, v = (t[:, :, :5] for t in tensors(18, N))

    def twice(form: str) -> Tensor:
        out = linear_attend(q, k, v, LinearAttentionSpec(), Causal(), form=form)
        (once,) = torch.autograd.grad((out**2).sum(), q, create_graph=True)
        return torch.autograd.grad((once**2).sum(), k)[0]

    assert twice("parallel").abs().max() > 0
    with pytest.raises(BackendError, match='need form="parallel"; this call ran in form "chunked"'):
        twice("chunked")


def test_auto_takes_the_form_with_the_fewest_products() -> None:
    assert choose_form(Causal(), 1, 1, 64, 64).what == "parallel"
    assert choose_form(Causal(), 128, 128, 64, 64).what == "parallel"
    assert choose_form(Causal(), 4096, 4096, 64, 64).what == "chunked"
    assert choose_form(Full(), 16, 16, 64, 64).what == "parallel"
    assert choose_form(Full(), 1, 4096, 64, 64).what == "parallel"
    assert choose_form(Full(), 4096, 4096, 64, 64).what == "chunked"
    long = choose_form(Causal(), 131072, 131072, 64, 64)
    assert long.flops is not None
    assert long.flops == 131072 * (2 * 64 * 128 + 4 * 64 * 64)
    assert "times as many products" in str(long)
