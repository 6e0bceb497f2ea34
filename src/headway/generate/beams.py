"""Beam search: the texts of the highest score, looked for breadth first.

After every step the `width` best unfinished texts of each prompt go on. A text y of n new tokens, an EOS included,
has the score

    score(y) = sum_i log p(y_i | prompt, y_<i) / n ** length_penalty

which is that of `transformers` for decoders and encoder-decoders alike. (Wu et al. 2016, section 7, equation 14,
divide by ((5 + n) / 6) ** length_penalty instead.) Ties go to the better parent, then to the smaller id.

Legend: P prompts, R rows (the live texts of all prompts), V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.generate.constraints import Text, TokenConstraints
from headway.generate.results import Hypothesis, Reason
from headway.generate.sampling import TopK, check_logits

MOST_PENALTY = 10  # lengths to this power are still numbers


class Steps(Protocol):
    """A model as a search sees it: R texts that grow together."""

    def step(self, ids: Tensor) -> Tensor:
        """Each row goes on by its ids [R, T]; logits [R, V] of the token after them."""
        ...

    def reorder(self, rows: Sequence[int]) -> None:
        """Row i becomes what row rows[i] was; there may be more rows or fewer than before."""
        ...


@dataclass(frozen=True)
class Beams:
    """How to search.

    width: texts of a prompt that go on after each step, and finished ones that are kept. 1 is greedy.
    length_penalty: the exponent in the score. 0 ranks by probability; more favours long texts, less short ones.
    early_stopping: when `width` texts have finished, stop at once (True), or when the best text in progress could
        not improve on the worst of them: if it ended now (False: a heuristic for length_penalty > 0, where longer
        texts may still score higher), or at whichever length serves it best ("never": certain).
    n_best: hypotheses that are returned, at most `width`.
    with_greedy: follow the greedy text as well when it leaves the beams, so that no score is below greedy's. False
        is the plain algorithm, which may miss it.
    min_new_tokens, no_repeat_ngram, forced_first, forced_last: see `TokenConstraints`.
    Raises ConfigError for values outside their range, naming them.
    """

    width: int = 4
    _: KW_ONLY
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    n_best: int = 1
    with_greedy: bool = True
    min_new_tokens: int = 0
    no_repeat_ngram: int = 0
    forced_first: int | None = None
    forced_last: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("width", 1), ("n_best", 1), ("min_new_tokens", 0), ("no_repeat_ngram", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"beams: {name} must be a whole number, {least} or more, got {value!r}")
        if self.n_best > self.width:
            raise ConfigError(
                f"beams: n_best is {self.n_best}, but {self.width} beams keep {self.width} texts; "
                f"ask for {self.n_best} beams or more"
            )
        if not abs(self.length_penalty) <= MOST_PENALTY:
            raise ConfigError(
                f"beams: length_penalty must lie between -{MOST_PENALTY} and {MOST_PENALTY} (0 ranks by "
                f"probability), got {self.length_penalty}"
            )
        if self.early_stopping not in (True, False, "never"):
            raise ConfigError(f'beams: early_stopping is True, False or "never", got {self.early_stopping!r}')

    def score(self, log_prob: float, length: int) -> float:
        """The score of `length` tokens whose log probabilities sum to `log_prob`; 0 for no tokens."""
        return log_prob / length**self.length_penalty if length else 0.0


def search(
    model: Steps,
    logits: Tensor,
    prompts: Sequence[Sequence[int]],
    beams: Beams,
    *,
    room: Sequence[int],
    eos: Sequence[int] = (),
    forbidden: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    requests: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """The hypotheses of each prompt, the best first: `n_best`, or fewer where there are not so many texts.

    Args:
        model: has read the prompts, one row each; its rows are the search's from here on.
        logits: [P, V], of the token after each prompt.
        prompts: their ids. An encoder-decoder's are what its target begins with.
        room: how many new tokens each may get, 1 or more.
        eos, forbidden, repetition_penalty: see `TokenConstraints`.
        requests: numbers of the prompts, for errors; 0, 1, ... unless given.
    Raises HeadwayError for logits that are no numbers, ConfigError when the rules leave no token to choose.
    """
    rules = TokenConstraints(
        eos=frozenset(eos),
        forbidden=tuple(forbidden),
        repetition_penalty=repetition_penalty,
        no_repeat_ngram=beams.no_repeat_ngram,
        min_new_tokens=beams.min_new_tokens,
        forced_first=beams.forced_first,
        forced_last=beams.forced_last,
    )
    numbers = range(len(prompts)) if requests is None else requests
    every = [_Search(*given, beams, rules.eos) for given in zip(numbers, prompts, room, strict=True)]
    live = every
    while True:
        _advance(logits, live, rules)
        live = [one for one in live if one.beams]
        if not live:
            return [one.best() for one in every]
        rows = [beam.row for one in live for beam in one.beams]
        if rows != list(range(len(logits))):
            model.reorder(rows)
        last = [[beam.ids[-1]] for one in live for beam in one.beams]
        logits = model.step(torch.tensor(last, device=logits.device))


def _advance(logits: Tensor, live: Sequence[_Search], rules: TokenConstraints) -> None:
    """Gives every search its next tokens. logits: [R, V], the beams of the searches in their order."""
    texts = [Text(one.prompt, beam.ids, one.room) for one in live for beam in one.beams]
    check_logits(logits, [(one.request, len(beam.ids)) for one in live for beam in one.beams])
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = rules(wide.log_softmax(-1), texts)
    # of each row as many as can be among the best `width` that go on: `width`, and every EOS
    count = min(live[0].how.width + len(rules.eos), log_probs.shape[-1])
    values, ids = _largest(log_probs, count)
    found = [
        [(token, value) for token, value in zip(*pair, strict=True) if value > float("-inf")]
        for pair in zip(ids.tolist(), values.tolist(), strict=True)
    ]
    first = 0
    for one in live:
        choice, end = None, first + len(one.beams)
        if one.greedy is not None:
            at = first + one.beams.index(one.greedy)
            token = int(rules(wide[at : at + 1], texts[at : at + 1]).argmax())
            choice = token, float(log_probs[at, token])
        one.advance(first, found[first:end], choice)
        first = end


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their ids; of equals the smaller ids, which `topk` does not promise."""
    top = values.topk(count)
    if bool(((values >= top.values[:, -1:]).sum(-1) > count).any()):
        top = TopK(count)(values, values).topk(count)
    return top.values, top.indices


