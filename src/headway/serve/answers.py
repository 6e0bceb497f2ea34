"""What is answered to requests that ask for texts: whole, or event by event, in the shape of each protocol."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headway.generate import Delta
from headway.generate.sequences import SampledText
from headway.serve.errors import shaped
from headway.serve.served import Decoding
from headway.serve.visits import prompts_of
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


class Answer(ABC):
    """The answer to a request, in the shape of its protocol.

    warnings: what is said of the request's fields.
    """

    def __init__(self, model: Decoding, texts: Sequence[SampledText], warnings: Sequence[str] = ()) -> None:
        self.model, self.texts, self.warnings = model, texts, warnings
        self.written = [Written() for _ in texts]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """All of it."""

    def begin(self) -> Sequence[Event]:
        """Events before the first token."""
        return ()

    @abstractmethod
    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        """Takes what a step added to text i; the events that tell it."""

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


def told_token(vocabulary: Vocabulary, token: int, log_prob: float) -> dict[str, Any]:
    """A token and its log-probability, as conversations tell them."""
    spelled = vocabulary.text_bytes(token, special=True) or b""
    return {"token": spelled.decode(errors="replace"), "logprob": log_prob, "bytes": list(spelled)}


def text_of(vocabulary: Vocabulary, token: int) -> str:
    """A token as text; bytes that are no whole character are replaced."""
    return (vocabulary.text_bytes(token, special=True) or b"").decode(errors="replace")
