"""Drafts: a text with drafts equals that of the plain loop; drafts are counted, and few if they are wrong."""

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from headway.errors import ConfigError
from headway.generate import Draft, GenerationConfig, ModelDraft, NgramDraft, Sampling, generate, stream
from headway.generate.drafts import EARNED, MOST_CREDIT, PAID_BY_ACCEPTED, Speculation, continuation
from headway.generate.requests import Request
from headway.generate.sequences import SampledText
from headway.models import build
from headway.patterns import Window
from headway.positions import Learned
from tests.generate.conftest import MIXED, small
from tests.generate.drafts import (
    MODEL,
    OTHER,
    PROMPTS,
    TOKENIZER,
    Scripted,
    essence,
    looked_up,
    periodic,
)

ROOM = 14


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 40]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.02]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
)
configs = st.builds(
    GenerationConfig,
    max_new_tokens=st.just(ROOM),
    sampling=samplings,
    seed=st.integers(0, 99),
    min_new_tokens=st.sampled_from([0, 6]),
    no_repeat_ngram=st.sampled_from([0, 2]),
    forbidden=st.sampled_from([(), tuple(range(100, 200))]),
    forced_first=st.sampled_from([None, 8]),
    forced_last=st.sampled_from([None, 4]),
    use_cache=st.sampled_from([True, True, True, False]),
)


def drafts(truth: Sequence[Sequence[int]]) -> st.SearchStrategy[Draft]:
    scripted = st.builds(Scripted, st.just(truth), st.sampled_from([2, 3, 7, 99]), st.sampled_from([1, 3, 8]))
    ngrams = st.builds(NgramDraft, tokens=st.integers(1, 6), most=st.just(3), least=st.just(1))
    models = st.builds(ModelDraft, model=st.sampled_from([MODEL, OTHER]), tokens=st.sampled_from([1, 3, 5]))
    return st.one_of(scripted, scripted, ngrams, models)


@given(st.data())
def test_drafts_change_no_text(data: st.DataObject) -> None:
    """Whatever is proposed, at any temperature, in a batch, and if a text ends inside a draft."""
    config = data.draw(configs)
    free = generate(MODEL, PROMPTS, config, tokenizer=TOKENIZER)
    sample = free[data.draw(st.integers(0, 2))]
    ends = {
        "eos": [sample.ids[data.draw(st.integers(0, ROOM - 1))]],
        "stop": [sample.text[2:4] or "?"],
        "max_new_tokens": data.draw(st.integers(6, ROOM)),
    }
    names = data.draw(st.sets(st.sampled_from(sorted(ends))))
    config = replace(config, **{name: ends[name] for name in names})
    draft = data.draw(drafts([generation.ids for generation in free]))
    plain = generate(MODEL, PROMPTS, config, tokenizer=TOKENIZER)
    actual = generate(MODEL, PROMPTS, config, tokenizer=TOKENIZER, draft=draft)
    assert essence(actual) == essence(plain)


def test_alone_and_streamed() -> None:
    config = GenerationConfig(max_new_tokens=12, sampling=Sampling(temperature=1.2), stop=["e"], eos=[40])
    plain = generate(MODEL, PROMPTS, config, tokenizer=TOKENIZER)
    draft = Scripted([generation.ids for generation in plain], 5)
    for i, generation in enumerate(plain):
        (alone,) = generate(MODEL, [PROMPTS[i]], config, tokenizer=TOKENIZER, draft=draft, requests=[i])
        assert essence([alone]) == essence([generation])
    deltas = list(stream(MODEL, PROMPTS, config, tokenizer=TOKENIZER, draft=draft))
    for i, generation in enumerate(plain):
        row_deltas = [delta for delta in deltas if delta.request == i]
        assert ([d.token for d in row_deltas], "".join(d.text for d in row_deltas)) == (
            generation.ids,
            generation.text,
        )


def test_settings_of_their_own_and_caches_of_eight_bits() -> None:
    configs = [
        GenerationConfig(
            max_new_tokens=most, sampling=Sampling(temperature=heat), seed=most, kv_cache_dtype="int8"
        )
        for most, heat in ((14, 0.0), (9, 1.0), (0, 0.0))
    ]
    plain = generate(MODEL, PROMPTS, configs)
    for draft in (
        Scripted([generation.ids for generation in plain], 4),
        ModelDraft(model=MODEL),
        NgramDraft(least=1, tokens=3),
    ):
        actual = generate(MODEL, PROMPTS, configs, draft=draft)
        assert essence(actual) == essence(plain)
        assert isinstance(draft, NgramDraft) or sum(generation.accepted for generation in actual) > 9


@pytest.mark.parametrize("period", [2, 5, 99])
def test_every_step_and_token_is_counted(period: int) -> None:
    model, read = small(MIXED), []
    config = GenerationConfig(max_new_tokens=24, sampling=Sampling(temperature=1.0))
    (plain,) = generate(model, [[0, 5]], config)
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].shape[1]))
    (generation,) = generate(model, [[0, 5]], config, draft=Scripted([plain.ids], period))
    assert generation.ids == plain.ids
    assert len(read) + generation.accepted == 24
    assert sum(read[1:]) == len(read[1:]) + generation.drafted
    assert 0 < generation.accepted <= generation.drafted
    if period == 99:
        assert read == [2, 6, 6, 6, 5]
        assert generation.accepted == generation.drafted == 19
    last = list(stream(model, [[0, 5]], config, draft=Scripted([plain.ids], period)))[-1]
    assert (last.drafted, last.accepted) == (generation.drafted, generation.accepted)
    assert (plain.drafted, plain.accepted) == (0, 0)


