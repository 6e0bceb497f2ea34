"""The generation loop: a batch equals its rows alone, cached equals uncached, streamed equals collected."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from headway.errors import ConfigError
from headway.generate import Beams, GenerationConfig, Reader, Sampling, generate, stream, uniform
from headway.models import Decoder
from headway.patterns import Pattern, Window
from tests.generate.conftest import MIXED, small
from tests.generate.plain import HOT, MODEL, PROMPTS, TOKENIZER, greedy_by_hand

EOS = [3, *range(40, 110)]


def test_greedy_is_the_argmax_of_full_forward_passes() -> None:
    for generation, prompt in zip(
        generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=12)), PROMPTS, strict=True
    ):
        assert generation.ids == greedy_by_hand(MODEL, prompt, 12)
        assert (generation.finish_reason, generation.prompt_tokens) == ("length", len(prompt))


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_cached_is_uncached(sampling: Sampling) -> None:
    for seed in range(3):
        cached = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=14, sampling=sampling, seed=seed))
        plain = generate(
            MODEL, PROMPTS, GenerationConfig(max_new_tokens=14, sampling=sampling, seed=seed, use_cache=False)
        )
        assert [g.ids for g in cached] == [g.ids for g in plain]


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_a_row_of_a_batch_is_the_row_alone(sampling: Sampling) -> None:
    settings = GenerationConfig(max_new_tokens=14, sampling=sampling, seed=11, eos=[3, 40, 41, 42, 43, 44])
    together = generate(MODEL, PROMPTS, settings)
    # rows end at different steps
    assert len({g.finish_reason for g in together} | {len(g.ids) for g in together}) > 1
    for size in (1, 2, 3):
        assert [g.ids for g in generate(MODEL, PROMPTS, settings, batch_size=size)] == [
            g.ids for g in together
        ]
    for i, prompt in enumerate(PROMPTS):
        assert generate(MODEL, [prompt], settings, requests=[i])[0].ids == together[i].ids


def test_settings_belong_to_a_request() -> None:
    """A batch whose requests have different settings, beam searches among them, equals each request alone."""
    configs = [
        GenerationConfig(max_new_tokens=9, sampling=HOT, seed=3),
        GenerationConfig(max_new_tokens=12, beams=Beams(3, n_best=2), eos=EOS),
        GenerationConfig(max_new_tokens=0),
        GenerationConfig(max_new_tokens=7, no_repeat_ngram=1, eos=EOS, stop=["e"]),
    ]
    together = generate(MODEL, PROMPTS, configs, tokenizer=TOKENIZER)
    for i, (config, generation) in enumerate(zip(configs, together, strict=True)):
        (alone,) = generate(MODEL, [PROMPTS[i]], config, tokenizer=TOKENIZER, requests=[i])
        assert (generation.ids, generation.text, generation.finish_reason) == (
            alone.ids,
            alone.text,
            alone.finish_reason,
        )
        assert [h.ids for h in generation.hypotheses] == [h.ids for h in alone.hypotheses]
    assert len(together[1].hypotheses) == 2
    with pytest.raises(
        ConfigError, match="config: 3 configs for 4 prompts; give one for all, or one for each"
    ):
        generate(MODEL, PROMPTS, configs[:3])
    with pytest.raises(
        ConfigError, match="use_cache, kv_cache_dtype, prefill_chunk and exact must be the same"
    ):
        generate(MODEL, PROMPTS[:2], [GenerationConfig(), GenerationConfig(prefill_chunk=2)])


@pytest.mark.parametrize("sampling", [Sampling(), HOT], ids=["greedy", "sampled"])
def test_constraints_hold_for_what_is_sampled(sampling: Sampling) -> None:
    free = GenerationConfig(max_new_tokens=30, eos=EOS, sampling=sampling, seed=1)
    held = replace(free, min_new_tokens=20, no_repeat_ngram=2)
    assert any(len(text.ids) < 20 for text in generate(MODEL, PROMPTS, free)), "else nothing is shown"
    for prompt, text in zip(PROMPTS, generate(MODEL, PROMPTS, held), strict=True):
        whole = [*prompt, *text.ids]
        new = [pair for i, pair in enumerate(pairwise(whole)) if i + 1 >= len(prompt)]
        assert all(pair not in [*pairwise(whole)][: len(prompt) - 1 + i] for i, pair in enumerate(new))
        assert not set(text.ids[:20]) & set(EOS)
        assert len(text.ids) >= 20
    forced = generate(MODEL, PROMPTS, replace(free, eos=(), forced_first=9, forced_last=4))
    assert all((text.ids[0], text.ids[-1], len(text.ids)) == (9, 4, 30) for text in forced)


def test_the_request_number_and_the_seed_decide_the_noise() -> None:
    def texts(seed: int, requests: list[int]) -> list[list[int]]:
        settings = GenerationConfig(max_new_tokens=10, sampling=HOT, seed=seed)
        return [g.ids for g in generate(MODEL, [PROMPTS[0]] * len(requests), settings, requests=requests)]

    first = texts(0, [0, 1, 2])
    assert len({tuple(x) for x in first}) == 3
    assert texts(0, [2, 1, 0]) == first[::-1]
    assert texts(1, [0, 1, 2]) != first


@pytest.mark.parametrize("chunk", [1, 2, 5, 19, 20, 100])
def test_prefill_in_chunks(chunk: int) -> None:
    whole = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=8))
    parts = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=8, prefill_chunk=chunk))
    assert [g.ids for g in parts] == [g.ids for g in whole]


def test_streamed_is_collected() -> None:
    settings = GenerationConfig(max_new_tokens=20, sampling=HOT, stop=["e"], eos=[40])
    texts, ids = dict.fromkeys(range(4), ""), {i: [] for i in range(4)}  # type: dict[int, str], dict[int, list[int]]
    for delta in stream(MODEL, PROMPTS, settings, tokenizer=TOKENIZER):
        texts[delta.request] += delta.text
        ids[delta.request].append(delta.token)
    for i, whole in enumerate(generate(MODEL, PROMPTS, settings, tokenizer=TOKENIZER)):
        assert (texts[i], ids[i]) == (whole.text, whole.ids)


def test_no_and_one_new_token() -> None:
    none = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=0), tokenizer=TOKENIZER)
    assert [(g.ids, g.text, g.finish_reason, g.seconds_to_first_token) for g in none] == [
        ([], "", "length", None)
    ] * 4
    single = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=1))
    assert [g.ids for g in single] == [greedy_by_hand(MODEL, p, 1) for p in PROMPTS]
    assert single[0].tokens_per_second is None


def test_as_many_as_fit() -> None:
    generations = generate(MODEL, [[0] * 60, [0] * 64], GenerationConfig())
    assert [len(g.ids) for g in generations] == [4, 0]
    assert len(generate(MODEL, [[0]], GenerationConfig(beyond_context=True))[0].ids) == 128


def test_beyond_the_context() -> None:
    generation = generate(MODEL, [[0, 3] * 30], GenerationConfig(max_new_tokens=10, beyond_context=True))[0]
    assert generation.ids == greedy_by_hand(MODEL, [0, 3] * 30, 10)


def test_forbidden_tokens_never_come() -> None:
    free = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=8))
    forbidden = sorted({i for g in free for i in g.ids})
    generations = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=8, forbidden=forbidden))
    assert not {i for g in generations for i in g.ids} & set(forbidden)
    with pytest.raises(ConfigError, match="no token is left to choose"):
        generate(MODEL, PROMPTS, GenerationConfig(forbidden=range(330)))


def test_repetition_penalty_sees_prompt_and_text() -> None:
    """With a huge penalty no token of the prompt or of the text so far comes again."""
    settings = GenerationConfig(max_new_tokens=30, sampling=Sampling(repetition_penalty=1e6))
    for g, prompt in zip(generate(MODEL, PROMPTS, settings), PROMPTS, strict=True):
        assert len({*g.ids, *prompt}) == len(g.ids) + len(set(prompt))


def test_a_model_in_training_is_sampled_in_evaluation_mode() -> None:
    """Afterwards every module is in the mode that it was in."""
    model = small().train()
    model.model.blocks[0].eval()
    before = [part.training for part in model.modules()]
    expected = greedy_by_hand(small(), [0, 5], 6)
    assert generate(model, [[0, 5]], GenerationConfig(max_new_tokens=6))[0].ids == expected
    assert [part.training for part in model.modules()] == before
    assert {*before} == {True, False}


def test_a_stream_may_be_left() -> None:
    deltas = stream(MODEL, PROMPTS, GenerationConfig(max_new_tokens=30))
    assert next(deltas).request == 0
    assert not torch.is_inference_mode_enabled()
    deltas.close()  # type: ignore[attr-defined]
    assert generate(MODEL, PROMPTS[:1], GenerationConfig(max_new_tokens=3))[0].ids == greedy_by_hand(
        MODEL, PROMPTS[0], 3
    )


def test_seconds_are_in_order() -> None:
    g = generate(MODEL, PROMPTS[:1], GenerationConfig(max_new_tokens=5))[0]
    assert g.seconds_to_first_token is not None
    assert 0 < g.seconds_to_first_token < g.seconds
    assert g.tokens_per_second == pytest.approx(4 / (g.seconds - g.seconds_to_first_token))


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_trace_of_the_lengths_that_are_read(use_cache: bool) -> None:
    """Mission 38, 35: from BOS alone, each step reads the whole text, 1, 2, 3, ... tokens; or, with a cache, only the
    newest token."""
    model, read = small(), []
    model.register_forward_pre_hook(lambda module, args: read.append(tuple(args[0].shape)))
    generate(model, [[0]], GenerationConfig(max_new_tokens=5, use_cache=use_cache))
    assert read == [(1, 1)] * 5 if use_cache else read == [(1, n) for n in (1, 2, 3, 4, 5)]


def test_rows_that_have_ended_are_no_longer_computed() -> None:
    model, read = small(), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    free = generate(model, PROMPTS, GenerationConfig(max_new_tokens=6))
    eos = free[0].ids[2]
    read.clear()
    generations = generate(model, PROMPTS, GenerationConfig(max_new_tokens=6, eos=[eos]))
    assert [len(g.ids) for g in generations].count(6) < len(PROMPTS)
    steps = range(1, max(len(g.ids) for g in generations))  # prompts are read packed, in one row
    assert read == [sum(map(len, PROMPTS)), *(sum(len(g.ids) > step for g in generations) for step in steps)]


@pytest.mark.parametrize("chunk", [None, 1, 5])
@pytest.mark.parametrize("patterns", [MIXED, Window.last(4)], ids=["mixed", "window"])
def test_prompts_of_different_lengths_are_read_without_padding(
    patterns: Pattern | tuple[Pattern, ...], chunk: int | None
) -> None:
    """They also leave the state that each leaves alone: the same logits, now and after a step."""
    model, counts = small(patterns).double(), []
    model.register_forward_pre_hook(lambda module, args: counts.append(args[0].numel()))
    together, last = texts(model, PROMPTS, chunk)
    assert sum(counts) == sum(map(len, PROMPTS))
    alone = [texts(model, [prompt], chunk) for prompt in PROMPTS]
    torch.testing.assert_close(last, torch.cat([logits for _, logits in alone]), rtol=1e-10, atol=1e-10)
    next_ids = [[7], [8], [9], [10]]
    steps = torch.cat([reader.step([ids]) for (reader, _), ids in zip(alone, next_ids, strict=True)])
    torch.testing.assert_close(together.step(next_ids), steps, rtol=1e-10, atol=1e-10)


class Texts:
    """Texts that one reader continues together."""

    def __init__(self, model: Decoder, count: int) -> None:
        self.reader = Reader(model)
        self.tables = [self.reader.cache.open() for _ in range(count)]

    def step(self, ids: Sequence[Sequence[int]]) -> torch.Tensor:
        """Returns logits [R, V] after the next ids of each text; texts without next ids are left out."""
        chunks = [(table, new) for table, new in zip(self.tables, ids, strict=True) if new]
        logits = self.reader.read(chunks, [[len(new) - 1] for _, new in chunks])
        self.reader.end()
        return logits


def texts(model: Decoder, prompts: Sequence[list[int]], chunk: int | None) -> tuple[Texts, torch.Tensor]:
    """Returns texts that have read their prompts, `chunk` tokens at a time, and the logits at their ends."""
    batch, ends = Texts(model, len(prompts)), {}
    size = chunk or max(map(len, prompts))
    for at in range(0, max(map(len, prompts)), size):
        pieces = [prompt[at : at + size] for prompt in prompts]
        logits = iter(batch.step(pieces))
        ends |= {i: next(logits) for i, piece in enumerate(pieces) if piece}
    return batch, torch.stack([ends[i] for i in range(len(prompts))])


def test_each_step_draws_from_its_own_number() -> None:
    """The oracle: full forward passes, and the random number that belongs to (seed, request, step)."""
    sampling, ids = Sampling(temperature=1.5, top_k=80), [0, 5]
    for step in range(8):
        with torch.no_grad():
            logits = MODEL(torch.tensor([ids]))[:, -1]
        ids.append(int(sampling.choose(logits, [uniform(21, 6, step)])))
    generation = generate(
        MODEL, [[0, 5]], GenerationConfig(max_new_tokens=8, sampling=sampling, seed=21), requests=[6]
    )[0]
    assert generation.ids == ids[2:]
