"""Beam search over toy models whose best texts are found by enumerating all of them."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headway.errors import ConfigError, HeadwayError
from headway.generate import Beams
from headway.generate.sampling import penalize_repetition
from tests.generate.toys import Toy, all_texts, greedy, run, total

PENALTIES = (-1.5, 0.0, 0.6, 1.0, 2.0)


@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 4), st.sampled_from(PENALTIES))
def test_as_many_beams_as_texts_find_the_best_of_all(
    seed: int, vocab: int, room: int, penalty: float
) -> None:
    toy = Toy(vocab, seed, [[1]])
    ranked = sorted(
        ((total(toy, [1], ids) / len(ids) ** penalty, ids) for ids in all_texts(vocab, room, [0])),
        reverse=True,
    )
    width = vocab**room
    for n in (1, min(5, len(ranked))):
        beams = Beams(width, length_penalty=penalty, n_best=n, early_stopping="never", with_greedy=n > 1)
        (hypotheses,) = run(Toy(vocab, seed, [[1]]), beams, room)
        assert [h.ids for h in hypotheses] == [ids for _, ids in ranked[:n]]
        assert [h.score for h in hypotheses] == pytest.approx([score for score, _ in ranked[:n]])


@given(st.integers(0, 10**6), st.integers(1, 5), st.integers(1, 9), st.sampled_from(PENALTIES), st.data())
def test_no_score_is_below_that_of_greedy(
    seed: int, width: int, room: int, penalty: float, data: st.DataObject
) -> None:
    stop = data.draw(st.sampled_from([True, False, "never"]))
    toy, beams = Toy(6, seed, [[1], [2, 3]]), Beams(width, length_penalty=penalty, early_stopping=stop)
    for prompt, (best,) in zip(([1], [2, 3]), run(Toy(6, seed, [[1], [2, 3]]), beams, room), strict=True):
        ids = greedy(toy, prompt, room)
        assert best.score >= total(toy, prompt, ids) / len(ids) ** penalty - 1e-12
        if width == 1:
            assert best.ids == ids


class Detour(Toy):
    """The likeliest first token leads to an unsure second one and then to certainty; for the other first tokens it is
    the other way round: two texts are likelier at first, and unlikely in the end."""

    def logits(self, text: Sequence[int]) -> Tensor:
        ids, unsure = text[1:], [0.34, 0.33, 0.33]
        if not ids:
            row = [0.4, 0.35, 0.25]
        elif len(ids) == 1:
            row = unsure if ids[0] == 0 else [0.49, 0.49, 0.02]
        else:
            row = [0.96, 0.02, 0.02] if ids[0] == 0 else unsure
        return torch.tensor(row, dtype=torch.float64).log()


def test_without_the_greedy_text_a_search_may_score_below_it() -> None:
    """So it is with_greedy that guarantees the score, not beam search."""
    beams = {kept: Beams(2, with_greedy=kept, n_best=2) for kept in (False, True)}
    ((plain, _),) = run(Detour(3, 0, [[1]]), beams[False], 8, eos=[])
    ((best, second),) = run(Detour(3, 0, [[1]]), beams[True], 8, eos=[])
    assert best.ids == greedy(Detour(3, 0, [[1]]), [1], 8, []) == (0,) * 8
    assert best.score == pytest.approx((math.log(0.4 * 0.34) + 6 * math.log(0.96)) / 8)
    assert plain == second
    assert plain.score < best.score - 0.1


@given(st.integers(0, 10**6), st.integers(2, 5), st.sampled_from(PENALTIES), st.booleans(), st.integers(0, 1))
def test_hypotheses_differ_and_are_what_they_say(
    seed: int, width: int, penalty: float, early: bool, levels: int
) -> None:
    toy = Toy(5, seed, [[1]], levels)
    beams = Beams(width, length_penalty=penalty, n_best=width, early_stopping=early)
    (hypotheses,) = run(Toy(5, seed, [[1]], levels), beams, 7, eos=[0, 4])
    assert len({h.ids for h in hypotheses}) == len(hypotheses) == width
    assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)
    for h in hypotheses:
        assert sum(h.log_probs) == pytest.approx(total(toy, [1], h.ids))
        assert h.score == pytest.approx(total(toy, [1], h.ids) / len(h.ids) ** penalty)
        assert not set(h.ids[:-1]) & {0, 4}
        assert h.finish_reason == ("eos" if h.ids[-1] in (0, 4) else "length")
        assert h.finish_reason == "eos" or len(h.ids) == 7


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 1))
def test_a_prompt_of_a_batch_is_the_prompt_alone(seed: int, width: int, levels: int) -> None:
    """Bitwise, ties included: a toy's logits do not depend on the batch."""
    prompts, beams = [[1], [2, 3, 1], [4], [1, 1]], Beams(width, n_best=width)
    together = run(Toy(5, seed, prompts, levels), beams, 6)
    assert together == run(Toy(5, seed, prompts, levels), beams, 6)
    for prompt, hypotheses in zip(prompts, together, strict=True):
        assert run(Toy(5, seed, [prompt], levels), beams, 6) == [hypotheses]


