"""The results of a generation."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "eos"]
TopLogProbs = tuple[tuple[int, float], ...]
"""The most likely tokens at a place and their log probabilities, the most likely first."""


class ToldToken(NamedTuple):
    """A token of the prompt, its ln p given all before it (None for the first), and the most likely tokens at its
    place."""

    token: int
    log_prob: float | None
    top_log_probs: TopLogProbs


class Delta(NamedTuple):
    """One new token of one request.

    text: what became certain with it (possibly nothing; whole characters; never part of a stop string).
    finish_reason: "eos", "stop" (a stop string, or the end of a grammar) or "length" with the last delta of a request,
        else None.
    seconds: time since the request was made.   token: None only in the single delta of a request without new tokens.
    drafted, accepted: as in `Generation`, so far.   log_prob, top_log_probs: of this token.
    prompt: in the first delta, the tokens of the prompt, if their log probabilities were requested.
    """

    request: int
    token: int | None
    text: str
    finish_reason: FinishReason | None
    seconds: float
    drafted: int = 0
    accepted: int = 0
    log_prob: float | None = None
    top_log_probs: TopLogProbs = ()
    prompt: tuple[ToldToken, ...] = ()


@dataclass(frozen=True)
class Hypothesis:
    """A finished text of a beam search.

    ids: all new tokens, including EOS.   log_probs: log probability of each, after the changes of `constrain`.
    score: their sum / (number of ids) ** length_penalty, by which hypotheses are ranked.
    text: without EOS ("" without a tokenizer).
    """

    ids: tuple[int, ...]
    log_probs: tuple[float, ...] = field(repr=False)
    score: float
    finish_reason: FinishReason
    text: str = ""


@dataclass(frozen=True)
class Generation:
    """The result of one request.

    ids: all new tokens, including EOS.   text: without EOS and stop string ("" without a tokenizer).
    seconds_to_first_token: None if there is no token, and for a beam search, where no token is certain before the end.
    hypotheses: of a beam search, the best first, which is also this result's text. Else empty.
    drafted, accepted: how many tokens drafts proposed, and how many of those became part of the text.
    log_probs: if requested, ln p of each of `ids` given all before it under the model's own distribution, before
        temperature, filters, penalties and constraints, as `score` computes it (with `drawn_log_probs`, after them).
    top_log_probs: of the most likely tokens at each place.   prompt: the same for the tokens of the prompt. Both are
        empty unless requested.
    """

    request: int
    prompt_tokens: int
    ids: list[int]
    text: str
    finish_reason: FinishReason
    seconds_to_first_token: float | None
    seconds: float = field(repr=False)
    hypotheses: tuple[Hypothesis, ...] = field(default=(), repr=False)
    drafted: int = field(default=0, repr=False)
    accepted: int = field(default=0, repr=False)
    log_probs: tuple[float, ...] = field(default=(), repr=False)
    top_log_probs: tuple[TopLogProbs, ...] = field(default=(), repr=False)
    prompt: tuple[ToldToken, ...] = field(default=(), repr=False)

    @property
    def score(self) -> float | None:
        """The score of a beam search's best hypothesis; None for any other text."""
        return self.hypotheses[0].score if self.hypotheses else None

    @property
    def tokens_per_second(self) -> float | None:
        """New tokens after the first, per second of decoding; None for fewer than two tokens."""
        if self.seconds_to_first_token is None or len(self.ids) < 2:
            return None
        return (len(self.ids) - 1) / max(self.seconds - self.seconds_to_first_token, 1e-9)

    def __str__(self) -> str:
        return self.text
