"""A step as one native call is the model's own step: same logits, same cache."""

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
    made = build(spec, seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return made


def read(made: Decoder, rows: int, tokens: int = 5, slack: int = 0) -> BatchCache:
    """A cache of random tokens, another number of them in each row."""
    ids = torch.randint(53, (rows, tokens), generator=torch.Generator().manual_seed(rows))
    cache = made.make_cache(rows, slack=slack)
    lengths = [max(1, tokens - i) for i in range(rows)]
    with torch.inference_mode():
        made(ids, tokens=cache.next_tokens(tokens, lengths), cache=cache)
    return cache


def native(
    step: DecodeStep, cache: BatchCache, ids: torch.Tensor, lengths: list[int] | None = None
) -> torch.Tensor:
    """The next tokens of rows by native steps: logits [B, T, V], 0 in empty slots."""
    with cache.step(cache.next_tokens(ids.shape[1], lengths)) as packed:
        logits = step.read(packed.take(ids), packed.tokens, range(len(packed.at))).clone()
    return packed.put(logits.unsqueeze(0), *ids.shape)


def exact_form(made: Decoder) -> Decoder:
    """The same numbers in float64, plain."""
    exact = deepcopy(made)
    for layer in linears(exact).values():
        if layer.weight is None and layer.embedding is None:
            layer.keep(WEIGHTS["plain"].pack(layer.matrix))
    return exact.double()


def steps(made: Decoder, rows: int, count: int = 14) -> None:
    """Steps of both kinds side by side, from one cache."""
    assert_within_reference(*map(torch.cat, zip(*stepped(made, rows, count), strict=True)))


def stepped(made: Decoder, rows: int, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Logits of each step: native, of the modules in float64, and of the modules."""
    exact_model = exact_form(made)
    ours, plain, exact = read(made, rows), read(made, rows), read(exact_model, rows)
    step, results = DecodeStep(made, ours.pages), []
    generator = torch.Generator().manual_seed(2)
    with torch.inference_mode():
        for _ in range(count):
            ids = torch.randint(53, (rows, 1), generator=generator)
            low, right = (m(ids, cache=past) for m, past in ((made, plain), (exact_model, exact)))
            results.append((native(step, ours, ids), right, low))
    assert ours.lengths == plain.lengths
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_tokens_of_each_row_and_some_taken_back(dtype: torch.dtype) -> None:
    """As drafts are read: rows of 0 to 4 tokens, of which up to 3 are trimmed."""
    made = model("llama", WINDOWS).to(dtype)
    exact_model = exact_form(made)
    ours, plain = (read(made, 3, slack=3) for _ in range(2))
    exact, step = read(exact_model, 3, slack=3), DecodeStep(made, ours.pages)
    draw = Random(0)
    with torch.inference_mode():
        for _ in range(12):
            lengths = [draw.randint(0, 4), 4, draw.randint(1, 4)]
            ids = torch.tensor([[draw.randrange(53) for _ in range(4)] for _ in lengths])
            low, right = (
                m(ids, tokens=past.next_tokens(4, lengths), cache=past)
                for m, past in ((made, plain), (exact_model, exact))
            )
            logits = native(step, ours, ids, lengths)
            for b, n in enumerate(lengths):
                if n:
                    assert_within_reference(logits[b, :n], right[b, :n], low[b, :n])
            back = [draw.randint(0, max(0, n - 1)) for n in lengths]
            for cache in (ours, plain, exact):
                cache.trim(back)
    assert ours.lengths == plain.lengths


@at_levels(0)
@pytest.mark.parametrize("family", ["qwen3", "gpt2"])
def test_what_lies_between_products_is_rounded_as_in_the_model(use: Use, level: str, family: str) -> None:  # noqa: F811
    """Norms, activations, gates, rotations, sums: what is stored of them is the model's, and prefers no side."""
    use(level)
    made = model(family, width=128, heads=8, head_dim=16).bfloat16()
    ours, plain = read(made, 9, 1), read(made, 9, 1)
    step = DecodeStep(made, ours.pages)
    with torch.inference_mode():
        for _ in range(6):
            ids = torch.randint(53, (9, 1))
            assert_unbiased(native(step, ours, ids), made(ids, cache=plain).double(), family)
        for at, (got, right) in enumerate(stored(ours, plain)):
            assert_unbiased(got, right.double(), family)
            if at < 2:  # keys and values of the first layer, before attention
                assert_rounded_once(got, right.double(), family, ulps=2)


def stored(*caches: BatchCache) -> list[tuple[torch.Tensor, ...]]:
    """Keys and values of caches, layer by layer."""
    kept = []
    for cache in caches:
        tensors = []
        for layer in cache.pages.layers:
            assert isinstance(layer, PagedLayer)
            keys = stored_keys(layer.tensors, places(cache.tables, layer.of, cache.device)).gathered()
            tensors += [t[0][:, keys.tokens.valid[0]] for t in (keys.k, keys.v)]
        kept.append(tensors)
    return list(zip(*kept, strict=True))


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
    """However they come, share beginnings, fork and go, and are read in pieces: the logits of one forward pass."""
    made, draw = (
        model("llama", patterns, kv_heads=2).double() if not native else model("llama", patterns),
        Random(0),
    )
    reader, texts = Reader(made, budget=2**30), []
    assert (reader.native is not None) == native
    for _ in range(rounds):
        if len(texts) < 3 or draw.random() < 0.2:
            ids = [draw.randrange(53) for _ in range(draw.randint(1, 150))]
            ids = (
                draw.choice(texts)[1][: draw.randint(0, 200)] + ids if texts and draw.random() < 0.6 else ids
            )
            texts.append((reader.cache.open(ids), ids))
        if draw.random() < 0.2:
            table, ids = draw.choice(texts)
            texts.append((reader.cache.pool.fork(table), list(ids)))
        chunks = []
        for table, ids in draw.sample(texts, draw.randint(1, min(4, len(texts)))):
            if len(table) == len(ids):
                ids += [draw.randrange(53) for _ in range(draw.randint(1, 3))]
            chunks.append((table, ids[len(table) : len(table) + draw.randint(1, 60)]))
        logits = reader.read(chunks, [range(len(new)) for _, new in chunks]).split(
            [len(new) for _, new in chunks]
        )
        reader.end()
        for (table, new), of_text in zip(chunks, logits, strict=True):
            with torch.inference_mode():
                whole = made(torch.tensor([table.ids]), logits_for=slice(-len(new), None))[0]
            torch.testing.assert_close(of_text, whole, rtol=1e-4, atol=1e-4)
        if len(texts) > 5:
            reader.cache.pool.close(texts.pop(draw.randrange(len(texts)))[0])
    for table, _ in texts:
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
    """Of plain bf16, from the rows on at which a layer's products are worth its modules, here `worth`; never where
    steps are to be exact. A reader says it."""
    monkeypatch.setattr(decode_step, "cpu_flags", lambda: flags)
    made = model(width=48, hidden=44, heads=4, head_dim=12, kv_heads=4).to(dtype)
    for layer in linears(made.requires_grad_(False)).values():
        layer.keep(WEIGHTS[weights].pack(layer.matrix))
    per_layer = sum(layer.matrix.numel() for layer in linears(made).values()) // 2
    monkeypatch.setattr(decode_step, "MODULES_COST", worth * per_layer)
    step, choice = choose_step(made, read(made, 1).pages)
    assert step is not None
    assert step.most_rows == most
    assert (f"up to {most} tokens" in choice.why) == (most < 64)
    calls: list[int] = []
    whole = DecodeStep.read

    def recorded(self: DecodeStep, ids: Tensor, *given: Any) -> Tensor:
        calls.append(ids.shape[1])
        return whole(self, ids, *given)

    monkeypatch.setattr(DecodeStep, "read", recorded)
    for exact in (False, True):
        reader = Reader(made, exact=exact)
        for count in (most, most + 1):
            tables = [reader.cache.open() for _ in range(count)]
            reader.read([(table, [7]) for table in tables], [[0]] * count)
            reader.end()
        assert calls == ([most, most + 1] if exact else [most])
        calls.clear()
