"""Scores of continuations: the log softmax of a plain forward pass, whatever else is in the batch.

Tolerance: products of other shapes sum in another order; two correct float32 passes through two layers with weights of
standard deviation 0.3 differ by a few hundred roundings (6e-8) of logits near 10."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.api import LanguageModel
from headway.errors import ConfigError, DataError
from headway.generate import GenerationConfig, generate, rolling_windows, score
from tests.generate.conftest import MIXED, small
from tests.text.conftest import byte_level, sentencepiece

MODEL = small(MIXED)
CLOSE = 1e-4
PAIRS = [([0, 5, 9], [7, 7]), ([0], [3]), ([0, *range(20, 39)], [8, *range(40, 50)]), ([4], [5] * 30)]
IDS = st.lists(st.integers(0, 329), min_size=1, max_size=12)


def plain(context: list[int], continuation: list[int]) -> tuple[list[float], bool]:
    """Returns the continuation's log probabilities and whether it is greedy, from all logits of one row."""
    with torch.no_grad():
        logits = MODEL(torch.tensor([[*context, *continuation]]))[0].double()
    at = range(len(context) - 1, len(context) + len(continuation) - 1)
    log_probs = torch.log_softmax(logits, -1)
    values = [float(log_probs[i, token]) for i, token in zip(at, continuation, strict=True)]
    return values, all(int(logits[i].argmax()) == t for i, t in zip(at, continuation, strict=True))


@given(st.lists(st.tuples(IDS, IDS), min_size=1, max_size=5), st.integers(1, 5))
def test_a_score_is_the_log_softmax_of_the_pair_alone(
    pairs: list[tuple[list[int], list[int]]], batch_size: int
) -> None:
    for (context, continuation), scored in zip(
        pairs, score(MODEL, pairs, batch_size=batch_size), strict=True
    ):
        log_probs, greedy = plain(context, continuation)
        assert scored.log_probs == pytest.approx(log_probs, abs=CLOSE)
        assert scored.log_prob == math.fsum(scored.log_probs)
        assert (scored.ids, scored.is_greedy) == (tuple(continuation), greedy)


def test_what_else_is_in_the_batch_does_not_matter() -> None:
    single = score(MODEL, PAIRS * 3, batch_size=1)
    eight = score(MODEL, PAIRS * 3, batch_size=8)
    assert [s.is_greedy for s in single] == [s.is_greedy for s in eight]
    for a, b in zip(single, eight, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=CLOSE)


def test_what_greedy_generation_gives_is_greedy_and_nothing_else_is() -> None:
    (generation,) = generate(MODEL, [[0, 5, 9]], GenerationConfig(max_new_tokens=6))
    other = [*generation.ids[:-1], (generation.ids[-1] + 1) % 330]
    right, wrong = score(MODEL, [([0, 5, 9], generation.ids), ([0, 5, 9], other)])
    assert (right.is_greedy, wrong.is_greedy) == (True, False)
    assert right.log_prob > wrong.log_prob