@dataclass(frozen=True, eq=False)
class _Beam:
    """A text in progress. `row`: of the last step's logits, from which its last token comes."""

    row: int
    ids: tuple[int, ...] = ()
    log_probs: tuple[float, ...] = ()
    total: float = 0.0

    def then(self, row: int, token: int, log_prob: float) -> _Beam:
        return _Beam(row, (*self.ids, token), (*self.log_probs, log_prob), self.total + log_prob)


class _Search:
    """The search of one prompt.

    running: the best unfinished texts, until none of them can matter.   greedy: the greedy text while it is
    followed and unfinished.   beams: both, each text once; a row of the model each.
    """

    def __init__(
        self, request: int, prompt: Sequence[int], room: int, how: Beams, eos: frozenset[int]
    ) -> None:
        self.request, self.prompt, self.room, self.how, self.eos = request, prompt, room, how, eos
        start = _Beam(0)
        self.beams = [start]
        self.running = [start] if how.width > 1 else []
        self.greedy = start if how.with_greedy or how.width == 1 else None
        self.finished: list[Hypothesis] = []
        self.greedy_text: Hypothesis | None = None

    def advance(
        self, first: int, found: Sequence[Sequence[tuple[int, float]]], choice: tuple[int, float] | None
    ) -> None:
        """One token more.

        first: the row of the logits that is the first of this search.   found: tokens that may follow each of
        its beams, and their log probabilities.   choice: what follows the greedy text.
        """
        width = self.how.width
        greedy = None
        if self.greedy is not None and choice is not None and choice[1] > float("-inf"):
            greedy = self.greedy.then(first + self.beams.index(self.greedy), *choice)
        grown = [
            beam.then(first + i, *pair)
            for i, (beam, pairs) in enumerate(zip(self.running, found, strict=False))
            for pair in pairs
        ]
        grown.sort(key=lambda beam: (-beam.total, beam.row, beam.ids[-1]))
        self.finished += [self._hypothesis(beam) for beam in grown[:width] if self._ends(beam)]
        self.finished.sort(key=lambda text: -text.score)
        del self.finished[width:]
        self.running = [beam for beam in grown if not self._ends(beam)][:width]
        if self.running and self._settled(self.running[0]):
            self.running = []
        if greedy is not None and self._ends(greedy):
            self.greedy_text, greedy = self._hypothesis(greedy), None
        elif greedy is not None:
            greedy = self._followed(greedy)
        self.greedy = greedy
        alone = [] if greedy is None or greedy in self.running else [greedy]
        self.beams = self.running + alone
        if not (self.beams or self.finished or self.greedy_text):
            raise ConfigError(
                f"beams: request {self.request} has no token left to choose; "
                "loosen no_repeat_ngram, forbidden or min_new_tokens"
            )

    def best(self) -> list[Hypothesis]:
        """What is returned; the greedy text among the rest, if it was followed to its end."""
        texts = list(self.finished)
        if self.greedy_text is not None and all(self.greedy_text.ids != text.ids for text in texts):
            texts.append(self.greedy_text)
        return sorted(texts, key=lambda text: -text.score)[: self.how.n_best]

    def _ends(self, beam: _Beam) -> bool:
        return beam.ids[-1] in self.eos or len(beam.ids) == self.room

    def _hypothesis(self, beam: _Beam) -> Hypothesis:
        reason: Reason = "eos" if beam.ids[-1] in self.eos else "length"
        return Hypothesis(beam.ids, beam.log_probs, self.how.score(beam.total, len(beam.ids)), reason)

    def _settled(self, best: _Beam) -> bool:
        """Whether the texts in progress, of which `best` is the best, no longer matter."""
        if len(self.finished) < self.how.width:
            return False
        if self.how.early_stopping is True:
            return True
        ahead = self._highest(best) if self.how.early_stopping == "never" else self._now(best)
        return ahead <= self.finished[-1].score

    def _followed(self, greedy: _Beam) -> _Beam | None:
        """The greedy text as one of the beams, if it is one; None when it can no longer be among the best."""
        for beam in self.running:
            if (beam.row, beam.ids[-1]) == (greedy.row, greedy.ids[-1]):
                return beam
        enough = not self.running and len(self.finished) >= self.how.n_best
        hopeless = enough and self._highest(greedy) <= self.finished[self.how.n_best - 1].score
        return None if hopeless else greedy

    def _now(self, beam: _Beam) -> float:
        return self.how.score(beam.total, len(beam.ids))

    def _highest(self, beam: _Beam) -> float:
        """The most that a text that goes on from `beam` can score: log probabilities are never positive."""
        return self.how.score(beam.total, self.room if self.how.length_penalty > 0 else len(beam.ids))
