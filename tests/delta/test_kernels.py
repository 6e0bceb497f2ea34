"""The gated delta rule by the kernels of each level, forward and backward, against the definition in float64."""

import pytest
import torch

from headway.attention.delta import Convolved, delta_attend, forms
from headway.native import delta as native
from headway.tokens import Tokens
from tests.delta.cases import draw, results
from tests.native.conftest import Use, at_levels, threads, use  # noqa: F401  (fixtures)
from tests.saved import saved_tensors
from tests.tolerance import assert_within_reference

CASES = [
    (1, 16, 16, "range"),
    (5, 5, 3, "left"),
    (7, 16, 20, "packed"),
    (64, 32, 16, "range"),
    (65, 33, 20, "left"),
    (150, 16, 64, "packed"),
    (200, 128, 128, "range"),
]
NAMES = ("out", "state", "dq", "dk", "dv", "dlog_decay", "dbeta", "dpast")


def layout(kind: str, count: int) -> Tokens | None:
    if kind == "packed":
        return Tokens.packed([[count // 3, count - count // 2], [count - 1]], count)
    return None if kind == "range" else Tokens.from_lengths([count - 3, count], count, "left")


@at_levels(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("channels", [False, True])
def test_results_and_gradients(
    use: Use,  # noqa: F811
    threads: None,  # noqa: F811
    level: str,
    dtype: torch.dtype,
    channels: bool,
    erases: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(level)
    monkeypatch.setattr(
        forms, "SIZE", {True: 64, False: 64}
    )  # block size with which rounding is as in the kernels
    for count, d, e, kind in CASES:
        heads = 2 if count < 200 else 1
        exact = draw(count, d=d, e=e, heads=heads, channels=channels, seed=count, dtype=dtype)
        inputs, tokens = exact.to(dtype), layout(kind, count)
        unit_eps = 1e-6 if kind == "range" else None
        expected = results(exact, "recurrent", tokens, unit_eps, erases)
        low, actual = (results(inputs, form, tokens, unit_eps, erases) for form in ("chunked", "kernel"))
        for name, a, exact_result, low_result in zip(NAMES, actual, expected, low, strict=True):
            check = f"delta {'channels' if channels else 'heads'} {name} {str(dtype)[6:]}"
            check += "" if erases else ", adding"
            assert_within_reference(a, exact_result, low_result, f"{count} {d} {e} {kind}", 1.0, check)


@at_levels(1)
@pytest.mark.parametrize("channels", [False, True])
def test_however_strong_the_decay(use: Use, level: str, channels: bool) -> None:  # noqa: F811
    """Tolerance: after 64 slots the sum of log decays is about 3200, which float32 holds to 2e-4."""
    use(level)
    inputs = draw(80, d=16, e=16, channels=channels, strength=50.0, dtype=torch.float32)
    for actual, expected in zip(
        results(inputs.to(torch.float32), "kernel"), results(inputs, "recurrent"), strict=True
    ):
        assert torch.allclose(actual.double(), expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("erases", [True, False])
@pytest.mark.parametrize("channels", [False, True])
def test_token_by_token_and_in_pieces(channels: bool, erases: bool) -> None:
    """As in decoding: states pass from call to call, with few tokens or many."""
    inputs = draw(40, d=16, e=16, key_heads=2, channels=channels, dtype=torch.float32).to(torch.float32)
    assert native.unsupported_reason(*inputs) is None
    whole = delta_attend(*inputs[:5], past=inputs.past, erases=erases, form="kernel")
    for sizes in ([1] * 40, [3] * 13 + [1], [30, 1, 1, 8]):
        state, outs = inputs.past, []
        for part in zip(*(t.split(sizes, 2) for t in inputs[:5]), strict=True):
            out, state = delta_attend(*part, past=state, erases=erases, form="kernel")
            outs.append(out)
        assert torch.allclose(torch.cat(outs, 2), whole.out, rtol=1e-4, atol=1e-5)
        assert torch.allclose(state, whole.state, rtol=1e-4, atol=1e-5)


def test_heads_side_by_side_are_read_where_they_are() -> None:
    q, k, v, log_decay, beta, past = draw(20, d=16, e=16, key_heads=2, dtype=torch.float32).to(torch.float32)
    expected = delta_attend(q, k, v, log_decay, beta, past=past, form="kernel")
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v, log_decay, beta))
    for a, b in zip(delta_attend(*turned, past=past, form="kernel"), expected, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_and_gradients_of_one_result_alone() -> None:
    inputs = draw(6, d=4, e=3, dtype=torch.float32).to(torch.float32)
    assert native.unsupported_reason(*inputs) is None
    for form in ("out", "state"):
        twice = []
        for backend in ("kernel", "chunked"):
            result = getattr(delta_attend(*inputs[:5], past=inputs.past, form=backend), form).square().sum()
            leaves = inputs if form == "out" else inputs[1:]
            first = torch.autograd.grad(result, leaves, retain_graph=True)
            differentiable = torch.autograd.grad(result, leaves, create_graph=True)
            second = torch.autograd.grad(sum(t.square().sum() for t in differentiable), leaves)
            twice.append((*first, *second))
        for a, b in zip(*twice, strict=True):
            assert torch.allclose(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())


def test_only_what_is_given_is_kept_for_the_backward() -> None:
    """The backward keeps no more bytes than the inputs have."""
    inputs = draw(256, d=16, e=16, dtype=torch.float32).to(torch.float32)
    with saved_tensors() as saved:
        delta_attend(*inputs[:5], past=inputs.past, form="kernel")
    assert 0 < sum(t.nbytes for t in saved) <= sum(t.nbytes for t in inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_sources_are_kept_in_place_of_their_results(key_heads: int, dtype: torch.dtype) -> None:
    """Gradients have the same bits, also in a second backward; second derivatives reach the convolution's inputs."""
    torch.manual_seed(0)
    counts, begins = (key_heads, key_heads, 4), torch.arange(100).eq(37).unsqueeze(0)
    leaves = [torch.randn(2, 100, heads * 16).to(dtype).requires_grad_() for heads in counts]
    taps = [torch.randn(heads * 16, 4).to(dtype).requires_grad_() for heads in counts]
    log_decay, beta = (-torch.rand(2, 4, 100)).requires_grad_(), torch.rand(2, 4, 100).requires_grad_()
    wanted = [*leaves, *taps, log_decay, beta]
    sources = [
        Convolved(heads, x, w, None, begins, None) for heads, x, w in zip(counts, leaves, taps, strict=True)
    ]
    gradients, kept = [], []
    for used_sources in ((), sources):
        q, k, v = (source.by_head() for source in sources)
        with saved_tensors() as saved:
            out = delta_attend(
                q, k, v, log_decay, beta, unit_eps=1e-6, form="kernel", sources=used_sources
            ).out
        kept.append(sum(t.nbytes for t in saved))
        loss = out.float().square().sum()
        gradients += [torch.autograd.grad(loss, wanted, retain_graph=True) for _ in range(2)]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        second = torch.autograd.grad(sum(g.float().square().sum() for g in first), [*leaves, *taps])
        gradients.append(second)
    first_pass, second_pass, second_order, *with_sources = gradients
    for repeated in (second_pass, with_sources[0], with_sources[1]):
        assert all(torch.equal(a, b) for a, b in zip(first_pass, repeated, strict=True))
    for a, b in zip(second_order, with_sources[2], strict=True):
        if dtype == torch.float32:  # summed in another order
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())
    assert kept[1] - kept[0] == sum(
        t.nbytes for t in (*taps, *[begins] * 3)
    )  # the convolution's inputs are as large as q, k and v


@at_levels(2)
def test_what_is_smaller_than_a_normal_number_counts_as_none(use: Use, level: str) -> None:  # noqa: F811
    """Decays produce subnormal numbers, each of which costs Intel's processors some hundred cycles."""
    use(level)
    k, v, zero = torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3, 16), torch.zeros(1, 1, 3)
    for size, kept in ((1e-36, True), (1e-39, False)):
        state = delta_attend(k, k, v, zero, zero, past=torch.full((1, 1, 16, 16), size), form="kernel").state
        assert bool((state != 0).all()) == bool((state != 0).any()) == kept
