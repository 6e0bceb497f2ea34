"""Beam search: a breadth-first search for the hypotheses of the highest score.

After every step the `width` best unfinished hypotheses of each prompt continue. A hypothesis y of n new tokens, EOS
included, has the score

    score(y) = sum_i log p(y_i | prompt, y_<i) / n ** length_penalty

like that of `transformers`, for decoders and encoder-decoders alike. (Wu et al. 2016, section 7, equation 14, divide by
((5 + n) / 6) ** length_penalty instead.) Ties go to the better parent, then to the smaller id.

Legend: P prompts, R rows (the unfinished hypotheses of all prompts), V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.cache import PagePool
from headway.errors import ConfigError
from headway.generate.config import Beams
from headway.generate.constraints import Text, constrain
from headway.generate.requests import Request
from headway.generate.results import FinishReason, Hypothesis
from headway.generate.sampling import top_k
from headway.generate.sequences import Job


def expand_beams(logits: Tensor, searches: "Sequence[BeamSearch]") -> None:
    """Advances every search by one token. logits: [R, V], for the beams of the searches in order; all requests must
    have equal configs."""
    config, how = searches[0].request.config, searches[0].how
    texts = [beam for search in searches for beam in search.beams]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = constrain(wide.log_softmax(-1), texts, config)
    # the candidates of a row that can be among the best `width` to continue: `width`, and every EOS
    count = min(how.width + len(set(config.eos)), log_probs.shape[-1])
    values, ids = _largest(log_probs, count)
    rows = zip(ids.tolist(), values.tolist(), strict=True)
    options = [[(i, value) for i, value in zip(*row, strict=True) if value > float("-inf")] for row in rows]
    begin = 0
    for search in searches:
        choice, end = None, begin + len(search.beams)
        if search.greedy is not None:
            at = begin + search.beams.index(search.greedy)
            token = int(constrain(wide[at : at + 1], texts[at : at + 1], config).argmax())
            choice = token, float(log_probs[at, token])
        search.advance(options[begin:end], choice)
        begin = end


def _largest(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Returns the `count` largest values of each row and their ids; ties go to smaller ids, which `topk` does not
    guarantee."""
    top = values.topk(count)
    if bool(((values >= top.values[:, -1:]).sum(-1) > count).any()):
        top = top_k(values, count).topk(count)
    return top.values, top.indices


@dataclass(eq=False)
class _Beam(Text):
    """An unfinished hypothesis. `row`: index of the beam of the last step that it continues."""

    row: int = 0
    log_probs: tuple[float, ...] = ()
    total: float = 0.0

    def then(self, row: int, token: int, log_prob: float) -> "_Beam":
        ids, log_probs = [*self.ids, token], (*self.log_probs, log_prob)
        return _Beam(self.request, ids, row=row, log_probs=log_probs, total=self.total + log_prob)


