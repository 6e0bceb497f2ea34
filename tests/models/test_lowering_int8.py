"""Native steps with int8 keys and values: the codes are those of `quantize`, the logits those of the modules."""

from random import Random

import pytest
import torch

from headway.cache import PagedLayer
from headway.generate import Reader
from headway.models import Decoder
from headway.patterns import Causal, Sink, Window
from headway.quantization import quantize
from tests.generate.conftest import small
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.tolerance import assert_within_reference

PATTERNS = (Window.last(70) | (Causal() & Sink(2)), Causal())


def model(dtype: torch.dtype) -> Decoder:
    return small(PATTERNS, context=512).to(dtype)


def read_together(readers: list[Reader]) -> list[torch.Tensor]:
    """Returns the logits of each reader for sequences that are read in pieces, one of which forks."""
    rng, results = Random(0), []
    sequences = [[reader.open([]) for _ in range(3)] for reader in readers]
    for step in range(10):
        if step == 6:
            for reader, tables in zip(readers, sequences, strict=True):
                tables.append(reader.cache.pool.fork(tables[0]))
        ids = [[rng.randrange(330) for _ in range(rng.choice([1, 1, 15]))] for _ in sequences[0]]
        logits = []
        for reader, tables in zip(readers, sequences, strict=True):
            logits.append(
                reader.read(list(zip(tables, ids, strict=True)), [range(len(new_ids)) for new_ids in ids])
            )
            reader.end()
        results.append(logits)
    return [torch.cat(of_reader) for of_reader in zip(*results, strict=True)]


@at_levels(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_those_of_the_modules(use: Use, level: str, dtype: torch.dtype) -> None:  # noqa: F811
    use(level)
    decoder = model(dtype)
    readers = [Reader(net, kv_dtype=torch.int8) for net in (decoder, decoder, model(torch.float64))]
    assert [reader.steps.what for reader in readers] == ["native", "native", "modules"]
    readers[1].native = None
    native, modules, exact = read_together(readers)
    assert_within_reference(native, exact, modules)


@at_levels(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_are_those_of_quantize(use: Use, level: str, dtype: torch.dtype) -> None:  # noqa: F811
    """Codes and scales are equal to the bit, also for a token of NaN and for a head of zeros."""
    use(level)
    decoder = model(dtype)
    with torch.no_grad():
        decoder.model.embed_tokens.weight[7] = torch.nan  # type: ignore[union-attr]
        decoder.model.layers[0].self_attn.k_proj.weight[:8] = 0  # type: ignore[union-attr, index]
    readers = [Reader(decoder, kv_dtype=kv_dtype) for kv_dtype in (None, torch.int8)]
    for reader in readers:
        reader.read([(reader.open([]), [5, 7, *range(40)])], [[0]])
    plain, coded = (reader.cache.layers[0] for reader in readers)
    assert isinstance(plain, PagedLayer)
    assert isinstance(coded, PagedLayer)
    for values, codes, scale in zip(plain.tensors, coded.tensors[:2], coded.tensors[2:], strict=True):
        expected, expected_scale = quantize(values[:, :, :42])
        assert torch.equal(codes[:, :, :42], expected)
        torch.testing.assert_close(scale[:, :, :42], expected_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("moved", [1, 2, 3], ids=["values", "scales of keys", "scales of values"])
def test_what_alone_has_moved_is_written_where_it_is(moved: int) -> None:
    """Pages that are allocated again may have their old addresses, except for one of their tensors."""
    readers = [Reader(model(torch.float32), kv_dtype=torch.int8) for _ in range(2)]
    tables = [reader.open([]) for reader in readers]
    old_tensors = []  # kept, so that their memory is not reused
    for moves in (False, True):
        for layer in readers[0].cache.layers if moves else ():
            assert isinstance(layer, PagedLayer)
            old_tensors.append(layer.tensors)
            layer.tensors = *layer.tensors[:moved], layer.tensors[moved].clone(), *layer.tensors[moved + 1 :]
        for reader, table in zip(readers, tables, strict=True):
            reader.read([(table, [5, 6, 7])], [[2]])
            reader.end()
    for layer, expected_layer in zip(*(reader.cache.layers for reader in readers), strict=True):
        assert isinstance(layer, PagedLayer)
        assert isinstance(expected_layer, PagedLayer)
        for actual, expected in zip(layer.tensors, expected_layer.tensors, strict=True):
            assert torch.equal(actual[:, :, :6], expected[:, :, :6])
