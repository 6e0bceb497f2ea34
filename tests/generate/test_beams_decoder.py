"""Beam search over decoders: any cache, any batch, and what is refused."""

import pytest
import torch
from torch import Tensor

from headway.api import LanguageModel
from headway.errors import ConfigError
from headway.generate import Beams, Generation, GenerationConfig, Reader, Sampling, generate, stream
from headway.models import Decoder
from headway.patterns import Causal, Window
from tests.cache.page_counts import page_counts
from tests.generate.conftest import MIXED, small
from tests.generate.plain import PROMPTS
from tests.text.conftest import byte_level

MODEL, TOKENIZER = small(MIXED), byte_level()
EOS = [3, *range(40, 110)]
HOW = Beams(4, n_best=3)


def told(generations: list[Generation]) -> list[list[tuple[int, ...]]]:
    return [[h.ids for h in g.hypotheses] for g in generations]


def scores(generations: list[Generation]) -> Tensor:
    return torch.tensor([[h.score for h in g.hypotheses] for g in generations])


def score(model: Decoder, prompt: list[int], ids: list[int], penalty: float = 1.0) -> float:
    """Returns the score from one full forward pass."""
    with torch.inference_mode():
        log_probs = model(torch.tensor([[*prompt, *ids]]))[0].log_softmax(-1)
    log_prob = log_probs[torch.arange(len(ids)) + len(prompt) - 1, torch.tensor(ids)].double().sum()
    return float(log_prob) / len(ids) ** penalty


@pytest.mark.parametrize("pattern", [Causal(), Window.last(5), MIXED], ids=["growing", "ring", "both"])
def test_cached_is_uncached(pattern: object) -> None:
    """Prompts have 1 to 20 tokens; by the end ring caches have wrapped and beams have crossed many times."""
    model = small(pattern)  # type: ignore[arg-type]
    settings = {"max_new_tokens": 16, "eos": EOS, "beams": HOW}
    cached = generate(model, PROMPTS, GenerationConfig(**settings))
    plain = generate(model, PROMPTS, GenerationConfig(**settings, use_cache=False))
    assert told(cached) == told(plain)
    assert torch.allclose(scores(cached), scores(plain), atol=1e-5)
    for generation, prompt in zip(cached, PROMPTS, strict=True):
        for h in generation.hypotheses:
            assert h.score == pytest.approx(score(model, prompt, list(h.ids)), abs=1e-5)


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_chunks_and_company_change_no_text(dtype: str) -> None:
    settings = {"max_new_tokens": 12, "eos": EOS, "beams": HOW, "kv_cache_dtype": dtype}
    together = generate(MODEL, PROMPTS, GenerationConfig(**settings))
    assert len({len(h.ids) for g in together for h in g.hypotheses}) > 2
    for size in (1, 3):
        generations = generate(MODEL, PROMPTS, GenerationConfig(**settings), batch_size=size)
        assert told(generations) == told(together)
        assert torch.allclose(scores(generations), scores(together), atol=1e-5)
    assert told(generate(MODEL, PROMPTS, GenerationConfig(**settings, prefill_chunk=3))) == told(together)


def test_an_int8_cache_is_read() -> None:
    """Scores are those of each text alone, token by token, from an int8 cache that is made by hand, and not those of
    exact keys."""

    def by_hand(prompt: list[int], ids: tuple[int, ...]) -> float:
        cache, total, new = MODEL.make_cache(1, dtype=torch.int8), 0.0, prompt
        for token in ids:
            with torch.inference_mode():
                log_probs = MODEL(torch.tensor([new]), cache=cache)[0, -1].log_softmax(-1)
            total, new = total + float(log_probs[token]), [token]
        return total / len(ids)

    config = GenerationConfig(max_new_tokens=9, eos=EOS, beams=HOW, kv_cache_dtype="int8")
    for generation, prompt in zip(generate(MODEL, PROMPTS, config), PROMPTS, strict=True):
        for h in generation.hypotheses:
            assert h.score == pytest.approx(by_hand(prompt, h.ids), abs=1e-5)
        differences = [abs(h.score - score(MODEL, prompt, list(h.ids))) for h in generation.hypotheses]
        assert max(differences) > 1e-3


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("repetition", [1.0, 1.3])
def test_the_greedy_text_is_never_better(penalty: float, repetition: float) -> None:
    """A beam search scores no less than the text of plain generation. Row 26."""
    sampling = Sampling(repetition_penalty=repetition)
    plain = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=14, eos=EOS, sampling=sampling))
    single = Beams(1, length_penalty=penalty)
    settings = {"max_new_tokens": 14, "eos": EOS, "sampling": sampling}
    alone = generate(MODEL, PROMPTS, GenerationConfig(**settings, beams=single))
    assert [g.ids for g in alone] == [g.ids for g in plain]
    for width in (2, 5):
        many = generate(
            MODEL, PROMPTS, GenerationConfig(**settings, beams=Beams(width, length_penalty=penalty))
        )
        for best, greedy, prompt in zip(many, alone, PROMPTS, strict=True):
            assert best.score is not None
            assert greedy.score is not None
            assert best.score >= greedy.score - 1e-5 * abs(greedy.score)
            if repetition == 1:
                assert greedy.score == pytest.approx(score(MODEL, prompt, greedy.ids, penalty), rel=1e-5)


