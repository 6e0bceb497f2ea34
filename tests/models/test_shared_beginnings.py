"""Native steps of texts that begin alike: their common pages are read once, and the logits are those of each alone."""

from random import Random

import pytest
import torch

from headway.cache import PAGE
from headway.generate import Reader
from headway.models.paged_past import PagedPast
from headway.patterns import Causal, Pattern, Window
from tests.generate.conftest import small
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.tolerance import assert_within_reference


def logits_of(readers: list[Reader], lengths: list[int], new: int = 1) -> list[torch.Tensor]:
    """Steps of texts that have so many tokens in common with the first one, and of strangers between them."""
    draw, results = Random(1), []
    first = [draw.randrange(330) for _ in range(max(lengths))]
    own = [[draw.randrange(330) for _ in range(draw.randint(1, 90))] for _ in lengths]
    texts: list[list] = []
    for reader in readers:
        tables = [reader.open([])]
        reader.read([(tables[0], first)], [[]])
        reader.end()
        texts.append([])
        for common, ids in zip(lengths, own, strict=True):
            table = reader.cache.pool.fork(tables[0]) if common else reader.open([])
            if common:
                reader.trim(table, len(table) - common)
            reader.read([(table, ids)], [[]])
            reader.end()
            texts[-1].append(table)
    for _ in range(3):
        ids = [[draw.randrange(330) for _ in range(new)] for _ in lengths]
        made = []
        for reader, tables in zip(readers, texts, strict=True):
            chunks = list(zip(tables, ids, strict=True))
            made.append(reader.read(chunks, [range(new)] * len(ids)))
            reader.end()
        results.append(made)
    return [torch.cat(of_reader) for of_reader in zip(*results, strict=True)]


def check(pattern: Pattern, dtype: torch.dtype, lengths: list[int], new: int = 1) -> PagedPast:
    made = small(pattern, context=8192).to(dtype)
    exact = small(pattern, context=8192)
    exact.load_state_dict(made.state_dict())
    readers = [
        Reader(made, slack=2**20),
        Reader(made, slack=2**20, exact=True),
        Reader(exact.double(), slack=2**20),
    ]
    ours, apart, wide = logits_of(readers, lengths, new)
    assert_within_reference(ours, wide, apart)
    assert readers[0].native is not None
    (past, *_) = readers[0].native._pasts.values()
    assert isinstance(past, PagedPast)
    return past


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 3])
def test_they_are_those_of_each_alone(dtype: torch.dtype, new: int) -> None:
    lengths = [700] * 5 + [0] + [330] * 2 + [640, 64, 0]
    past = check(Causal(), dtype, lengths, new)
    alike = [0, 640, 640, 640, 640, 0, 0, 320, 320, 64, 0]
    assert (past._alike[: len(lengths) * new : new] // PAGE * PAGE).tolist() == alike


def test_more_rows_than_a_tile_takes_and_more_keys_than_a_part() -> None:
    check(Causal(), torch.bfloat16, [2300] * 60)


def test_windows_that_begin_later_share_nothing() -> None:
    check(Window.last(70), torch.float32, [700] * 4)


@at_levels(0)
def test_at_every_level(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    check(Causal(), torch.float32, [500] * 3, 3)


def test_rows_that_come_and_go_forget_whom_they_stood_behind() -> None:
    made = small(Causal(), context=8192)
    reader, alone = Reader(made), Reader(made, exact=True)
    draw = Random(2)
    ids = [[draw.randrange(330) for _ in range(300)] for _ in range(3)]
    a, other = reader.open([]), reader.open([])
    reader.read([(a, ids[0]), (other, ids[1])], [[], []])
    reader.end()
    b = reader.cache.pool.fork(a)
    for step in ([a, b], [other], [other, b]):
        logits = reader.read([(table, [5]) for table in step], [[0]] * len(step))
        reader.end()
    table = alone.open([])
    wanted = alone.read([(table, [*ids[0], 5, 5])], [[301]])
    torch.testing.assert_close(logits[1:], wanted, rtol=1e-4, atol=1e-4)
