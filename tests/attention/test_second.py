"""Second derivatives: backend dense has them; every other backend raises an error and never returns a number."""

import itertools

import pytest
import torch
from torch import Tensor

from headway.attention import KeyValues, attend, attend_keys
from headway.attention.backends.native import torch_op as native_op
from headway.attention.call import validate
from headway.errors import BackendError
from headway.native import loader as native
from headway.patterns import Causal, Full, Pattern, Sink, Window
from headway.scores import ALiBi, RelativeBias, RelativeKey, Score, SoftCap
from headway.tokens import Tokens
from tests.native.presence import needs_kernels

N = 9
PACKED = Tokens.packed([[5, 4], [7]], N)
NARROW = Window.last(3) | Causal() & Sink(1)


def qkv(dtype: torch.dtype = torch.float32, queries: int = N) -> list[Tensor]:
    sizes = ((4, queries), (2, N), (2, N))
    return [torch.randn(2, h, n, 4, dtype=dtype, requires_grad=True) for h, n in sizes]


def graph(out: Tensor, *inputs: Tensor) -> list[Tensor]:
    """Returns first derivatives, with their graph, of a function that is not linear in `out`."""
    return list(torch.autograd.grad(out.square().sum(), inputs, create_graph=True))


def again(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sum(t.square().sum() for t in graph(out, *inputs)), inputs)


STEPS: dict[str, tuple[Score, ...]] = {
    "none": (),
    "cap, slopes": (SoftCap(2.0), ALiBi()),
    "tables": (
        RelativeBias(torch.randn(8, 4, dtype=torch.float64), max_distance=20),
        RelativeKey(torch.randn(5, 4, dtype=torch.float64)),
    ),
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dense_has_them_with_scores_dropout_documents_and_several_sets(name: str, dropout: float) -> None:
    """Compares with finite differences of first derivatives, for out and lse; a padded query sees nothing."""
    steps = STEPS[name]
    tables = [t.clone().requires_grad_() for step in steps for t in step.parameters]

    def run(q: Tensor, k: Tensor, v: Tensor, *parameters: Tensor) -> tuple[Tensor, Tensor]:
        remaining = list(parameters)
        score = [step.with_parameters(tuple(remaining.pop(0) for _ in step.parameters)) for step in steps]
        sets = [KeyValues(k[:, :, a:b], v[:, :, a:b], PACKED.slice(a, b)) for a, b in ((0, 4), (4, N))]
        part = attend_keys(q, PACKED, sets, NARROW, score=score, dropout=dropout, seed=3, backend="dense")
        return part.out, part.lse.masked_fill(part.lse == -float("inf"), 0.0)

    assert torch.autograd.gradgradcheck(run, (*qkv(torch.float64), *tables), fast_mode=True)


FORMS: dict[str, tuple[int, Pattern, Tokens | None, Tokens | None]] = {
    "full": (N, Full(), None, None),
    "causal": (N, Causal(), None, None),
    "chunk": (3, Causal(), Tokens.range(3, start=N - 3), Tokens.range(N)),
    "mask": (N, NARROW, None, None),
    "documents": (N, Causal(), PACKED, PACKED),
}


@pytest.mark.parametrize(
    ("backend", "form"),
    [
        pytest.param(backend, form, marks=[needs_kernels] if backend == "native" else [])
        for backend, form in itertools.product(("sdpa", "native", "banded", "diagonal"), FORMS)
        if (backend, form) != ("diagonal", "chunk")  # which needs as many queries as keys
    ],
)
def test_others_name_themselves_and_the_one_that_has_them(backend: str, form: str) -> None:
    queries, pattern, at_q, at_k = FORMS[form]
    inputs = qkv(queries=queries)
    with pytest.raises(BackendError, match=rf'need backend="dense"; this call ran on \'{backend}\'$'):
        again(attend(*inputs, pattern, q_tokens=at_q, k_tokens=at_k, backend=backend), *inputs)


@pytest.mark.parametrize("more", [{"score": ALiBi()}, {"dropout": 0.3, "seed": 3}, {}], ids=str)
def test_small_calls_of_auto_say_so_too(more: dict[str, object]) -> None:
    """In float32, `auto` takes native for scores or dropout if its kernels are there, else dense or sdpa."""
    inputs = qkv()
    if more and native.library() is None:
        truth = again(attend(*inputs, Causal(), backend="dense", **more), *inputs)
        for a, b in zip(again(attend(*inputs, Causal(), **more), *inputs), truth, strict=True):
            torch.testing.assert_close(a, b)
        return
    with pytest.raises(BackendError, match=f"this call ran on '{'native' if more else 'sdpa'}'"):
        again(attend(*inputs, Causal(), **more), *inputs)


def test_torchs_kernel_gives_first_derivatives_that_keep_their_graph() -> None:
    """Needed if another part of the loss is differentiated twice."""
    inputs = qkv(torch.float64)
    derivatives = graph(attend(*inputs, Causal(), backend="sdpa"), *inputs)
    for a, b in zip(derivatives, graph(attend(*inputs, Causal(), backend="dense"), *inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


@needs_kernels
def test_the_operator_says_so_and_a_compiled_graph_fails() -> None:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        at = Tokens.range(N)
        return native_op.run(validate(q, at, [KeyValues(k, v, at)], Causal(), None, (), None, 0.0, None)).out

    inputs = qkv()
    with pytest.raises(BackendError, match=r"need backend=\"dense\"; this call ran on 'native'"):
        again(run(*inputs), *inputs)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        again(torch.compile(run, backend="aot_eager")(*inputs), *inputs)
