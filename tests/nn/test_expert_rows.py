"""All experts in one pass, forward and backward, equal each expert on its rows; other layers run them one by one."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.native import interface
from headway.nn import Experts, MixtureOfExperts, expert_rows, linears
from headway.nn.expert_rows import plain_expert_rows
from headway.nn.fused import ACTIVATIONS
from headway.nn.weights import Int8
from tests.tolerance import assert_within_reference

WIDTH, HIDDEN = 10, 12
KERNELS = sorted({*ACTIVATIONS} & {*interface.ACTIVATIONS})


def layer_of(count: int = 6, top: int = 2, activation: str = "silu", **options: object) -> MixtureOfExperts:
    torch.manual_seed(0)
    experts = Experts(count=count, top=top, hidden=HIDDEN)
    return MixtureOfExperts(experts, WIDTH, activation, **{"gated": True, **options})  # type: ignore[arg-type]


def inputs(layer: MixtureOfExperts, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns x, weights, order and counts as the layer makes them."""
    x = torch.randn(rows, WIDTH)
    chosen, weights = layer.gate(x)
    pairs = chosen.flatten()
    counts = pairs.bincount(minlength=len(layer.experts))
    return x, weights.detach(), pairs.argsort(stable=True), counts


def gradients(run: Callable[..., Tensor], tensors: list[Tensor], dy: Tensor) -> list[Tensor]:
    """Returns the result and the gradient of each tensor."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = run(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


@given(st.integers(1, 40), st.integers(1, 7), st.data(), st.sampled_from(KERNELS))
def test_they_err_as_torch_s_operations_do(rows: int, count: int, data: st.DataObject, act: str) -> None:
    layer = layer_of(count, data.draw(st.integers(1, count)), act)
    x, weights, order, counts = inputs(layer, rows)
    tensors, dy = (
        [x, weights, *(e.weight.detach() for e in linears(layer).values())],
        torch.randn(rows, WIDTH),
    )
    plain = partial(plain_expert_rows, act, counts.tolist(), order)

    fast = partial(expert_rows._ExpertRows.apply, act, counts.tolist(), order)
    fast_results, plain_results = gradients(fast, tensors, dy), gradients(plain, tensors, dy)
    exact_results = gradients(plain, [t.double() for t in tensors], dy)
    for i, (actual, reference, expected) in enumerate(
        zip(fast_results, plain_results, exact_results, strict=True)
    ):
        assert_within_reference(actual, expected, reference, f"{i}", terms=WIDTH**0.5)


def test_the_layer_computes_so_where_gradients_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere its experts run one by one, with equal results and equal gradients."""
    layer, x = layer_of(), torch.randn(2, 9, WIDTH, requires_grad=True)
    y = layer(x)
    assert "ExpertRows" in str(y.grad_fn.next_functions[0][0]), y.grad_fn
    grads = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
    monkeypatch.setattr("headway.nn.experts.expert_rows", lambda *_: None)
    one_by_one = layer(x)
    torch.testing.assert_close(y, one_by_one, rtol=1e-5, atol=1e-6)
    expected_grads = torch.autograd.grad(one_by_one.square().sum(), [x, *layer.parameters()])
    for actual, expected in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_in_bf16_experts_have_few_counts_of_rows() -> None:
    """oneDNN compiles a kernel for each count. Results and gradients are those of the rows without padding, to the bit
    or to the error of bf16."""
    torch.manual_seed(0)
    layer, x = layer_of().bfloat16(), torch.randn(83, WIDTH).bfloat16().requires_grad_()
    counts: set[int] = set()
    for expert in layer.experts:
        expert.register_forward_pre_hook(lambda _, args: counts.add(len(args[0])))
    results = []
    for pads in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not pads:
                patch.setattr("headway.nn.products.filled_rows", lambda rows: rows)
            counts.clear()
            y = layer(x)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
            assert all(count % 16 == 0 for count in counts) == pads
    for padded, alone in zip(*results, strict=True):
        torch.testing.assert_close(padded, alone, rtol=2**-6, atol=2**-8 * alone.abs().max().item())


def test_second_derivatives_are_those_of_the_formula() -> None:
    layer = layer_of()
    x, weights, order, counts = inputs(layer, 5)

    def penalty(run: Callable[..., Tensor]) -> Tensor:
        leaf = x.detach().requires_grad_()
        matrices = [m.weight for m in linears(layer).values()]
        (dx,) = torch.autograd.grad(run(leaf, weights, *matrices).square().sum(), leaf, create_graph=True)
        (second,) = torch.autograd.grad(dx.square().sum(), leaf)
        return second

    fast = partial(expert_rows._ExpertRows.apply, "silu", counts.tolist(), order)
    torch.testing.assert_close(
        penalty(fast),
        penalty(partial(plain_expert_rows, "silu", counts.tolist(), order)),
        rtol=1e-4,
        atol=1e-5,
    )


def biased() -> MixtureOfExperts:
    return layer_of(bias=True)


def dropping() -> MixtureOfExperts:
    return layer_of(dropout=0.5).train()


def hooked() -> MixtureOfExperts:
    layer = layer_of()
    layer.experts[3].up_proj.register_forward_hook(lambda *_: None)
    return layer


def rounded() -> MixtureOfExperts:
    layer = layer_of()
    for linear in linears(layer.experts[0]).values():
        linear.keep(Int8.pack(linear.weight.detach()))
    return layer


@pytest.mark.parametrize(
    "make",
    [
        biased,
        dropping,
        hooked,
        rounded,
        partial(layer_of, gated=False),
        partial(layer_of, activation="clamped_swiglu"),
        lambda: layer_of().requires_grad_(False),
        lambda: layer_of().double(),
        lambda: layer_of().bfloat16(),
    ],
)
def test_what_it_does_not_compute_is_left_to_the_experts(make: Callable[[], MixtureOfExperts]) -> None:
    layer = make()
    dtype = layer.gate.weight.dtype
    x = torch.randn(5, WIDTH, dtype=dtype)
    chosen, weights = layer.gate(x)
    pairs = chosen.flatten()
    arguments = x, weights, pairs.argsort(stable=True), pairs.bincount(minlength=len(layer.experts))
    assert expert_rows.expert_rows(layer.experts, *arguments) is None
    assert layer(x).shape == x.shape


def test_neither_under_autocast_nor_without_gradients() -> None:
    layer = layer_of()
    tensors = inputs(layer, 5)
    assert expert_rows.expert_rows(layer.experts, *tensors) is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert expert_rows.expert_rows(layer.experts, *tensors) is None
    with torch.no_grad():
        assert expert_rows.expert_rows(layer.experts, *tensors) is None


def test_frozen_experts_have_no_gradient_and_pass_it_on() -> None:
    layer, x = layer_of(), torch.randn(5, WIDTH, requires_grad=True)
    frozen = layer.experts[2]
    frozen.requires_grad_(False)
    layer(x).sum().backward()
    assert x.grad is not None
    assert x.grad.abs().sum() > 0
    assert all(p.grad is None for p in frozen.parameters())
    assert all(p.grad is not None for e in layer.experts if e is not frozen for p in e.parameters())
