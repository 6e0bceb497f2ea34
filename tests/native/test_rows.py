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
from tests.tolerance import assert_rounded_once, assert_within_reference

DTYPES = [torch.float32, torch.bfloat16]
SIZES = [(1, 1), (3, 7), (5, 16), (2, 33), (9, 64), (17, 129), (40, 515)]
Run = Callable[..., Tensor | tuple[Tensor, ...] | list[Tensor]]
EPS = 1e-5


def draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def results(run: Run, inputs: list[Tensor], dtype: torch.dtype, seed: int = 99) -> list[Tensor]:
    """Outputs of `run`, and the gradients of its inputs for random gradients of the outputs."""
    given = [t.to(dtype).detach().requires_grad_() for t in inputs]
    found = run(*given)
    outs = [found] if isinstance(found, Tensor) else list(found)
    low = inputs[0].dtype
    grads = [draw(*out.shape, seed=seed + i, dtype=low).to(dtype) for i, out in enumerate(outs)]
    return [*outs, *torch.autograd.grad(outs, given, grads)]


def assert_as_the_formula(
    check: str, fast: Run, plain: Run, inputs: list[Tensor], what: str, stepwise: Run | None = None
) -> None:
    """Within the error of the formula in the dtype of the inputs; what cancels in it is standard normal. In bf16 rather
    those of `stepwise`, the formula in float64 with what lies between rounded as well."""
    dtype = inputs[0].dtype
    got = results(fast, inputs, dtype)
    if dtype == torch.bfloat16 and stepwise is not None:
        for i, (one, right) in enumerate(zip(got, results(stepwise, inputs, torch.float64), strict=True)):
            assert_rounded_once(one, right, f"{what}, tensor {i}", terms=1.0, ulps=2)
        return
    exact, low = (results(plain, inputs, t) for t in (torch.float64, dtype))
    for i, (one, right, rough) in enumerate(zip(got, exact, low, strict=True)):
        assert_within_reference(one, right, rough, f"{what}, tensor {i}", 1.0, f"{check} {str(dtype)[6:]}")