def test_text_ids_and_score_are_those_of_the_best() -> None:
    (generation,) = generate(
        MODEL, PROMPTS[:1], GenerationConfig(max_new_tokens=9, eos=EOS, beams=HOW), tokenizer=TOKENIZER
    )
    best = generation.hypotheses[0]
    assert (generation.ids, generation.text, generation.score) == (list(best.ids), best.text, best.score)
    assert (generation.finish_reason, generation.prompt_tokens) == (best.finish_reason, 3)
    for h in generation.hypotheses:
        assert h.text == TOKENIZER.decode([i for i in h.ids if i not in EOS], after=PROMPTS[0])
    assert generation.seconds_to_first_token is None
    (plain,) = generate(MODEL, PROMPTS[:1], GenerationConfig(max_new_tokens=9))
    assert (plain.score, plain.hypotheses) == (None, ())


def test_no_room_and_forbidden_tokens() -> None:
    none = generate(MODEL, [[0], [0] * 64, [0] * 60], GenerationConfig(beams=Beams(2)))
    assert [len(g.ids) for g in none] == [63, 0, 4]
    assert (none[1].score, none[1].finish_reason) == (0.0, "length")
    free = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=8, beams=HOW))
    forbidden = sorted({i for g in free for h in g.hypotheses for i in h.ids})
    generations = generate(MODEL, PROMPTS, GenerationConfig(max_new_tokens=8, beams=HOW, forbidden=forbidden))
    assert not {i for g in generations for h in g.hypotheses for i in h.ids} & set(forbidden)


def test_beams_share_one_reading_of_the_prompt() -> None:
    """The prompts are read once, together; then each step reads one token per beam."""
    model, read = small(), []
    model.register_forward_pre_hook(lambda module, args: read.append(args[0].numel()))
    generate(model, PROMPTS, GenerationConfig(max_new_tokens=4, beams=Beams(3, with_greedy=False)))
    assert read == [sum(map(len, PROMPTS)), 12, 12, 12]


def test_texts_are_forked_and_end() -> None:
    for use_cache in (True, False):
        reader = Reader(MODEL, use_cache=use_cache)
        first, last = reader.cache.open(), reader.cache.open()
        assert reader.read([(first, [0, 5]), (last, [1, 2, 3])], [[1], [2]]).shape == (2, 330)
        reader.end()
        third = reader.cache.pool.fork(last)
        again = reader.read([(last, [4]), (first, [4]), (third, [6])], [[0]] * 3)
        reader.end()
        for row, ids in zip(again, ([1, 2, 3, 4], [0, 5, 4], [1, 2, 3, 6]), strict=True):
            with torch.inference_mode():
                assert torch.allclose(row, MODEL(torch.tensor([ids]))[0, -1], atol=1e-4)
        for table in (first, last, third):
            reader.cache.pool.close(table)
        assert [counts["used"] for counts in page_counts(reader.cache.pool)] == [0] * len(
            reader.cache.pool.classes
        )


def test_a_language_model_takes_a_number_or_beams() -> None:
    lm = LanguageModel(MODEL, TOKENIZER)
    four = lm.generate("the cat", max_new_tokens=8, beams=4)
    assert four.ids == lm.generate("the cat", max_new_tokens=8, beams=Beams(4)).ids
    assert four.ids != lm.generate("the cat", max_new_tokens=8).ids
    many = lm.generate(["the cat", "a"], max_new_tokens=8, beams=Beams(4, n_best=2))
    assert many[0].ids == four.ids
    assert [len(g.hypotheses) for g in many] == [2, 2]
    with pytest.raises(ConfigError, match="a beam search has no final token before its end"):
        lm.stream("the cat", beams=4)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (
            {"sampling": Sampling(temperature=0.8)},
            r"does not sample, but Sampling\(temperature=0.8.*leave out",
        ),
        ({"sampling": Sampling(top_k=5)}, "does not sample, but .*top_k=5"),
        ({"seed": 3}, "does not sample, but .* and seed=3 were given"),
        ({"stop": ["a"]}, r"ends texts only at eos, but stop strings \['a'\] were given"),
        ({"beams": 4}, r"beams must be a Beams, got 4; write Beams\(4\)"),
        (
            {"min_new_tokens": 9, "max_new_tokens": 8},
            "min_new_tokens is 9, but max_new_tokens 8",
        ),
        ({"forced_last": 330}, "forced_last: token id 330 is outside"),
        ({"forced_first": -1}, "forced_first: token id -1 is outside"),
        ({"no_repeat_ngram": -1}, "no_repeat_ngram must be a whole number of at least 0, got -1"),
        ({"min_new_tokens": True}, "min_new_tokens must be a whole number of at least 0, got True"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        generate(MODEL, PROMPTS, GenerationConfig(**{"beams": HOW, **given}), tokenizer=TOKENIZER)  # type: ignore[arg-type]


def test_a_stream_of_beams_is_refused_before_it_begins() -> None:
    with pytest.raises(ConfigError, match="use generate, or leave out beams"):
        stream(MODEL, PROMPTS, GenerationConfig(beams=HOW))
