"""The results of a generation."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

FinishReason = Literal["stop", "length", "eos"]
TopLogProbs = tuple[tuple[int, float], ...]
"""The likeliest tokens in a place and their log probabilities, the likeliest first."""


class ToldToken(NamedTuple):
    """A token of a prompt, ln p of it after all before it (None for the first), and the likeliest in its place."""

    token: int
    log_prob: float | None
    top_log_probs: TopLogProbs


class Delta(NamedTuple):
    """One new token of one request.

    text: what became certain with it (possibly nothing; whole characters; never part of a stop string).
    finish_reason: "eos", "stop" (a stop string, or the end of a grammar) or "length" with the last delta of a request,
        else None.
    seconds: since the call began.   token: None only in the single delta of a request that gets no token.
    drafted, accepted: as in `Generation`, so far.   log_prob, top_log_probs: of this token.   prompt: in the
    first delta, the tokens of the prompt, where they are told.
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

    ids: all new tokens, an EOS included.   log_probs: of each of them, after what `constrain` changes.
    score: their sum / (number of ids) ** length_penalty; what hypotheses are ranked by.
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

    ids: all new tokens, an EOS included.   text: without EOS and stop string ("" without a tokenizer).
    seconds_to_first_token: None when there is no token, and for a beam search, where none is certain before the
        end.
    hypotheses: of a beam search, the best first; this text is the first of them. Else none.
    drafted, accepted: how many tokens drafts proposed, and how many of those became part of the text.
    log_probs: where they were asked for, ln p of each of `ids` after all before it under the model's own distribution,
        before temperature, filters, penalties and constraints: those of `score`.
    top_log_probs: and of the likeliest tokens in each place.   prompt: the same of the tokens of the prompt. They are
        empty unless asked for.
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
        """New tokens after the first, per second of decoding; None for fewer than two."""
        if self.seconds_to_first_token is None or len(self.ids) < 2:
            return None
        return (len(self.ids) - 1) / max(self.seconds - self.seconds_to_first_token, 1e-9)

    def __str__(self) -> str:
        return self.text
