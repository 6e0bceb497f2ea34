"""Longformer's claims, rows 98 to 101: three implementations of the same function, and what each stores."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from headway.attention import attend
from headway.attention.plan import plan
from headway.errors import BackendError
from headway.models import ModelSpec
from headway.nn import GlobalAttention
from headway.patterns import Causal, Global, PerHead, Window, pairs
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.models.longformer_rows import EXACT, HEADS, encoder, ids, made
from tests.native.presence import needs_kernels
from tests.plans import area

BACKENDS = ("dense", "diagonal", "banded")  # "loop" is diagonal; "chunks" only takes windows
MARKED = [[0, 4], [7]]


def states_and_gradients(
    spec: ModelSpec, backend: str, dtype: torch.dtype, count: int = 33
) -> list[tuple[str, Tensor]]:
    """Returns the states at the tokens, and the gradient of every parameter."""
    model = made(spec, backend, dtype)
    tokens = Tokens.from_lengths([count, count - 9]).with_global(MARKED)
    out = model(ids(2, count), tokens=tokens)[tokens.valid]
    (out * torch.linspace(-1, 1, out.shape[-1], dtype=dtype)).sum().backward()
    grads = [(name, p.grad) for name, p in model.named_parameters()]
    return [("out", out.detach()), *((name, g) for name, g in grads if g is not None)]


IMPLEMENTED = [
    encoder([Window.around(2) | Global(), Window.around(5) | Global()]),
    encoder([Window.around(2, step=3) | Global(), Window(4, 1) | Global()]),
    encoder(PerHead(*(Window.around(i + 1, step=i + 1) for i in range(HEADS))) | Global()),
    encoder(Window.around(3) | Global(), heads=4, kv_heads=2),
]


@pytest.mark.parametrize("spec", IMPLEMENTED, ids=["window", "dilated", "by head", "shared keys"])
@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_rows_98_to_101_every_implementation_by_name_through_a_model(spec: ModelSpec, backend: str) -> None:
    expected = states_and_gradients(spec, "dense", torch.float64)
    actual = states_and_gradients(spec, backend, torch.float64)
    scale = max(float(g.abs().max()) for _, g in expected[1:])
    assert [name for name, _ in actual] == [name for name, _ in expected]
    assert off(actual[0][1], expected[0][1]) < EXACT
    assert any("q_global_proj" in name for name, _ in actual)
    for (name, a), (_, b) in zip(actual[1:], expected[1:], strict=True):
        assert float((a - b).abs().max()) < EXACT * scale, name


@needs_kernels
@pytest.mark.parametrize("spec", IMPLEMENTED, ids=["window", "dilated", "by head", "shared keys"])
def test_row_100_the_kernels_by_name_through_a_model(spec: ModelSpec) -> None:
    """The root mean square error over all numbers is at most twice that of the dense form in float32."""
    exact = dict(states_and_gradients(spec, "dense", torch.float64))
    dense = dict(states_and_gradients(spec, "dense", torch.float32))
    actual = dict(states_and_gradients(spec, "native", torch.float32))

    def error(results: dict[str, Tensor], part: Callable[[str], bool]) -> float:
        errors = [(results[name].double() - exact[name]).flatten() for name in exact if part(name)]
        return float(torch.cat(errors).square().mean().sqrt())

    for part in (lambda name: name == "out", lambda name: name != "out"):
        assert error(actual, part) <= 2 * error(dense, part)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_101_gradcheck_of_both_projections(backend: str) -> None:
    layer = GlobalAttention(
        6, 2, head_dim=3, pattern=Window.around(1) | Global(), qkv_bias=True, backend=backend
    )
    layer = layer.double()
    tokens = Tokens.from_lengths([6, 4]).with_global([[1, 4], [0]])
    valid = tokens.valid.unsqueeze(-1)
    weights = [p.detach().requires_grad_() for p in layer.parameters()]
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(
            layer, dict(zip(names, parameters, strict=True)), (x,), {"tokens": tokens}
        )
        return y * valid

    x = torch.randn(2, 6, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (x, *weights), fast_mode=True)


class Largest(TorchDispatchMode):
    """The number of elements of the largest tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor):
                self.numbers = max(self.numbers, t.untyped_storage().nbytes() // t.element_size())
        return out


def test_row_98_the_loop_stores_scores_that_are_seen_and_no_others() -> None:
    n, k = 512, 16
    q = torch.randn(1, 1, n, 4)
    numbers = {}
    for backend in BACKENDS:
        with Largest() as largest:
            attend(q, q, q, Window.around(k), backend=backend)
        numbers[backend] = largest.numbers
    assert numbers["diagonal"] == n * (2 * k + 1)
    assert numbers["dense"] >= n * n
    assert numbers["banded"] < n * n / 4


def test_row_99_chunks_by_name_store_twice_the_scores_of_the_loop() -> None:
    """Elements of the largest tensor that each makes: scores, w + 1 = 65 a token in the loop, 2 w = 128 in chunks."""
    n, d, pattern = 1024, 2, Window.around(32)
    q, k, v = (torch.randn(1, 1, n, d) for _ in range(3))
    numbers = {}
    for backend in ("diagonal", "chunks"):
        with Largest() as largest:
            attend(q, k, v, pattern, backend=backend)
        numbers[backend] = largest.numbers
    assert numbers == {"diagonal": n * 65, "chunks": n * 128}
    with pytest.raises(BackendError, match="windows without sinks or global tokens"):
        attend(q, k, v, pattern | Global(), backend="chunks")
    with pytest.raises(BackendError, match=r"it takes windows bounded on both sides, not Causal\(\)"):
        attend(q, k, v, Causal(), backend="chunks")


@pytest.mark.parametrize(("k", "ratio"), [(128, 2.0), (256, 2.0), (512, 1.5)])
def test_row_99_blocks_compute_less_than_twice_what_is_seen(k: int, ratio: float) -> None:
    """Overlapping w x w chunks store about twice as much (the paper, section 3.2); the blocks follow the band."""
    n = 4096
    tokens = Tokens.range(n)
    assert 1 < area(plan(Window.around(k), tokens, tokens)) / pairs(Window.around(k), n) < ratio
