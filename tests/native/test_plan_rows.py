"""Plans of rows of one query by the kernels have the blocks that follow from each pair of tokens."""

from array import array

import pytest
import torch

from headway.attention.backends.native.plan_arrays import program
from headway.errors import BackendError
from headway.native.plan_rows import plan_rows
from headway.patterns import Causal, Chunk, Pattern, Sink, Window, visible
from headway.tokens import Tokens
from tests.native.conftest import Use, at_levels, use  # noqa: F401

PATTERNS = [
    Causal(),
    Window.last(5),
    Window.last(64),
    Window.last(200) | (Causal() & Sink(3)),
    Window(300, 0, 7),
    (Causal() & Sink(70)) | Window.last(1),
    Chunk(200) & Causal(),
    Chunk(64) & Causal() | (Causal() & Sink(3)),
]


@at_levels(0)
def test_runs_are_those_that_each_pair_of_tokens_says(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    for pattern in PATTERNS:
        index = [0, 1, 63, 64, 65, 127, 200, 511, 512, 700]
        assert planned(pattern, index) == [by_pairs(pattern, i) for i in index], pattern


def planned(pattern: Pattern, index: list[int], room: int = 100) -> list[list[tuple[int, int, bool]]]:
    code, queries = array("i", program(pattern)), array("i", index)
    first, begin, end, full = array("i", [0] * (len(index) + 1)), *(array(kind, [0] * room) for kind in "iiB")
    code_address, query_address, *run_addresses = (
        a.buffer_info()[0] for a in (code, queries, first, begin, end, full)
    )
    count = plan_rows(
        code_address,
        len(code) // 4,
        query_address,
        len(index),
        (run_addresses[0], run_addresses[1], run_addresses[2], run_addresses[3]),
        room,
    )
    assert count == first[-1]
    return [
        [(begin[r], end[r], bool(full[r])) for r in range(first[i], first[i + 1])] for i in range(len(index))
    ]


def by_pairs(pattern: Pattern, query: int) -> list[tuple[int, int, bool]]:
    """Returns the runs by the mask of all keys up to the end of the query's block."""
    count = (query // 64 + 1) * 64
    blocks = visible(pattern, Tokens(torch.tensor([[query]])), Tokens.range(count)).view(-1, 64)
    runs: list[tuple[int, int, bool]] = []
    for block, mask in enumerate(blocks):
        if mask.any():
            is_full, begin = bool(mask.all()), 64 * block
            if runs and runs[-1][1:] == (begin, is_full):
                runs[-1] = runs[-1][0], begin + 64, is_full
            else:
                runs.append((begin, begin + 64, is_full))
    return runs


def test_a_plan_that_has_no_room_is_refused() -> None:
    pattern = Window.last(5) | (Causal() & Sink(3))
    assert [len(runs) for runs in planned(pattern, [700, 10], room=3)] == [2, 1]
    with pytest.raises(BackendError, match="a plan of 2 rows has more than 2 runs of blocks"):
        planned(pattern, [700, 10], room=2)
