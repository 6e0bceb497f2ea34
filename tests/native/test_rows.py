"""Norms, gates and rotations by the kernels, against their formulas in float64, forward and backward."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.native import rows
from headway.nn import fused
from headway.nn.fused import (
    ACTIVATIONS,
    UPS,
    Norm,
    add_norm,
    gated,
    gated_norm,
    normed,
    plain_gated,
    plain_rms_norm,
    rotate,
)
from headway.positions import tables
from tests.native.conftest import Use, at_levels
from tests.saved import saved_tensors
from tests.tolerance import assert_rounded_once, assert_within_reference

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1), (3, 7), (5, 16), (2, 33), (9, 64), (17, 129), (40, 515)]
Run = Callable[..., Tensor | tuple[Tensor, ...] | list[Tensor]]
EPS = 1e-5


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(run: Run, inputs: list[Tensor], dtype: torch.dtype, seed: int = 99) -> list[Tensor]:
    """Returns the outputs of `run`, and the gradients of its inputs for random gradients of the outputs."""
    leaves = [t.to(dtype).detach().requires_grad_() for t in inputs]
    result = run(*leaves)
    outs = [result] if isinstance(result, Tensor) else list(result)
    input_dtype = inputs[0].dtype
    grads = [draw(*out.shape, seed=seed + i, dtype=input_dtype).to(dtype) for i, out in enumerate(outs)]
    return [*outs, *torch.autograd.grad(outs, leaves, grads)]


def assert_as_the_formula(
    check: str, fast: Run, plain: Run, inputs: list[Tensor], label: str, stepwise: Run | None = None
) -> None:
    """Checks for at most the error of the formula in the dtype of the inputs; what cancels in it is standard normal. In
    bf16 the reference is `stepwise`, if given: the formula in float64 with intermediate results rounded as well."""
    dtype = inputs[0].dtype
    actuals = results(fast, inputs, dtype)
    if dtype == torch.bfloat16 and stepwise is not None:
        for i, (actual, exact) in enumerate(
            zip(actuals, results(stepwise, inputs, torch.float64), strict=True)
        ):
            assert_rounded_once(actual, exact, f"{label}, tensor {i}", terms=1.0, ulps=2)
        return
    exacts, lows = (results(plain, inputs, t) for t in (torch.float64, dtype))
    for i, (actual, exact, low) in enumerate(zip(actuals, exacts, lows, strict=True)):
        assert_within_reference(actual, exact, low, f"{label}, tensor {i}", 1.0, f"{check} {str(dtype)[6:]}")


def kept(x: Tensor) -> Tensor:
    """Returns an intermediate result that is rounded to bf16, with the gradient of the exact one."""
    return x + (x.bfloat16().double() - x).detach()


def plain_norm(kind: Norm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (
        F.layer_norm(x, x.shape[-1:], weight, bias, EPS)
        if kind == "layer"
        else plain_rms_norm(x, weight, EPS, bias)
    )


def stepwise_norm(kind: Norm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if kind == "layer":
        return plain_norm(kind, x, weight, bias)
    y = kept(plain_rms_norm(x, torch.ones_like(weight), EPS)) * weight
    return y if bias is None else kept(y) + bias


def rotated(xs: Sequence[Tensor], cos: Tensor, sin: Tensor, pairing: str | Tensor) -> list[Tensor]:
    """Computes in float32 as the model does, and in float64 for tensors in float64."""
    angles = [t.double() if xs[0].dtype == torch.float64 else t for t in (cos, sin)]
    return [tables.rotate(x, *angles, pairing) for x in xs]


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms(use: Use, threads: None, level: str, dtype: torch.dtype, kind: Norm) -> None:
    use(level)

    def added(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return plain_norm(kind, x + y, w, None), x + y

    def added_stepwise(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = kept(x + y)
        return stepwise_norm(kind, total, w, None), total

    for count, width in SIZES:
        x, y, weight, bias = (
            draw(*shape, seed=i, dtype=dtype)
            for i, shape in enumerate(((count, width),) * 2 + ((width,),) * 2)
        )
        assert rows.runs(x, y, weight, bias)
        label = f"{kind} {dtype} {count}x{width}"
        for inputs in ([x, weight, bias], [x, weight]):
            assert_as_the_formula(
                f"{kind} norm",
                lambda x, w, b=None: normed(kind, x, w, b, EPS),
                lambda x, w, b=None: plain_norm(kind, x, w, b),
                inputs,
                label,
                lambda x, w, b=None: stepwise_norm(kind, x, w, b),
            )
        assert_as_the_formula(
            f"{kind} norm",
            lambda x, y, w: add_norm(kind, x, y, w, None, EPS),
            added,
            [x, y, weight],
            f"sum, {label}",
            added_stepwise,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_behind_a_gate_is_the_two_in_turn(dtype: torch.dtype) -> None:
    """To the bit, though only their inputs are kept."""
    leaves = [
        draw(*shape, seed=3, dtype=dtype).requires_grad_() for shape in ((2, 5, 48), (2, 5, 3, 16), (16,))
    ]
    gate, x, weight = leaves
    with saved_tensors() as saved:
        y = gated_norm(gate, x, weight, EPS, "silu")
    assert sum(t.nbytes for t in saved) == sum(t.nbytes for t in leaves)
    in_turn = gated(gate, normed("rms", x, weight, None, EPS).flatten(-2), "silu")
    assert torch.equal(y, in_turn)
    for a, b in zip(
        *(torch.autograd.grad(result.square().sum(), leaves) for result in (y, in_turn)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_read_weights_by_their_strides(kind: Norm) -> None:
    x, weight_and_bias = draw(3, 20, seed=0, dtype=torch.float32), draw(20, 2, seed=1, dtype=torch.float32)
    assert_as_the_formula(
        f"{kind} norm",
        lambda x, weight_and_bias: normed(kind, x, weight_and_bias[:, 0], weight_and_bias[:, 1], EPS),
        lambda x, weight_and_bias: plain_norm(kind, x, weight_and_bias[:, 0], weight_and_bias[:, 1]),
        [x, weight_and_bias],
        kind,
    )


def test_what_the_kernels_do_not_take_is_broadcast_as_in_the_formula() -> None:
    x, single = draw(3, 20, seed=0, dtype=torch.float32), torch.tensor([2.0])
    assert torch.equal(normed("rms", x, single, None, EPS), plain_rms_norm(x, single, EPS))
    assert torch.equal(add_norm("rms", x, x[:1], x[0], None, EPS)[1], x + x[:1])
    assert torch.equal(gated(x, single, "silu"), plain_gated(x, single, "silu"))


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [act for act in ACTIVATIONS if act not in UPS])
def test_gates(use: Use, threads: None, level: str, dtype: torch.dtype, act: str) -> None:
    use(level)
    for count, width in SIZES:
        gate_and_up = 3 * draw(count, 2 * width, seed=1, dtype=dtype)
        inputs = list(gate_and_up.chunk(2, -1))  # rows with a step
        label = f"{act} {dtype} {count}x{width}"
        assert_as_the_formula(
            f"gate {act}",
            lambda g, u: gated(g, u, act),
            lambda g, u: plain_gated(g, u, act),
            inputs,
            label,
            lambda g, u: kept(plain_gated(g, None, act)) * u,
        )
        assert_as_the_formula(
            f"gate {act}",
            lambda g: gated(g, None, act),
            lambda g: plain_gated(g, None, act),
            inputs[:1],
            label,
            lambda g: plain_gated(g, None, act),
        )


@at_levels(2)
def test_a_sum_or_product_of_two_numbers_is_rounded_to_the_even_one_of_equally_near(
    use: Use, level: str
) -> None:
    """Sums of whole numbers below 256 are halfway between two numbers of bf16 in every second case from 256 on."""
    use(level)
    x, y = (torch.randint(-255, 256, (9, 2, 5, 70)).bfloat16() for _ in range(2))
    weight = torch.ones(70, dtype=torch.bfloat16)
    assert torch.equal(add_norm("layer", x, y, weight, None, EPS)[1], (x.double() + y.double()).bfloat16())
    cos, sin = torch.ones(5, 64), torch.tensor([-0.5, 0.5]).repeat_interleave(32).expand(5, 64)
    for run, plain in (
        (lambda x, y: gated(x, y, "relu"), lambda x, y: F.relu(x) * y),
        (lambda x, y: rotate([x, y], cos, sin, "halves"), lambda x, y: rotated([x, y], cos, sin, "halves")),
    ):
        actual, expected = (results(f, [x, y], t) for f, t in ((run, x.dtype), (plain, torch.float64)))
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(actual, expected, strict=True))


@at_levels(3)
def test_what_is_no_number_stays_visible(use: Use, level: str) -> None:
    use(level)
    for dtype in DTYPES:
        x = torch.zeros(1, 40, dtype=dtype)
        x[0, 37] = torch.nan
        assert normed("rms", x, torch.ones(40, dtype=dtype), None, EPS).isnan().all()
        for act in ACTIVATIONS:
            assert torch.equal(gated(x, None, act).isnan(), x.isnan())


def test_number_of_threads_changes_no_bit_of_a_row() -> None:
    x, weight = draw(64, 515, seed=0, dtype=torch.float32), torch.ones(515)
    previous, outputs = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            outputs.append(normed("rms", x, weight, None, EPS))
    finally:
        torch.set_num_threads(previous)
    assert torch.equal(*outputs)


def runs_of_all() -> dict[str, tuple[Run, list[Tensor]]]:
    x, y, weight = (
        draw(*shape, seed=i, dtype=torch.float32) for i, shape in enumerate(((4, 6), (4, 6), (6,)))
    )
    cos, sin = torch.ones(4, 6) * 0.6, torch.tensor([-0.8, 0.8] * 3).expand(4, 6)
    return {
        "norm": (lambda x, w: normed("rms", x, w, None, EPS), [x, weight]),
        "sum, normed": (lambda x, y, w: add_norm("rms", x, y, w, None, EPS)[0], [x, y, weight]),
        "sum, both": (lambda x, y, w: torch.mul(*add_norm("rms", x, y, w, None, EPS)), [x, y, weight]),
        "gate": (lambda g, u: gated(g, u, "silu"), [x, y]),
        "norm behind a gate": (
            lambda g, x, w: gated_norm(g, x.view(4, 2, 3), w[:3], EPS, "silu"),
            [x, y, weight],
        ),
        "rotation": (lambda x: rotate([x.view(1, 1, 4, 6)], cos.to(x), sin.to(x), "adjacent")[0], [x]),
    }


@pytest.mark.parametrize("name", runs_of_all())
def test_second_derivatives_are_those_of_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, inputs = runs_of_all()[name]

    def second() -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in inputs]
        out = run(*leaves)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), leaves))

    fast = second()
    monkeypatch.setattr(rows, "runs", lambda *tensors: False)
    for actual, expected in zip(fast, second(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_sum_has_its_gradient_where_nobody_uses_its_norm(kind: Norm) -> None:
    x, y, weight, d_total = (draw(4, 6, seed=i, dtype=torch.float32) for i in range(4))
    inputs = [x.requires_grad_(), y.requires_grad_()]
    total = add_norm(kind, *inputs, weight[0].requires_grad_(), None, EPS)[1]
    assert all(torch.equal(grad, d_total) for grad in torch.autograd.grad(total, inputs, d_total))


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's own, in jvp
@pytest.mark.parametrize("name", runs_of_all())
def test_transforms_of_functions_see_the_formula(name: str) -> None:
    run, inputs = runs_of_all()[name]
    tangents = tuple(torch.ones_like(t) for t in inputs)
    value, slope = torch.func.jvp(run, tuple(inputs), tangents)
    assert torch.allclose(value, run(*inputs), rtol=1e-5, atol=1e-6)
    after, before = (run(*(t.double() + step for t in inputs)) for step in (1e-4, -1e-4))
    torch.testing.assert_close(slope, (after - before).float() / 2e-4, rtol=1e-4, atol=1e-5)
    batched = torch.func.vmap(run)(*(torch.stack((t, 2 * t)) for t in inputs))
    assert torch.allclose(batched[0], value, rtol=1e-5, atol=1e-6)


def test_other_dtypes_run_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.rows, "norm", None)
    x = torch.randn(2, 8)
    for inputs in (x.double(), x.half()):
        assert normed("rms", inputs, torch.ones(8, dtype=inputs.dtype), None, EPS).dtype == inputs.dtype
    assert normed("rms", x.bfloat16(), torch.ones(8), None, EPS).dtype == torch.float32