class BeamSearch(Job):
    """The beam search of one request.

    running: the best unfinished hypotheses; empty once none of them can enter the result.
    greedy: the greedy hypothesis while it is followed and unfinished.
    beams: both of them, without duplicates.
    """

    def __init__(self, request: Request, how: Beams) -> None:
        self.how, start = how, _Beam(request, [])
        self.beams = [start]
        super().__init__(request, self.beams)
        self.running = [start] if how.width > 1 else []
        self.greedy = start if how.with_greedy or how.width == 1 else None
        self.finished: list[Hypothesis] = []
        self.greedy_text: Hypothesis | None = None

    def advance(
        self, options: Sequence[Sequence[tuple[int, float]]], choice: tuple[int, float] | None
    ) -> None:
        """Adds one token to each hypothesis.

        options: candidate tokens for each of the beams, with their log probabilities.
        choice: the greedy hypothesis's next token and its log probability.
        """
        width, greedy = self.how.width, None
        self.count += 1
        if self.greedy is not None and choice is not None and choice[1] > float("-inf"):
            greedy = self.greedy.then(self.beams.index(self.greedy), *choice)
        beams = enumerate(zip(self.running, options, strict=False))
        grown = [beam.then(i, *candidate) for i, (beam, candidates) in beams for candidate in candidates]
        grown.sort(key=lambda beam: (-beam.total, beam.row, beam.ids[-1]))
        self.finished += [self._hypothesis(beam) for beam in grown[:width] if self._ends(beam)]
        self.finished.sort(key=lambda text: -text.score)
        del self.finished[width:]
        self.running = [beam for beam in grown if not self._ends(beam)][:width]
        if self.running and self._is_done(self.running[0]):
            self.running = []
        if greedy is not None and self._ends(greedy):
            self.greedy_text, greedy = self._hypothesis(greedy), None
        elif greedy is not None:
            greedy = self._follow(greedy)
        self.greedy = greedy
        separate = [] if greedy is None or greedy in self.running else [greedy]
        self.beams = self.running + separate
        self.goes_on = bool(self.beams)
        if not (self.beams or self.finished or self.greedy_text):
            number, hint = self.request.number, "loosen no_repeat_ngram, forbidden or min_new_tokens"
            self.fail(ConfigError(f"beams: request {number} has no token left to choose; {hint}"))

    def fail(self, error: BaseException) -> None:
        """Ends the search with this error."""
        super().fail(error)
        self.beams, self.running, self.greedy = [], [], None

    def store(self, pool: PagePool) -> None:
        """Assigns pages to the beams: the first that continues a stored sequence takes over its pages, the others fork
        them."""
        used: set[int] = set()
        for beam in self.beams:
            table = self.texts[beam.row].table
            assert table is not None
            beam.table = pool.fork(table) if beam.row in used else table
            used.add(beam.row)
        for i, text in enumerate(self.texts):
            if i not in used and text.table is not None:
                pool.close(text.table)
        self.texts = self.beams

    def best(self) -> tuple[Hypothesis, ...]:
        """Returns the `n_best` best hypotheses, among them the greedy one if it was followed to its end."""
        hypotheses = list(self.finished)
        if self.greedy_text is not None and all(self.greedy_text.ids != text.ids for text in hypotheses):
            hypotheses.append(self.greedy_text)
        return tuple(sorted(hypotheses, key=lambda text: -text.score)[: self.how.n_best])

    def _ends(self, beam: _Beam) -> bool:
        return beam.ids[-1] in self.request.config.eos or len(beam.ids) == self.request.max_new_tokens

    def _hypothesis(self, beam: _Beam) -> Hypothesis:
        reason: FinishReason = "eos" if beam.ids[-1] in self.request.config.eos else "length"
        return Hypothesis(tuple(beam.ids), beam.log_probs, self.how.score(beam.total, len(beam.ids)), reason)

    def _is_done(self, best: _Beam) -> bool:
        """Returns whether the search may stop, as `early_stopping` defines it; `best` is the best unfinished
        hypothesis."""
        if len(self.finished) < self.how.width:
            return False
        if self.how.early_stopping is True:
            return True
        certain = self.how.early_stopping == "never"
        attainable = self._highest(best) if certain else self.how.score(best.total, len(best.ids))
        return attainable <= self.finished[-1].score

    def _follow(self, greedy: _Beam) -> _Beam | None:
        """Returns the greedy hypothesis, as one of the beams if it is one; None if it can no longer be among the
        best."""
        for beam in self.running:
            if (beam.row, beam.ids[-1]) == (greedy.row, greedy.ids[-1]):
                return beam
        enough = not self.running and len(self.finished) >= self.how.n_best
        hopeless = enough and self._highest(greedy) <= self.finished[self.how.n_best - 1].score
        return None if hopeless else greedy

    def _highest(self, beam: _Beam) -> float:
        """Returns the highest score that a continuation of `beam` can reach: log probabilities are never positive."""
        longest = self.request.max_new_tokens if self.how.length_penalty > 0 else len(beam.ids)
        return self.how.score(beam.total, longest)
