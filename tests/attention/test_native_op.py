"""`headway::attend` and its backward as operators: torch's own checks of operators, and whole graphs around them."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch._dynamo.testing
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from headway.attention import KeyValues, attend, attend_keys
from headway.attention.backends.native import torch_op as native_op
from headway.attention.call import Call, validate
from headway.native import interface as c
from headway.native import loader as native
from headway.patterns import And, Causal, Global, Or, Pattern, PerHead, Sink, Window
from headway.scores import ALiBi, RelativeBias, Score, SoftCap
from headway.tokens import Tokens
from tests.checkpoints.shares import share
from tests.native.presence import needs_kernels

N = 33
WINDOW = Window.last(9) | Causal() & Sink(2)
MARKED = Tokens.range(N).with_global([[0, 5], [9]])
PACKED = Tokens.packed([[10, 23], [30]], N)


pytestmark = needs_kernels


def tensors(n: int = N, gradient: bool = True) -> list[Tensor]:
    return [torch.randn(2, heads, n, 16, requires_grad=gradient) for heads in (4, 2, 2)]


def call(pattern: Pattern, at: Tokens, score: tuple[Score, ...], dropout: float, sets: int) -> Call:
    q, k, v = tensors()
    cuts = [0, N] if sets == 1 else [0, 11, N]
    k, v = ([t.detach()[:, :, a:b].clone().requires_grad_() for a, b in pairwise(cuts)] for t in (k, v))
    keys = [KeyValues(*part, at.slice(a, b)) for *part, (a, b) in zip(k, v, pairwise(cuts), strict=True)]
    return validate(q, at, keys, pattern, None, score, None, dropout, 7)


CALLS = {
    "causal": (Causal(), Tokens.range(N), (), 0.0, 1),
    "globals, a table": (Window.around(3) | Global(), MARKED, (RelativeBias(torch.randn(32, 4)),), 0.0, 1),
    "documents, steps, dropout": (WINDOW, PACKED, (SoftCap(4.0), ALiBi((0.5, 0.25, 1.0, 2.0))), 0.2, 1),
    "two sets": (WINDOW, MARKED, (ALiBi(), RelativeBias(torch.randn(16, 4), False, 30)), 0.1, 2),
    "positions": (WINDOW, MARKED.with_position(MARKED.index + 3), (SoftCap(2.0),), 0.0, 1),
}


def by_token(t: Tensor) -> Tensor:
    """Returns the same tensor with the heads of a token side by side in memory, as projections write them."""
    return t.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_(t.requires_grad)


@pytest.mark.parametrize(
    "way",
    [pytest.param(lambda t: t, id="by head", marks=pytest.mark.slow), pytest.param(by_token, id="by token")],
)
@share("name", CALLS, 1, 2)
def test_the_operators_pass_torchs_own_checks(name: str, way: Callable[[Tensor], Tensor]) -> None:
    checked = call(*CALLS[name])
    checked = replace(checked, q=way(checked.q))
    for table in checked.parameters:
        table.requires_grad_()
    arguments = native_op.arguments(checked)
    torch.library.opcheck(torch.ops.headway.attend.default, arguments)
    plain = tuple(
        [t.detach() for t in x] if isinstance(x, list) and x and isinstance(x[0], Tensor) else x
        for x in arguments[1:]
    )
    part = native_op.run(checked)
    out, lse = part.out.detach(), part.lse.detach()
    arguments = (out, lse, torch.randn_like(out), torch.randn_like(lse), checked.q.detach(), *plain)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.headway.attend_backward.default, arguments, test_utils=checks)


def same(f: Callable[..., Any], *inputs: Tensor, backend: str = "aot_eager") -> None:
    """Checks that one whole graph gives the bits of `f`, and of its gradients."""
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for ours, plain in zip(_all(compiled, inputs), _all(f, inputs), strict=True):
        assert torch.equal(ours, plain)


def _all(f: Callable[..., Any], inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    result = f(*inputs)
    parts = (result,) if isinstance(result, Tensor) else (result.out, result.lse)
    return *parts, *torch.autograd.grad(sum(p.square().sum() for p in parts), inputs)


@pytest.mark.parametrize("gradient", [False, True])
def test_a_result_lies_as_its_queries_do(gradient: bool) -> None:
    """The layer after attention joins the heads of a token, which then needs no copy."""
    q, k, v = tensors(gradient=gradient)
    for _ in range(2):  # the second call takes its form from the cache
        plain, moved = (attend(x, k, v, WINDOW, backend="native") for x in (q, by_token(q)))
        assert plain.is_contiguous()
        assert moved.transpose(1, 2).is_contiguous()
        assert torch.equal(plain, moved)


TABLE = torch.randn(32, 4)
GRAPHS: dict[str, Callable[..., Any]] = {
    "causal": lambda q, k, v: attend(q * 2, k, v, Causal(), backend="native") * 2,
    "documents": lambda q, k, v: attend(
        q, k, v, WINDOW, q_tokens=PACKED, k_tokens=PACKED, dropout=0.1, seed=3, backend="native"
    ),
    "globals": lambda q, k, v: attend(
        q, k, v, Window.around(3) | Global(), q_tokens=MARKED, k_tokens=MARKED, scale=0.5, backend="native"
    ),
    "two sets": lambda q, k, v: attend_keys(
        q,
        Tokens.range(N),
        [
            KeyValues(k[:, :, :9], v[:, :, :9], Tokens.range(9)),
            KeyValues(k[:, :, 9:], v[:, :, 9:], Tokens.range(N - 9, 9)),
        ],
        WINDOW,
        score=ALiBi(),
        backend="native",
    ),
    "heads": lambda q, k, v: attend(
        q, k, v, PerHead(Causal(), Window.last(3), Causal(), WINDOW), backend="native"
    ),
}


@share("name", GRAPHS, 0, 2)
def test_attention_is_one_whole_graph_forward_and_backward(name: str) -> None:
    same(GRAPHS[name], *tensors())


def test_tables_get_their_gradient_through_the_graph() -> None:
    table = torch.randn(32, 4, requires_grad=True)
    same(
        lambda q, k, v, t: attend(
            q, k, v, WINDOW, score=(SoftCap(3.0), RelativeBias(t), ALiBi()), backend="native"
        ),
        *tensors(),
        table,
    )


def test_one_graph_serves_every_length() -> None:
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, k, v: attend(q, k, v, WINDOW, backend="native"), fullgraph=True, backend=count
    )
    for n in (65, 70, 80, 31):
        inputs = tensors(n)
        assert torch.equal(compiled(*inputs), attend(*inputs, WINDOW, backend="native"))
    assert count.frame_count == 2


DYNAMIC: dict[str, Callable[..., Any]] = {
    "native": lambda q, k, v: attend(q, k, v, WINDOW, backend="native"),
    "auto": lambda q, k, v: attend(q, k, v, Causal(), score=(SoftCap(3.0), ALiBi()), dropout=0.1, seed=3),
    "a scale": lambda q, k, v: attend(q, k, v, WINDOW, scale=0.3, backend="native"),
    "a scale of the width": lambda q, k, v: attend(
        q, k, v, WINDOW, scale=q.shape[3] ** -0.7, backend="native"
    ),
    "dense": lambda q, k, v: attend(q, k, v, WINDOW, backend="dense"),
}


@pytest.mark.parametrize("name", [*list(DYNAMIC)[:-1], pytest.param("dense", marks=pytest.mark.slow)])
def test_a_graph_whose_sizes_are_all_symbols_serves_every_length(name: str) -> None:
    """`dynamic=True`: the width per head is a symbol too, and so is the scale that comes from it."""
    f = DYNAMIC[name]
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    compiled(*tensors(65))
    with torch.compiler.set_stance("fail_on_recompile"):
        for n in (70, 80, 31):
            inputs = tensors(n)
            for ours, plain in zip(_all(compiled, inputs), _all(f, inputs), strict=True):
                assert torch.equal(ours, plain)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_inductor_compiles_around_it() -> None:
    for f in GRAPHS.values():
        same(f, *tensors(), backend="inductor")


class Layer(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return attend(q, q, q, WINDOW)


def test_exported_programs_hold_it_for_every_length() -> None:
    length = torch.export.Dim("length", min=3, max=500)
    program = torch.export.export(Layer(), (torch.randn(1, 2, 33, 16),), dynamic_shapes={"q": {2: length}})
    for n in (33, 70):
        q = torch.randn(1, 2, n, 16)
        assert torch.equal(program.module()(q), attend(q, q, q, WINDOW, backend="native"))


def test_that_there_are_kernels_is_a_constant_as_torch_marks_it() -> None:
    marks = vars(torch.compiler.assume_constant_result(lambda: True))
    assert marks == vars(native.library) == vars(native.why_missing)


def test_auto_takes_the_operator_where_a_graph_is_traced() -> None:
    seen: list[Any] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    inputs = tensors(gradient=False)
    out = torch.compile(lambda q, k, v: attend(q, k, v, Causal()), fullgraph=True, backend=note)(*inputs)
    assert torch.ops.headway.attend in seen
    assert torch.equal(out, attend(*inputs, Causal(), backend="native"))


SPACED = Tokens.range(N).with_position(torch.arange(N)[None] * 2)
DEEP: Pattern = Causal()
for depth in range(c.DEEPEST):
    DEEP = (Or if depth % 2 else And)((Window.last(depth + 2), DEEP))
BEYOND: dict[str, Callable[..., Any]] = {
    "distances that are not of the index": lambda q, k, v: attend(
        q, k, v, Causal(), q_tokens=SPACED, k_tokens=SPACED, score=ALiBi()
    ),
    "a table of distances that are not": lambda q, k, v: attend(
        q, k, v, Causal(), q_tokens=SPACED, k_tokens=SPACED, score=RelativeBias(TABLE)
    ),
    "too many steps": lambda q, k, v: attend(q, k, v, Causal(), score=[SoftCap(3.0)] * (c.MOST_SCORES + 1)),
    "too wide": lambda q, k, v: attend(q.repeat(1, 1, 1, 40), k.repeat(1, 1, 1, 40), v, Causal()),
    "too deep": lambda q, k, v: attend(q, k, v, DEEP),
    "another type": lambda q, k, v: attend(q.double(), k.double(), v.double(), Causal(), score=ALiBi()),
}


@share("name", BEYOND, 0, 2)
@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_what_the_kernels_cannot_run_runs_elsewhere_in_a_graph_as_outside(name: str) -> None:
    inputs, f = tensors(gradient=False), BEYOND[name]
    torch.testing.assert_close(torch.compile(f, backend="aot_eager")(*inputs), f(*inputs))


def test_tokens_are_put_together_as_they_were_taken_apart() -> None:
    for at in (Tokens.range(N, 4), SPACED, MARKED, PACKED, MARKED.with_position(MARKED.index + 3)):
        start, present, arrays = native_op._arrays(at)
        restored = native_op._side(N, start, present, list(arrays))
        assert restored.start == at.start
        for name in ("index", "document", "is_global", "position"):
            ours, theirs = getattr(restored, name), getattr(at, name)
            assert (ours is None) == (theirs is None), name
            assert ours is None or torch.equal(ours, theirs), name


def test_fake_tensors_have_the_shapes_of_real_ones() -> None:
    checked = call(*CALLS["two sets"])
    with FakeTensorMode(allow_non_fake_inputs=True):
        part = native_op.run(checked)
    assert part.out.shape == (2, 4, N, 16)
    assert part.lse.shape == (2, 4, N)
    assert part.out.dtype == part.lse.dtype == torch.float32