def test_rows_take_their_own_number_of_tokens() -> None:
    """Three rows whose drafts are right, wrong and unknown take as many steps as the slowest needs."""
    model, read = small(MIXED), []
    config = GenerationConfig(max_new_tokens=12)
    plain = generate(model, PROMPTS, config)
    truth = [plain[0].ids, [(i + 1) % 330 for i in plain[1].ids], []]
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    actual = generate(model, PROMPTS, config, draft=Scripted(truth, 99))
    assert essence(actual) == essence(plain)
    assert [generation.accepted for generation in actual] == [9, 0, 0]
    assert len(read) == 12


def test_a_model_of_its_own_is_always_right() -> None:
    """The draft model is the model itself: equal probabilities and equal noise choose equal tokens."""
    config = GenerationConfig(
        max_new_tokens=ROOM, sampling=Sampling(temperature=1.2, repetition_penalty=1.2, top_k=50), seed=5
    )
    actual = generate(MODEL, PROMPTS, config, draft=ModelDraft(model=MODEL, tokens=3))
    assert essence(actual) == essence(generate(MODEL, PROMPTS, config))
    assert all(generation.drafted == generation.accepted > ROOM // 2 for generation in actual)


def test_what_a_text_repeats_is_guessed_from_it() -> None:
    model = periodic()
    config = GenerationConfig(max_new_tokens=40, forbidden=range(8, 330))
    (plain,) = generate(model, [[0]], config)
    assert plain.ids[-8:] in [plain.ids[i : i + 8] for i in range(24)]
    (generation,) = generate(model, [[0]], config, draft=NgramDraft())
    assert generation.ids == plain.ids
    assert generation.accepted > 20


@example([0, 1, 0, 2, 0], 1, 0, 3)  # the last occurrence, not the first
@example([1, 0, 2, 0, 1, 0], 1, 1, 7)  # the longest suffix, not the last occurrence
@given(
    st.lists(st.integers(0, 2), max_size=9) | st.lists(st.integers(0, 2), min_size=8, max_size=30),
    st.integers(1, 3),
    st.integers(0, 2),
    st.integers(0, 9),
)
def test_the_longest_suffix_at_its_last_occurrence(ids: list[int], least: int, more: int, count: int) -> None:
    assert continuation(ids, least, least + more, count) == looked_up(ids, count, least, least + more)


@given(
    st.integers(1, 3), st.sampled_from([1, 4, 8]), st.lists(st.integers(0, 8), max_size=300), st.booleans()
)
def test_wrong_drafts_are_few(rows: int, tokens: int, right: list[int], never: bool) -> None:
    """drafted <= MOST_CREDIT + PAID_BY_ACCEPTED accepted + EARNED steps holds after every step; counts are means over
    rows."""
    requests = [Request(i, [0], GenerationConfig(), 10**6) for i in range(rows)]
    texts = [SampledText(request, None) for request in requests]
    truth = [[1] * 10**4] * rows
    ahead = Speculation(Scripted(truth, 10**6, tokens))
    for text in texts:
        text.advance(1, 0.0)
    drafted = accepted = steps = 0.0
    for hits in [0] * 420 if never else right:
        ahead.propose(texts)
        for i, text in enumerate(texts):
            for place in range(len(text.draft) + 1):
                text.advance(1 if place < (hits + i) % 9 * (not never) else 2, 0.0)
                if not text.follows:
                    break
        ahead.settle(texts)
        drafted += sum(len(text.draft) for text in texts) / rows
        accepted += sum(text.right for text in texts) / rows
        steps += not any(text.draft for text in texts)
        assert drafted <= MOST_CREDIT + PAID_BY_ACCEPTED * accepted + EARNED * steps + 1e-9
    if never:
        assert (drafted, accepted) == (MOST_CREDIT + 3, 0), "and a token is tried once in 128 steps"


def test_guesses_on_both_sides_of_the_end_of_a_page_are_taken_back() -> None:
    """The windows of the model and of the draft model have released the page before the one that is taken back to."""
    model = small(Window.last(4), context=256)
    prompts = [[1, *range(20, 20 + count)] for count in (50, 55, 60)]
    config = GenerationConfig(max_new_tokens=40)
    plain = generate(model, prompts, config)
    guesser = copy.deepcopy(model)
    with torch.no_grad():
        guesser.model.embed_tokens.weight[::7] *= -1  # so that its drafts are right in part
    for draft in (
        Scripted([generation.ids for generation in plain], 3, 8),
        ModelDraft(model=guesser, tokens=7),
    ):
        assert essence(generate(model, prompts, config, draft=draft)) == essence(plain)


def test_the_context_is_not_exceeded() -> None:
    """Learned positions end with the context: neither model may read a token beyond it."""
    model = build(replace(MODEL.spec, positions=Learned(40), trained_context=40), seed=1).eval()
    config = GenerationConfig(max_new_tokens=20)
    (plain,) = generate(model, [[0] * 20], config)
    for draft in (Scripted([plain.ids], 99, 8), ModelDraft(model=model, tokens=7)):
        (generation,) = generate(model, [[0] * 20], config, draft=draft)
        assert generation.ids == plain.ids
        assert generation.accepted > 10
    longer = build(replace(MODEL.spec, positions=Learned(50), trained_context=50), seed=1).eval()
    with pytest.raises(
        ConfigError, match=r"the draft model can take 40 tokens, and prompt 0 with its .* up to 45"
    ):
        generate(longer, [[0] * 20], GenerationConfig(max_new_tokens=25), draft=ModelDraft(model=model))