class Even(Toy):
    """All tokens are equally likely."""

    def logits(self, text: Sequence[int]) -> Tensor:
        return torch.zeros(self.vocab, dtype=torch.float64)


def test_ties_go_to_the_better_parent_and_the_smaller_id() -> None:
    (hypotheses,) = run(Even(4, 0, [[1]]), Beams(3, n_best=3, length_penalty=0.0), 3, eos=[])
    assert [h.ids for h in hypotheses] == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    (hypotheses,) = run(Even(5, 0, [[1]]), Beams(2, n_best=2), 3, eos=[1])
    assert [h.ids for h in hypotheses] == [(1,), (0, 1)]


class ByStep(Toy):
    """Probabilities of the n-th new token, whatever the text; the last step's repeat. 0 ends a text."""

    def __init__(self, *steps: list[float]) -> None:
        super().__init__(3, 0, [[1]])
        self.steps = steps

    def logits(self, text: Sequence[int]) -> Tensor:
        return torch.tensor(self.steps[min(len(text) - 1, len(self.steps) - 1)], dtype=torch.float64).log()


SURE = [0.02, 0.97, 0.01]


@pytest.mark.parametrize(
    ("second", "penalty", "read"),
    [
        # the best text in progress, 1 1, is worse than both finished ones now, but would be better if long enough
        (([0.4, 0.35, 0.25], [0.6, 0.3, 0.1]), 1.0, {True: 2, False: 2, "never": 12}),
        # it is better than the worse of them already
        (([0.4, 0.5, 0.1], [0.45, 0.5, 0.05]), 1.0, {True: 2, False: 12, "never": 12}),
        # its probability can only fall
        (([0.4, 0.35, 0.25], [0.6, 0.3, 0.1]), 0.0, {True: 2, False: 2, "never": 2}),
        (([0.4, 0.35, 0.25], [0.6, 0.3, 0.1]), -1.0, {True: 2, False: 2, "never": 2}),
    ],
)
def test_when_a_search_stops(
    second: tuple[list[float], list[float]], penalty: float, read: dict[bool | str, int]
) -> None:
    for stop, steps in read.items():
        toy = ByStep(*second, SURE)
        beams = Beams(2, length_penalty=penalty, early_stopping=stop, with_greedy=False)  # type: ignore[arg-type]
        ((best,),) = run(toy, beams, 12)
        assert toy.longest == steps, "the prompt's token and all new ones but the last"
        if steps == 12:
            assert best.ids == (1,) * 12
        else:
            scores = {n: math.log(p) / n**penalty for n, p in ((1, 0.4), (2, second[0][1] * second[1][0]))}
            assert best.score == pytest.approx(max(scores.values()))


@given(st.integers(0, 10**6), st.integers(2, 4), st.sampled_from([-1.5, -0.5, 0.0]))
def test_never_looks_no_further_where_longer_is_never_better(seed: int, width: int, penalty: float) -> None:
    """Without a reward for length the present score of a text is the most that it can reach."""
    runs = []
    for stop in (False, "never"):
        beams = Beams(width, length_penalty=penalty, early_stopping=stop, n_best=width, with_greedy=False)  # type: ignore[arg-type]
        toy = Toy(4, seed, [[1]])
        runs.append((run(toy, beams, 9), toy.longest))
    assert runs[0] == runs[1]


@given(st.integers(0, 10**6), st.sampled_from([0.4, 3.0]))
def test_one_beam_is_greedy_with_its_penalty_on_logits(seed: int, penalty: float) -> None:
    toy, ids = Toy(6, seed, [[1]]), [1]
    while len(ids) < 9 and ids[-1] != 0:
        seen = torch.tensor([[i in ids for i in range(6)]])
        ids += penalize_repetition(toy.logits(ids).unsqueeze(0), penalty, seen).argmax(-1).tolist()
    for kept in (True, False):
        ((best,),) = run(Toy(6, seed, [[1]]), Beams(1, with_greedy=kept), 8, penalty=penalty)
        assert list(best.ids) == ids[1:]


