"""What the bits of the native kernels do not depend on: memory layout, threads, the run; and empty inputs."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headway.patterns import Causal, Full, Global, Window
from headway.tokens import Tokens
from tests.native.calls import DTYPES, equal, outcome, problem
from tests.native.conftest import Use, at_levels
from tests.native.plain import Problem

LAID_OUT: dict[str, Callable[[Tensor], Tensor]] = {
    "[B, T, H, D]": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "[H, B, T, D]": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "[B, H, D, T]": lambda t: t.transpose(2, 3).contiguous().transpose(2, 3),
    "part of wider rows": lambda t: torch.cat((t, t, t), -1)[..., t.shape[-1] : 2 * t.shape[-1]],
    "every second slot": lambda t: t.repeat_interleave(2, 2)[:, :, ::2],
    "one element off": lambda t: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape),
}


@at_levels(0)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_where_tensors_lie_changes_nothing(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    for dims in ((64, 64), (33, 9)):
        case = problem(Window.last(40), "range", 131, (6, 2), dims, dtype)
        expected = outcome(case)
        for change in LAID_OUT.values():
            equal(outcome(replace(case, q=change(case.q), k=change(case.k), v=change(case.v))), expected)


@at_levels(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_head_or_row_repeated_by_strides(use: Use, level: str, dtype: torch.dtype) -> None:
    use(level)
    case = problem(Causal(), "range", 97, (4, 4), (32, 32), dtype)
    k, v = (t[:1, :1].expand(2, 4, -1, -1) for t in (case.k, case.v))
    copied = outcome(replace(case, k=k.contiguous(), v=v.contiguous()))
    equal(outcome(replace(case, k=k, v=v)), copied)


BIG = {
    "causal": lambda: problem(Causal(), "range", 2100, (2, 1), (64, 64), torch.float32),
    "windows": lambda: problem(
        Window.around(70, step=2) | Global(), "global", 1500, (2, 2), (32, 32), DTYPES[1]
    ),
    "some see all": lambda: problem(
        Window.around(40) | Global(), "global", 2600, (2, 1), (16, 16), torch.float32
    ),
    "scores": lambda: problem(Window.last(64), "packed", 1200, (2, 1), (16, 16), DTYPES[1], "table", 0.2),
    "decode": lambda: Problem.random(Full(), Tokens.range(2, 2998), Tokens.range(3000), heads=(4, 1)),
}


@at_levels(2)
@pytest.mark.parametrize("name", BIG)
def test_bits_do_not_depend_on_threads_or_on_the_run(use: Use, level: str, name: str) -> None:
    use(level)
    case = BIG[name]()
    once = outcome(case)
    equal(outcome(case), once)
    for threads in (2, 3):
        equal(outcome(case, threads), once)


@at_levels(3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_result_of_a_row_does_not_depend_on_rows_beside_it(
    use: Use, level: str, dtype: torch.dtype
) -> None:
    """One query against so many keys that they are read in parts, and two queries against few."""
    use(level)
    lengths, longest = [4700, 130, 2049], 4700
    key_tokens = Tokens.from_lengths(lengths, longest, "right")
    for q in (Tokens(key_tokens.index.new_tensor(lengths).unsqueeze(1) - 1), Tokens.range(2, longest)):
        case = Problem.random(Full(), q, key_tokens, dtype, 3, (4, 2), (32, 32))
        together = case.run()
        for b in range(3):
            row = torch.tensor([b])
            tokens = q.select_rows(row) if q.rows > 1 else q
            alone = replace(
                case,
                q=case.q[row],
                k=case.k[row],
                v=case.v[row],
                q_tokens=tokens,
                k_tokens=key_tokens.select_rows(row),
            )
            part = alone.run()
            assert torch.equal(together.out[b], part.out[0])
            assert torch.equal(together.lse[b], part.lse[0])


@at_levels(4)
def test_nothing_to_compute_is_computed(use: Use, level: str) -> None:
    use(level)
    for queries, keys, rows in ((0, 5, 2), (5, 0, 2), (0, 0, 2), (3, 3, 0)):
        case = Problem.random(Causal(), Tokens.range(queries), Tokens.range(keys), rows=rows)
        out, lse, dq, dk, dv = outcome(case)
        assert (out == 0).all()
        assert (lse == -float("inf")).all() or rows == 0
        assert all((t == 0).all() for t in (dq, dk, dv))