def kept(x: Tensor) -> Tensor:
    """What is rounded to bf16 on the way, with the gradient of what is not."""
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
    """In float32 as the model does, in float64 where the tensors are."""
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
        what = f"{kind} {dtype} {count}x{width}"
        for given in ([x, weight, bias], [x, weight]):
            assert_as_the_formula(
                f"{kind} norm",
                lambda x, w, b=None: normed(kind, x, w, b, EPS),
                lambda x, w, b=None: plain_norm(kind, x, w, b),
                given,
                what,
                lambda x, w, b=None: stepwise_norm(kind, x, w, b),
            )
        assert_as_the_formula(
            f"{kind} norm",
            lambda x, y, w: add_norm(kind, x, y, w, None, EPS),
            added,
            [x, y, weight],
            f"sum, {what}",
            added_stepwise,
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_behind_a_gate_is_the_two_in_turn(dtype: torch.dtype) -> None:
    """To the bit, though nothing but their inputs is kept."""
    leaves = [
        draw(*shape, seed=3, dtype=dtype).requires_grad_() for shape in ((2, 5, 48), (2, 5, 3, 16), (16,))
    ]
    gate, x, weight = leaves
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = gated_norm(gate, x, weight, EPS, "silu")
    assert sum(t.nbytes for t in kept) == sum(t.nbytes for t in leaves)
    in_turn = gated(gate, normed("rms", x, weight, None, EPS).flatten(-2), "silu")
    assert torch.equal(y, in_turn)
    for a, b in zip(
        *(torch.autograd.grad(result.square().sum(), leaves) for result in (y, in_turn)), strict=True
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norms_read_weights_by_their_strides(kind: Norm) -> None:
    x, both = draw(3, 20, seed=0, dtype=torch.float32), draw(20, 2, seed=1, dtype=torch.float32)
    assert_as_the_formula(
        f"{kind} norm",
        lambda x, both: normed(kind, x, both[:, 0], both[:, 1], EPS),
        lambda x, both: plain_norm(kind, x, both[:, 0], both[:, 1]),
        [x, both],
        kind,
    )


def test_what_the_kernels_do_not_take_is_broadcast_as_in_the_formula() -> None:
    x, one = draw(3, 20, seed=0, dtype=torch.float32), torch.tensor([2.0])
    assert torch.equal(normed("rms", x, one, None, EPS), plain_rms_norm(x, one, EPS))
    assert torch.equal(add_norm("rms", x, x[:1], x[0], None, EPS)[1], x + x[:1])
    assert torch.equal(gated(x, one, "silu"), plain_gated(x, one, "silu"))


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [act for act in ACTIVATIONS if act not in UPS])
def test_gates(use: Use, threads: None, level: str, dtype: torch.dtype, act: str) -> None:
    use(level)
    for count, width in SIZES:
        both = 3 * draw(count, 2 * width, seed=1, dtype=dtype)
        inputs = list(both.chunk(2, -1))  # rows with a step
        what = f"{act} {dtype} {count}x{width}"
        assert_as_the_formula(
            f"gate {act}",
            lambda g, u: gated(g, u, act),
            lambda g, u: plain_gated(g, u, act),
            inputs,
            what,
            lambda g, u: kept(plain_gated(g, None, act)) * u,
        )
        assert_as_the_formula(
            f"gate {act}",
            lambda g: gated(g, None, act),
            lambda g: plain_gated(g, None, act),
            inputs[:1],
            what,
            lambda g: plain_gated(g, None, act),
        )


@at_levels(2)
def test_a_sum_or_product_of_two_numbers_is_rounded_to_the_even_one_of_equally_near(
    use: Use, level: str
) -> None:
    """Sums of whole numbers below 256 lie in the middle of two of bf16 in every second case from 256 on."""
    use(level)
    x, y = (torch.randint(-255, 256, (9, 2, 5, 70)).bfloat16() for _ in range(2))
    weight = torch.ones(70, dtype=torch.bfloat16)
    assert torch.equal(add_norm("layer", x, y, weight, None, EPS)[1], (x.double() + y.double()).bfloat16())
    one, half = torch.ones(5, 64), torch.tensor([-0.5, 0.5]).repeat_interleave(32).expand(5, 64)
    for run, plain in (
        (lambda x, y: gated(x, y, "relu"), lambda x, y: F.relu(x) * y),
        (lambda x, y: rotate([x, y], one, half, "halves"), lambda x, y: rotated([x, y], one, half, "halves")),
    ):
        made, right = (results(f, [x, y], t) for f, t in ((run, x.dtype), (plain, torch.float64)))
        assert all(torch.equal(a, b.bfloat16()) for a, b in zip(made, right, strict=True))


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
    before = torch.get_num_threads()
    made = []
    for count in (1, 2):
        torch.set_num_threads(count)
        made.append(normed("rms", x, weight, None, EPS))
    torch.set_num_threads(before)
    assert torch.equal(*made)


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
        "rotation": (lambda x: rotate([x.view(1, 1, 4, 6)], cos, sin, "adjacent")[0], [x]),
    }


@pytest.mark.parametrize("name", runs_of_all())
def test_second_derivatives_are_those_of_the_formula(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run, inputs = runs_of_all()[name]

    def second() -> list[Tensor]:
        given = [t.clone().requires_grad_() for t in inputs]
        out = run(*given)
        assert isinstance(out, Tensor)
        grads = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in grads), given))

    fast = second()
    monkeypatch.setattr(rows, "runs", lambda *tensors: False)
    for got, right in zip(fast, second(), strict=True):
        torch.testing.assert_close(got, right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_sum_has_its_gradient_where_nobody_uses_its_norm(kind: Norm) -> None:
    x, y, weight, back = (draw(4, 6, seed=i, dtype=torch.float32) for i in range(4))
    given = [x.requires_grad_(), y.requires_grad_()]
    total = add_norm(kind, *given, weight[0].requires_grad_(), None, EPS)[1]
    assert all(torch.equal(grad, back) for grad in torch.autograd.grad(total, given, back))


@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)  # torch's own, in jvp
@pytest.mark.parametrize("name", runs_of_all())
def test_transforms_of_functions_see_the_formula(name: str) -> None:
    run, inputs = runs_of_all()[name]
    tangents = tuple(torch.ones_like(t) for t in inputs)
    value, slope = torch.func.jvp(run, tuple(inputs), tangents)
    assert torch.allclose(value, run(*inputs), rtol=1e-5, atol=1e-6)
    assert slope.isfinite().all()
    many = torch.func.vmap(run)(*(torch.stack((t, 2 * t)) for t in inputs))
    assert torch.allclose(many[0], value, rtol=1e-5, atol=1e-6)


def test_other_dtypes_run_the_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused.rows, "norm", None)
    x = torch.randn(2, 8)
    for given in (x.double(), x.half()):
        assert normed("rms", given, torch.ones(8, dtype=given.dtype), None, EPS).dtype == given.dtype
    assert normed("rms", x.bfloat16(), torch.ones(8), None, EPS).dtype == torch.float32