def test_scores_are_of_the_logits_that_the_model_gives() -> None:
    """Logits that are scaled, an output layer that is wrapped, and a model in training mode."""

    class Adapted(torch.nn.Module):
        def __init__(self, layer: torch.nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * self.layer(x)

    model = small(MIXED)
    model.spec = replace(model.spec, logit_scale=0.7)
    model.lm_head = Adapted(model.lm_head)  # type: ignore[assignment]
    with torch.no_grad():
        logits = model(torch.tensor([[0, 5, 9, 7, 8]]))[0].double()
    (scored,) = score(model.train(), [([0, 5, 9], [7, 8])])
    assert model.training
    expected = torch.log_softmax(logits, -1)[[2, 3], [7, 8]]
    assert scored.log_probs == pytest.approx(expected.tolist(), abs=CLOSE)


def test_scores_in_float64_do_not_depend_on_the_batch_at_all() -> None:
    model = small(MIXED).double()
    for a, b in zip(score(model, PAIRS, batch_size=1), score(model, PAIRS), strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-12)


@given(st.integers(0, 40), st.integers(1, 12))
def test_windows_score_each_token_once_and_look_back_as_far_as_they_can(count: int, length: int) -> None:
    ids = list(range(100, 100 + count))
    windows = rolling_windows(ids, 7, length)
    assert [token for _, part in windows for token in part] == ids
    for i, (context, part) in enumerate(windows):
        assert len(context) + len(part) - 1 == (min(length, count) if i == 0 else length)
        before = [7, *ids][: 1 + ids.index(part[0])]
        assert list(context) == before[len(before) - len(context) :]


def lm() -> LanguageModel:
    return LanguageModel(MODEL, byte_level())


def test_a_text_is_scored_token_by_token_after_the_prefix() -> None:
    model, text = lm(), "the cat sat on the mat, and the dog sat on the log"
    assert model.tokenizer is not None
    ids = model.tokenizer.encode(text, bos=False)
    assert len(ids) <= 64
    whole = model.score_text(text)
    assert whole.log_probs == pytest.approx(model.score("", text).log_probs, abs=CLOSE)
    assert whole.ids == tuple(ids)
    pieces = [plain([*map(int, c)], [*map(int, k)])[0] for c, k in rolling_windows(ids, model.prefix, 9)]
    cut = model.score_text([text, "", text], window=9)
    assert cut[0].log_probs == pytest.approx([value for piece in pieces for value in piece], abs=CLOSE)
    assert (cut[1].log_prob, cut[1].ids) == (0.0, ())
    assert cut[2].log_probs == pytest.approx(cut[0].log_probs, abs=CLOSE)


def test_spaces_belong_to_the_continuation_and_both_are_one_text() -> None:
    model = lm()
    assert model.tokenizer is not None
    plainly = model.score("the cat", " sat")
    assert model.score("the cat ", "sat").log_probs == plainly.log_probs
    whole = model.tokenizer.encode("the cat sat", eos=False)
    assert plainly.ids == tuple(whole[len(model.tokenizer.encode("the cat", eos=False)) :])
    several = model.score("the cat", [" sat", " saw"])
    assert several[0].log_prob == pytest.approx(plainly.log_prob, abs=CLOSE)
    both = model.score(["the cat", "the dog"], [" sat", " sat"])
    assert both[0].log_prob == pytest.approx(plainly.log_prob, abs=CLOSE)
    assert model.score("  ", "the").ids == tuple(model.tokenizer.encode("  the", bos=False))


def test_an_empty_context_is_bos_and_without_bos_eos() -> None:
    assert lm().prefix == byte_level().bos
    tokenizer = sentencepiece()
    tokenizer.bos = None
    assert LanguageModel(MODEL, tokenizer).prefix == 2
    with pytest.raises(DataError, match="neither BOS nor EOS to begin a text with; give a context"):
        LanguageModel(MODEL).prefix  # noqa: B018


def test_what_cannot_be_scored_is_refused_by_name() -> None:
    model = lm()
    with pytest.raises(DataError, match=r"continuation 1 \(''\) has no token of its own"):
        model.score(["a", "b"], ["c", ""])
    with pytest.raises(DataError, match="score: 2 contexts for 1 continuations"):
        model.score(["a", "b"], ["c"])
    with pytest.raises(ConfigError, match=r"score has no option .batchsize. .did you mean .batch_size."):
        model.score("a", "b", batchsize=3)  # type: ignore[call-overload]
    with pytest.raises(DataError, match="continuation 1 is empty"):
        score(MODEL, [([1], [2]), ([1], [])])
    with pytest.raises(DataError, match="token id 330 at place 0 is outside the model's vocabulary"):
        score(MODEL, [([1], [330])])
    with pytest.raises(ConfigError, match="pair 1: 60 tokens of context and 6 of the continuation exceed"):
        score(MODEL, [([1] * 60, [2] * 5), ([1] * 60, [2] * 6)])
    assert len(score(MODEL, [([1] * 60, [2] * 6)], beyond_context=True)[0].ids) == 6
    with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
        score(MODEL, PAIRS, batch_size=0)
    with pytest.raises(ConfigError, match="window must be at least 1, got 0"):
        model.score_text("a", window=0)
    assert score(MODEL, []) == []