def test_forced_tokens_are_certain_and_count() -> None:
    """The decoder's start, a forced first and a forced last token, as Marian and BART have them."""
    beams = Beams(3, n_best=3, length_penalty=1.0)
    rules = {"forced_first": 2, "forced_last": 0, "min_new_tokens": 9, "forbidden": [1]}
    (hypotheses,) = run(Toy(6, 3, [[1]]), beams, 5, **rules)
    for h in hypotheses:
        assert (h.ids[0], h.ids[-1], len(h.ids), h.finish_reason) == (2, 0, 5, "eos")
        assert (h.log_probs[0], h.log_probs[-1]) == (0.0, 0.0)
        assert 1 not in h.ids
        assert h.score == pytest.approx(sum(h.log_probs) / 5)


def test_room_is_each_prompt_s_own() -> None:
    prompts = [[1], [2, 3]]
    results = run(Toy(5, 8, prompts), Beams(3), [2, 6], eos=[])
    assert [len(best.ids) for (best,) in results] == [2, 6]


def test_the_greedy_text_costs_a_row_only_while_it_is_no_beam() -> None:
    with_it, plain = [], []
    for seed in range(30):
        for kept, read in ((True, with_it), (False, plain)):
            toy = Toy(6, seed, [[1]])
            run(toy, Beams(3, with_greedy=kept), 8, eos=[])
            read.append(toy.counts[1:])
    assert all(set(read) == {3} for read in plain)
    assert all(set(read) <= {3, 4} for read in with_it)
    assert [3] * 7 in with_it
    assert any(4 in read for read in with_it)


def test_a_greedy_text_that_can_no_longer_matter_is_given_up() -> None:
    """Two texts have ended with the second token. Texts that begin with 2, the likeliest first token, halve their
    probability with every token: they are behind at once by total probability, and after 34 tokens by probability per
    token."""

    class Behind(Toy):
        def logits(self, text: Sequence[int]) -> Tensor:
            first, lost, ends = [0.3, 0.3, 0.4], [0.01, 0.5, 0.49], [0.98, 0.01, 0.01]
            row = first if len(text) == 1 else lost if text[1] == 2 else ends
            return torch.tensor(row, dtype=torch.float64).log()

    for penalty, steps in ((0.0, 1), (1.0, 35)):
        toy = Behind(3, 0, [[1]])
        run(toy, Beams(2, length_penalty=penalty, early_stopping=True), 40)
        assert toy.counts[1:] == [2] + [1] * (steps - 1)
    toy = Behind(3, 0, [[1]])
    run(toy, Beams(1, length_penalty=0.0), 40)
    assert len(toy.counts[1:]) == 39, "one beam is followed to its end"


def test_no_token_left_is_said() -> None:
    with pytest.raises(ConfigError, match=r"request 7 has no token left to choose; loosen no_repeat_ngram"):
        run(Toy(3, 0, [[1]]), Beams(2), 6, eos=[], numbers=[7], no_repeat_ngram=1)
    (hypotheses,) = run(Toy(3, 0, [[1]]), Beams(2), 6, eos=[0], no_repeat_ngram=1)
    assert {h.ids[-1] for h in hypotheses} == {0}, "what has ended is there all the same"


class Broken(Toy):
    def logits(self, text: Sequence[int]) -> Tensor:
        return super().logits(text) * (float("nan") if len(text) == 3 else 1.0)


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(HeadwayError, match="logits for request 5 at step 2 are not numbers"):
        run(Broken(5, 0, [[1]]), Beams(2), 6, eos=[], numbers=[5])


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"width": 0}, "beams: width must be a whole number of at least 1, got 0"),
        ({"width": 2.0}, "width must be a whole number of at least 1, got 2.0"),
        ({"n_best": 0}, "n_best must be a whole number of at least 1, got 0"),
        ({"n_best": 5}, "n_best is 5, but 4 beams keep 4 texts; ask for 5 beams or more"),
        ({"length_penalty": float("nan")}, "length_penalty must lie between -10 and 10 .*got nan"),
        ({"length_penalty": 11}, "length_penalty must lie between -10 and 10"),
        ({"early_stopping": "always"}, "early_stopping is True, False or \"never\", got 'always'"),
    ],
)
def test_searches_that_cannot_be(given: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Beams(**given)  # type: ignore[arg-type]
