"""What is answered to requests that ask for texts: whole, or event by event, in the shape of each protocol."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

from headway.generate import Delta
from headway.generate.sequences import SampledText
from headway.serve.errors import shaped
from headway.serve.markup import CallReader
from headway.serve.served import Decoding
from headway.serve.visits import prompts_of
from headway.serve.worker import Reading
from headway.text.vocabulary import Vocabulary

Event = tuple[str | None, dict[str, Any] | str]
"""Of a stream: its name, where it has one, and its data."""
REASONS = {"eos": "stop", "stop": "stop", "length": "length", None: None}


@dataclass
class Written:
    """A text so far: what its deltas have said."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.token is not None
        self.finish_reason = REASONS[delta.finish_reason]
        self.deltas.append(delta)


@dataclass(frozen=True)
class Writing:
    """The texts that answer a request, what is to be said of its fields, and what divides a text into its parts.

    echoes: what stands before each text."""

    model: Decoding
    texts: Sequence[SampledText]
    warnings: Sequence[str]
    reader: Callable[[], CallReader] = CallReader
    echoes: Sequence[str] = ()


class Answer(ABC):
    """The answer to a request, in the shape of its protocol.

    asked: the request.   reading: how far a prompt has been read, where that is told.
    """

    def __init__(self, writing: Writing, asked: Any) -> None:
        self.model, self.texts, self.warnings = writing.model, writing.texts, writing.warnings
        self.asked = asked
        self.written = [Written() for _ in self.texts]
        self.reading: Reading | None = None

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """All of it."""

    def begin(self) -> Sequence[Event]:
        """Events before the first token."""
        return ()

    @abstractmethod
    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        """Takes what a step added to text i; the events that tell it."""

    @abstractmethod
    def blank(self, i: int) -> Event:
        """An event of text i that says nothing of it."""

    def progress(self, i: int, reading: Reading) -> Event:
        """The event that tells how far the prompt of text i has been read."""
        self.reading, (name, data) = reading, self.blank(i)
        told = {"prompt_progress": reading._asdict(), "timings": self.timings}
        return name, {**data, **told}  # type: ignore[dict-item]

    def timed(self, events: Sequence[Event]) -> Sequence[Event]:
        """Events, with the times so far where these are asked for."""
        if not self.asked.timings_per_token:
            return events
        more = {"timings": self.timings}
        return [(name, data if isinstance(data, str) else data | more) for name, data in events]

    def end(self) -> Sequence[Event]:
        """Events after the last token."""
        return ()

    def fail(self, status: int, message: str) -> Sequence[Event]:
        """Events in place of the rest."""
        return [(None, shaped(status, message))]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts, each prompt counted once."""
        return sum(tokens for tokens, _ in prompts_of(self.texts))

    @property
    def cached_tokens(self) -> int:
        """Of these, those that were stored already."""
        return sum(stored for _, stored in prompts_of(self.texts))

    @property
    def new_tokens(self) -> int:
        return sum(written.tokens for written in self.written)

    @property
    def timings(self) -> dict[str, float]:
        """How long it took, as llama.cpp's clients read it: the prompt to the first token, and the tokens after it."""
        first = max((written.deltas[0].seconds for written in self.written if written.deltas), default=0.0)
        last = max((written.deltas[-1].seconds for written in self.written if written.deltas), default=0.0)
        read, new = self.prompt_tokens - self.cached_tokens, self.new_tokens
        if self.reading is not None and not new:
            read = self.reading.processed - self.reading.cache
            first = last = self.reading.time_ms / 1e3
        steps = max(0, new - len(self.written))  # the first token of a text comes with its prompt
        return {
            "cache_n": self.cached_tokens,
            **_pace("prompt", read, read, first),
            **_pace("predicted", new, steps, last - first),
        }

    @property
    def vocabulary(self) -> Vocabulary:
        return self.model.lm.need_tokenizer()


def _pace(what: str, count: int, steps: int, seconds: float) -> dict[str, float]:
    each = seconds / steps if steps else 0.0
    rate = steps / seconds if steps and seconds else 0.0
    paces = {"n": count, "ms": 1e3 * seconds, "per_token_ms": 1e3 * each, "per_second": rate}
    return {f"{what}_{name}": value for name, value in paces.items()}


def told_tokens(vocabulary: Vocabulary, deltas: Sequence[Delta], *, drawn: bool = False) -> list[Any]:
    """Tokens and their log-probabilities, as conversations tell them; `drawn`: their probabilities that are not 0."""

    def told(token: int, log_prob: float) -> dict[str, Any]:
        spelled = vocabulary.text_bytes(token, special=True) or b""
        value = {"prob": exp(log_prob)} if drawn else {"logprob": log_prob}
        return {"id": token, "token": spelled.decode(errors="replace"), **value, "bytes": list(spelled)}

    top = "top_probs" if drawn else "top_logprobs"
    return [
        told(delta.token, delta.log_prob or 0.0)
        | {top: [told(*pair) for pair in delta.top_log_probs if not drawn or exp(pair[1])]}
        for delta in deltas
        if delta.token is not None
    ]


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """A token as text; bytes that are no whole character are replaced."""
    return (vocabulary.text_bytes(token, special=True) or b"").decode(errors="replace")
