"""Native steps of sequences that share prefixes: common pages are read once, logits are those of each alone."""

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
    """Returns logits for sequences that share the first `lengths` tokens of one sequence (0: an unrelated one)."""
    rng, results = Random(1), []
    prefix = [rng.randrange(330) for _ in range(max(lengths))]
    suffixes = [[rng.randrange(330) for _ in range(rng.randint(1, 90))] for _ in lengths]
    sequences: list[list] = []
    for reader in readers:
        tables = [reader.open([])]
        reader.read([(tables[0], prefix)], [[]])
        reader.end()
        sequences.append([])
        for common, ids in zip(lengths, suffixes, strict=True):
            table = reader.cache.pool.fork(tables[0]) if common else reader.open([])
            if common:
                reader.trim(table, len(table) - common)
            reader.read([(table, ids)], [[]])
            reader.end()
            sequences[-1].append(table)
    for _ in range(3):
        ids = [[rng.randrange(330) for _ in range(new)] for _ in lengths]
        logits = []
        for reader, tables in zip(readers, sequences, strict=True):
            chunks = list(zip(tables, ids, strict=True))
            logits.append(reader.read(chunks, [range(new)] * len(ids)))
            reader.end()
        results.append(logits)
    return [torch.cat(of_reader) for of_reader in zip(*results, strict=True)]


def check(pattern: Pattern, dtype: torch.dtype, lengths: list[int], new: int = 1) -> PagedPast:
    decoder = small(pattern, context=8192).to(dtype)
    exact = small(pattern, context=8192)
    exact.load_state_dict(decoder.state_dict())
    readers = [
        Reader(decoder, slack=2**20),
        Reader(decoder, slack=2**20, exact=True),
        Reader(exact.double(), slack=2**20),
    ]
    native, reference, expected = logits_of(readers, lengths, new)
    assert_within_reference(native, expected, reference)
    assert readers[0].native is not None
    (past, *_) = readers[0].native._pasts.values()
    assert isinstance(past, PagedPast)
    return past


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("new", [1, 3])
def test_they_are_those_of_each_alone(dtype: torch.dtype, new: int) -> None:
    lengths = [700] * 5 + [0] + [330] * 2 + [640, 64, 0]
    past = check(Causal(), dtype, lengths, new)
    expected = [0, 640, 640, 640, 640, 0, 0, 320, 320, 64, 0]
    assert (past._alike[: len(lengths) * new : new] // PAGE * PAGE).tolist() == expected


def test_more_rows_than_a_tile_takes_and_more_keys_than_a_part() -> None:
    check(Causal(), torch.bfloat16, [2300] * 60)


def test_windows_that_begin_later_share_nothing() -> None:
    check(Window.last(70), torch.float32, [700] * 4)


@at_levels(0)
def test_at_every_level(use: Use, level: str) -> None:  # noqa: F811
    use(level)
    check(Causal(), torch.float32, [500] * 3, 3)


def test_rows_that_come_and_go_forget_whom_they_stood_behind() -> None:
    decoder = small(Causal(), context=8192)
    reader, alone = Reader(decoder), Reader(decoder, exact=True)
    rng = Random(2)
    ids = [[rng.randrange(330) for _ in range(300)] for _ in range(3)]
    a, unrelated = reader.open([]), reader.open([])
    reader.read([(a, ids[0]), (unrelated, ids[1])], [[], []])
    reader.end()
    b = reader.cache.pool.fork(a)
    for step in ([a, b], [unrelated], [unrelated, b]):
        logits = reader.read([(table, [5]) for table in step], [[0]] * len(step))
        reader.end()
    table = alone.open([])
    expected = alone.read([(table, [*ids[0], 5, 5])], [[301]])
    torch.testing.assert_close(logits[1:], expected, rtol=1e-4, atol=1e-4)
