"""A decode step as one native call gives the logits and the cache of the model's own step."""

from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.cache import BatchCache, PagedLayer
from headway.cache.paged_step import places, stored_keys
from headway.generate import Reader
from headway.models import Decoder, ModelSpec, build, decode_step
from headway.models.decode_step import DecodeStep, choose_step
from headway.nn import linears
from headway.nn.weights import WEIGHTS
from headway.patterns import Causal, Pattern, Sink, Window
from headway.positions import Rotary
from tests.cache.page_counts import page_counts
from tests.native.conftest import Use, at_levels, use  # noqa: F401
from tests.pairwise import chequered
from tests.tolerance import assert_rounded_once, assert_unbiased, assert_within_reference

CAUSAL = Causal()
WINDOWS = (Window.last(6) | (Causal() & Sink(2)), Causal(), Window.last(6))


def model(family: str = "llama", patterns: Pattern | tuple[Pattern, ...] = CAUSAL, **fields: Any) -> Decoder:
    layers = len(patterns) if isinstance(patterns, tuple) else 2
    sizes = {"width": 48, "heads": 4, "head_dim": 12, "layers": layers}
    spec = ModelSpec.of_depth(2, 53, family=family, patterns=patterns, **{**sizes, **fields})
    decoder = build(spec, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return decoder


def read(decoder: Decoder, rows: int, tokens: int = 5, slack: int = 0) -> BatchCache:
    """Returns a cache of random tokens, a different number of them in each row."""
    ids = torch.randint(53, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    cache = decoder.make_cache(rows, slack=slack)
    lengths = [max(1, tokens - i) for i in range(rows)]
    with torch.inference_mode():
        decoder(ids, tokens=cache.next_tokens(tokens, lengths), cache=cache)
    return cache


def native(
    step: DecodeStep, cache: BatchCache, ids: torch.Tensor, lengths: list[int] | None = None
) -> torch.Tensor:
    """Returns the logits [B, T, V] of the rows' next tokens by a native step, 0 in empty slots."""
    with cache.step(cache.next_tokens(ids.shape[1], lengths)) as packed:
        logits = step.read(packed.take(ids), packed.tokens, range(len(packed.at))).clone()
    return packed.put(logits.unsqueeze(0), *ids.shape)


def exact_form(decoder: Decoder) -> Decoder:
    """Returns the decoder in float64, with plain weights of the same values."""
    exact = deepcopy(decoder)
    for layer in linears(exact).values():
        if layer.weight is None and layer.embedding is None:
            layer.keep(WEIGHTS["plain"].pack(layer.matrix))
    return exact.double()


def steps(decoder: Decoder, rows: int, count: int = 14) -> None:
    """Checks native steps against steps of the modules, each from a cache of the same tokens."""
    assert_within_reference(*map(torch.cat, zip(*stepped(decoder, rows, count), strict=True)))


def stepped(decoder: Decoder, rows: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Returns the logits of each step: native, of the modules in float64, and of the modules."""
    exact_model = exact_form(decoder)
    native_cache, plain_cache, exact_cache = read(decoder, rows), read(decoder, rows), read(exact_model, rows)
    step, results = DecodeStep(decoder, native_cache.pages), []
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.randint(53, (rows, 1), generator=generator)
            reference, expected = (
                module(ids, cache=cache)
                for module, cache in ((decoder, plain_cache), (exact_model, exact_cache))
            )
            results.append((native(step, native_cache, ids), expected, reference))
    assert native_cache.lengths == plain_cache.lengths
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_tokens_of_each_row_and_some_taken_back(dtype: torch.dtype) -> None:
    """Rows of 0 to 4 tokens, of which up to 3 are trimmed afterwards, as with draft tokens."""
    decoder = model("llama", WINDOWS).to(dtype)
    exact_model = exact_form(decoder)
    native_cache, plain_cache = (read(decoder, 3, slack=3) for _ in range(2))
    exact_cache, step = read(exact_model, 3, slack=3), DecodeStep(decoder, native_cache.pages)
    rng = Random(0)
    with torch.inference_mode():
        for _ in range(12):
            lengths = [rng.randint(0, 4), 4, rng.randint(1, 4)]
            ids = torch.tensor([[rng.randrange(53) for _ in range(4)] for _ in lengths])
            reference, expected = (
                module(ids, tokens=cache.next_tokens(4, lengths), cache=cache)
                for module, cache in ((decoder, plain_cache), (exact_model, exact_cache))
            )
            logits = native(step, native_cache, ids, lengths)
            for b, n in enumerate(lengths):
                if n:
                    assert_within_reference(logits[b, :n], expected[b, :n], reference[b, :n])
            trimmed = [rng.randint(0, max(0, n - 1)) for n in lengths]
            for cache in (native_cache, plain_cache, exact_cache):
                cache.trim(trimmed)
    assert native_cache.lengths == plain_cache.lengths


@at_levels(0)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_what_lies_between_products_is_rounded_as_in_the_model(use: Use, level: str, family: str) -> None:  # noqa: F811
    """Norms, activations, gates, rotations, sums: their stored results are the model's, rounded without bias."""
    use(level)
    decoder = model(family, width=128, heads=8, head_dim=16).bfloat16()
    native_cache, plain_cache = read(decoder, 9, 1), read(decoder, 9, 1)
    step = DecodeStep(decoder, native_cache.pages)
    with torch.inference_mode():
        for _ in range(6):
            ids = torch.randint(53, (9, 1))
            assert_unbiased(native(step, native_cache, ids), decoder(ids, cache=plain_cache).double(), family)
        for index, (actual, expected) in enumerate(stored(native_cache, plain_cache)):
            assert_unbiased(actual, expected.double(), family)
            if index < 2:  # keys and values of the first layer, before attention
                assert_rounded_once(actual, expected.double(), family, ulps=2)


def stored(*caches: BatchCache) -> list[tuple[torch.Tensor, ...]]:
    """Returns the keys and values of all layers, each tensor as a tuple with one entry for each cache."""
    by_cache = []
    for cache in caches:
        tensors = []
        for layer in cache.pages.layers:
            assert isinstance(layer, PagedLayer)
            keys = stored_keys(layer.tensors, places(cache.tables, layer.of, cache.device)).gathered()
            tensors += [t[0][:, keys.tokens.valid[0]] for t in (keys.k, keys.v)]
        by_cache.append(tensors)
    return list(zip(*by_cache, strict=True))


@at_levels(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rotated_where_positions_say_so(use: Use, level: str, dtype: torch.dtype) -> None:  # noqa: F811
    use(level)
    for pairing in ("halves", "adjacent"):
        steps(model(positions=Rotary(pairing=pairing, values=True)).to(dtype), 3, 3)


@at_levels(2)
@chequered("dtype,rows", [torch.float32, torch.bfloat16], [1, 4, 9])
def test_windows_and_rows_that_differ(use: Use, level: str, dtype: torch.dtype, rows: int) -> None:  # noqa: F811
    use(level)
    steps(model("llama", WINDOWS).to(dtype), rows)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("patterns", [CAUSAL, WINDOWS], ids=["causal", "windows"])
@pytest.mark.parametrize("rounds", [24, pytest.param(60, marks=pytest.mark.slow)])
def test_texts_of_a_reader_are_what_each_is_alone(patterns: Pattern, native: bool, rounds: int) -> None:
    """However sequences come, share prefixes, fork, end and are read in pieces: the logits of one forward pass."""
    decoder, rng = (
        model("llama", patterns, kv_heads=2).double() if not native else model("llama", patterns),
        Random(0),
    )
    reader, sequences = Reader(decoder, budget=2**30), []
    assert (reader.native is not None) == native
    for _ in range(rounds):
        if len(sequences) < 3 or rng.random() < 0.2:
            ids = [rng.randrange(53) for _ in range(rng.randint(1, 150))]
            ids = (
                rng.choice(sequences)[1][: rng.randint(0, 200)] + ids
                if sequences and rng.random() < 0.6
                else ids
            )
            sequences.append((reader.cache.open(ids), ids))
        if rng.random() < 0.2:
            table, ids = rng.choice(sequences)
            sequences.append((reader.cache.pool.fork(table), list(ids)))
        chunks = []
        for table, ids in rng.sample(sequences, rng.randint(1, min(4, len(sequences)))):
            if len(table) == len(ids):
                ids += [rng.randrange(53) for _ in range(rng.randint(1, 3))]
            chunks.append((table, ids[len(table) : len(table) + rng.randint(1, 60)]))
        logits = reader.read(chunks, [range(len(new_ids)) for _, new_ids in chunks]).split(
            [len(new_ids) for _, new_ids in chunks]
        )
        reader.end()
        for (table, new_ids), actual in zip(chunks, logits, strict=True):
            with torch.inference_mode():
                expected = decoder(torch.tensor([table.ids]), logits_for=slice(-len(new_ids), None))[0]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        if len(sequences) > 5:
            reader.cache.pool.close(sequences.pop(rng.randrange(len(sequences)))[0])
    for table, _ in sequences:
        reader.cache.pool.close(table)
    assert not any(counts["used"] for counts in page_counts(reader.cache.pool))


TILES = frozenset({"avx512_bf16", "amx_bf16"})


@pytest.mark.parametrize(
    ("flags", "weights", "dtype", "worth", "most"),
    [
        (TILES, "plain", torch.bfloat16, 12, 12),
        (TILES, "plain", torch.bfloat16, 0, 8),
        (TILES, "plain", torch.bfloat16, 100, 64),
        (TILES, "plain", torch.float32, 0, 64),
        (TILES, "int8", torch.bfloat16, 0, 64),
        (frozenset({"avx512_bf16"}), "plain", torch.bfloat16, 0, 64),
    ],
)
def test_many_rows_are_left_to_modules_where_torch_has_tiles(
    flags: frozenset[str],
    weights: str,
    dtype: torch.dtype,
    worth: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Modules take over only for plain bf16 weights, from the number of rows on at which a layer's products outweigh
    the cost of its modules, here `worth`, and never if steps must be exact. The choice's reason names the limit."""
    monkeypatch.setattr(decode_step, "cpu_flags", lambda: flags)
    decoder = model(width=48, hidden=44, heads=4, head_dim=12, kv_heads=4).to(dtype)
    for layer in linears(decoder.requires_grad_(False)).values():
        layer.keep(WEIGHTS[weights].pack(layer.matrix))
    per_layer = sum(layer.matrix.numel() for layer in linears(decoder).values()) // 2
    monkeypatch.setattr(decode_step, "MODULES_COST", worth * per_layer)
    step, choice = choose_step(decoder, read(decoder, 1).pages)
    assert step is not None
    assert step.most_rows == most
    assert (f"up to {most} tokens" in choice.why) == (most < 64)
    calls: list[int] = []
    original = DecodeStep.read

    def recorded(self: DecodeStep, ids: Tensor, *arguments: Any) -> Tensor:
        calls.append(ids.shape[1])
        return original(self, ids, *arguments)

    monkeypatch.setattr(DecodeStep, "read", recorded)
    for exact in (False, True):
        reader = Reader(decoder, exact=exact)
        for count in (most, most + 1):
            tables = [reader.cache.open() for _ in range(count)]
            reader.read([(table, [7]) for table in tables], [[0]] * count)
            reader.end()
        assert calls == ([most, most + 1] if exact else [most])
        calls.clear()
