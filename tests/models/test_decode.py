"""Decoding in steps equals the full forward pass, a row of a batch the row alone, a packed row its documents."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.cache import PAGE
from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, GlobalKeys, Pattern, Sink, Window
from headway.positions import DynamicNTK, LongRope, PositionScheme, Rotary
from headway.tokens import Tokens
from tests.checkpoints.hf import off
from tests.pairwise import chequered

CLOSE = 2e-5
"""fp32 relative to the largest logit: the two orders of summation differ by a few roundings per layer."""

VOCAB, WINDOW, LENGTH = 61, 6, 26

ALTERNATING: tuple[Pattern, ...] = (Window.last(WINDOW), Causal())
PATTERNS: dict[str, tuple[Pattern, ...]] = {
    "causal": (Causal(),),
    "alternating": ALTERNATING,
    "windows": (Window.last(WINDOW),),
    "dilated": (Window.last(4, step=2), Window.last(3, step=3)),
    "sinks": (Window.last(WINDOW) | (Causal() & Sink(2)), Causal()),
}
ROTARY = Rotary(1000.0, pairing="halves")


def model_of(patterns: tuple[Pattern, ...], positions: PositionScheme = ROTARY) -> Decoder:
    spec = ModelSpec.of(
        "qwen3",
        vocab=VOCAB,
        width=32,
        layers=4,
        heads=4,
        kv_heads=2,
        head_dim=12,
        hidden=48,
        patterns=patterns,
        positions=positions,
        trained_context=64,
        init_std=0.3,
    )
    return build(spec, seed=0).eval()


def ids_of(rows: int, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(rows))


@torch.no_grad()
def in_chunks(model: Decoder, ids: Tensor, cuts: list[int]) -> Tensor:
    cache = model.make_cache(ids.shape[0])
    edges = [0, *sorted(cuts), ids.shape[1]]
    return torch.cat([model(ids[:, a:b], cache=cache) for a, b in pairwise(edges)], 1)


PREFILLS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW)


@chequered("name,prefill", list(PATTERNS), PREFILLS)
def test_prefill_and_one_token_decode_equal_the_full_forward(name: str, prefill: int) -> None:
    model, ids = model_of(PATTERNS[name]), ids_of(2)
    with torch.no_grad():
        full = model(ids)
    assert off(in_chunks(model, ids, list(range(prefill, LENGTH))), full) < CLOSE


@given(cuts=st.lists(st.integers(0, LENGTH), max_size=6))
def test_any_split_equals_the_full_forward(cuts: list[int]) -> None:
    model = model_of(ALTERNATING)
    ids = ids_of(1)
    with torch.no_grad():
        assert off(in_chunks(model, ids, cuts), model(ids)) < CLOSE


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["alternating", "sinks"])
@torch.no_grad()
def test_a_row_of_a_ragged_batch_equals_the_row_alone(name: str, side: str) -> None:
    model = model_of(PATTERNS[name])
    lengths, total = [1, WINDOW, 19, 13], 19
    tokens = Tokens.from_lengths(lengths, total, side)
    ids = ids_of(4, total)
    ids[~tokens.valid] = -100  # the ids of empty slots do not matter
    batch = model(ids, tokens=tokens)
    assert bool(batch.isfinite().all())
    cache = model.make_cache(4)
    cached = model(ids, tokens=tokens, cache=cache)
    following = ids_of(4, 9)
    continued = torch.cat([model(following[:, i : i + 1], cache=cache) for i in range(9)], 1)
    for b, n in enumerate(lengths):
        row_ids = ids[b][tokens.valid[b]]
        alone = model(torch.cat([row_ids, following[b]])[None])[0]
        for logits in (batch, cached):
            assert off(logits[b][tokens.valid[b]], alone[:n]) < CLOSE
        assert off(continued[b], alone[n:]) < CLOSE


@torch.no_grad()
def test_a_packed_row_equals_its_documents_alone() -> None:
    model = model_of(PATTERNS["sinks"])
    lengths = [[7, 1, 12], [15, 3]]
    tokens = Tokens.packed(lengths, total=22)
    ids = ids_of(2, 22)
    packed = model(ids, tokens=tokens)
    for b, row in enumerate(lengths):
        start = 0
        for n in row:
            alone = model(ids[b : b + 1, start : start + n])[0]
            assert off(packed[b, start : start + n], alone) < CLOSE
            start += n


@torch.no_grad()
def test_global_tokens_are_seen_past_the_window_and_decode_alike() -> None:
    model = model_of((Window.last(WINDOW) | (Causal() & GlobalKeys()),))
    ids = ids_of(2)
    tokens = Tokens.range(LENGTH).with_global([[3], [0, 9]])
    full = model(ids, tokens=tokens)
    cache = model.make_cache(2)
    parts = [model(ids[:, a:b], tokens=tokens.slice(a, b), cache=cache) for a, b in ((0, 10), (10, 11))]
    parts += [model(ids[:, t : t + 1], tokens=tokens.slice(t, t + 1), cache=cache) for t in range(11, LENGTH)]
    assert off(torch.cat(parts, 1), full) < CLOSE
    assert off(full, model(ids)) > 1e-3


TRAINED = 12
DYNAMIC = Rotary(1000.0, pairing="halves", scaling=DynamicNTK(2.0, TRAINED))
FACTORS = (tuple(1.0 + i / 10 for i in range(6)), tuple(2.0 + i for i in range(6)))
LONG = Rotary(1000.0, pairing="halves", scaling=LongRope(*FACTORS, TRAINED, factor=2.0))


@torch.no_grad()
def test_frequencies_that_move_decode_alike_on_either_side_of_the_trained_context() -> None:
    ids = ids_of(2)
    for positions in (DYNAMIC, LONG):
        model = model_of(ALTERNATING, positions)
        within = ids[:, :TRAINED]
        assert off(in_chunks(model, within, list(range(3, TRAINED))), model(within)) < CLOSE
    model = model_of(ALTERNATING, LONG)
    beyond = in_chunks(model, ids, list(range(TRAINED + 1, LENGTH)))
    assert off(beyond, model(ids)) < CLOSE


@torch.no_grad()
def test_across_the_trained_context_deep_states_keep_their_old_angles() -> None:
    """A known limit: one layer decodes alike across it (tests/nn), but deeper layers get states that were computed
    when the row was shorter, and only a new forward pass could change those."""
    ids = ids_of(1)
    for positions in (DYNAMIC, LONG):
        model = model_of((Causal(),), positions)
        stepped = in_chunks(model, ids, list(range(1, LENGTH)))
        assert off(stepped[:, :TRAINED], model(ids[:, :TRAINED])) < CLOSE
        assert off(stepped, model(ids)) > 100 * CLOSE


def test_a_row_without_tokens_is_harmless() -> None:
    model = model_of(ALTERNATING)
    tokens = Tokens.from_lengths([5, 0])
    ids = ids_of(2, 5)
    logits = model(ids, tokens=tokens)
    assert off(logits[:1], model(ids[:1])) < CLOSE
    logits.pow(2).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert bool(parameter.grad.isfinite().all()), name


@torch.no_grad()
def test_windows_hold_no_more_pages_than_they_see() -> None:
    model = build(replace(model_of(ALTERNATING).spec, layers=2, patterns=ALTERNATING), seed=0).eval()
    cache, window_sizes = model.make_cache(2), set()
    for _ in range(40):
        model(ids_of(2, 7), cache=cache)
        window, full = cache.slots
        assert full == PAGE * -(-cache.lengths[0] // PAGE)
        window_sizes.add(window)
    assert window_sizes == {PAGE, 2 * PAGE}, "a window of 6 that ends within a page sees it alone"


def test_logits_for_selects_slots() -> None:
    model = model_of(ALTERNATING)
    ids = ids_of(2)
    full = model(ids)
    per_row = torch.tensor([[3, 0], [-1, 5]])
    mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    mask[0, 4], mask[1, 2], mask[1, 9] = True, True, True
    assert off(model(ids, logits_for=slice(-1, None)), full[:, -1:]) < CLOSE
    assert off(model(ids, logits_for=torch.tensor([7, -2])), full[:, [7, -2]]) < CLOSE
    assert (
        off(
            model(ids, logits_for=per_row),
            full.gather(1, (per_row % LENGTH)[..., None].expand(-1, -1, VOCAB)),
        )
        < CLOSE
    )
    assert off(model(ids, logits_for=mask), full[mask]) < CLOSE


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (torch.tensor([LENGTH]), rf"logits_for: slots must lie in -{LENGTH}..{LENGTH - 1}, got \[{LENGTH}\]"),
        (
            torch.zeros(3, LENGTH, dtype=torch.bool),
            rf"mask must be \[2, {LENGTH}\] like the ids, got \[3, {LENGTH}\]",
        ),
        (torch.tensor([0.5]), r"logits_for must be slot numbers .* got torch.float32 \[1\]"),
        (torch.zeros(3, 2, dtype=torch.int64), r"logits_for must be slot numbers \[N\] or \[2, N\]"),
    ],
)
def test_wrong_logits_for_is_refused(which: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_of(ALTERNATING)(ids_of(2), logits_for=which)


@pytest.mark.parametrize("bad", [-1, VOCAB, 10 * VOCAB])
def test_an_id_that_is_not_in_the_vocab_is_named(bad: int) -> None:
    ids = ids_of(2)
    ids[1, 4] = bad
    with pytest.raises(
        ValueError,
        match=rf"token id {bad} \(row 1, slot 4\) is not in 0..{VOCAB - 1}: the model's vocab is {VOCAB}",
    ):
        model_of(ALTERNATING)(ids)


def test_wrong_calls_are_refused() -> None:
    model = model_of(ALTERNATING)
    with pytest.raises(
        ValueError, match=r"whole numbers \[batch, tokens\], got torch.int64 \[3\]; add the batch axis"
    ):
        model(torch.tensor([1, 2, 3]))
    with pytest.raises(ValueError, match=r"got torch.float32 \[1, 3\]"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match="tokens describe 1 rows of 4 slots, but ids are 2 rows of 26"):
        model(ids_of(2), tokens=Tokens.range(4))
    with pytest.raises(ValueError, match=r"tokens are on meta, ids on cpu; move them"):
        model(ids_of(2), tokens=Tokens.range(LENGTH, device="meta"))
    with pytest.raises(ValueError, match=r"the cache is for 4 layers and 1 rows, .*make_cache\(2\)"):
        model(ids_of(2), cache=model.make_cache(1))
    limited = build(ModelSpec.of_depth(1, VOCAB, context=8, max_context=10), seed=0)
    with pytest.raises(ValueError, match=r"a row of 11 tokens is longer than this model can take \(10\)"):
        limited(ids_of(1, 11))
    cache = limited.make_cache(1)
    with torch.no_grad():
        limited(ids_of(1, 6), cache=cache)
        with pytest.raises(ValueError, match="a row of 12 tokens"):
            limited(ids_of(1, 6), cache=cache)


@torch.no_grad()
def test_an_empty_chunk_changes_nothing() -> None:
    model = model_of(ALTERNATING)
    ids = ids_of(1)
    cache = model.make_cache(1)
    model(ids[:, :4], cache=cache)
    assert model(ids[:, :0], cache=cache).shape == (1, 0, VOCAB)
    assert off(model(ids[:, 4:], cache=cache), model(ids)[:, 4:]) < CLOSE
