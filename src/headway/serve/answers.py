"""Answers to requests for texts: whole, or event by event, in the shape of each protocol."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any, Literal
from uuid import uuid4

from headway.generate import Delta
from headway.generate.sequences import SampledText
from headway.serve.errors import shaped
from headway.serve.markup import CallReader, Part
from headway.serve.served import Decoding
from headway.serve.visits import prompts_of
from headway.serve.worker import Reading
from headway.text.vocabulary import Vocabulary

Event = tuple[str | None, dict[str, Any] | str]
"""An event of a stream: its name, where it has one, and its data."""
REASONS = {"eos": "stop", "stop": "stop", "length": "length", None: None}


@dataclass
class Written:
    """A text so far: what stands before it and what its deltas added, and the parts into which these are divided."""

    reader: CallReader
    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    deltas: list[Delta] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add(self, delta: Delta) -> list[Part]:
        """Takes what a step added; the parts that became certain with it."""
        self.text += delta.text
        self.tokens += delta.token is not None
        self.finish_reason = REASONS[delta.finish_reason]
        self.deltas.append(delta)
        parts = self.reader.push(delta.text, last=delta.finish_reason is not None)
        self.parts += parts
        return parts


class Answer(ABC):
    """The answer to a request, in the shape of its protocol.

    asked: the request.   texts: those that the model writes for it.   warnings: those about its fields.
    reader: makes what divides a text into its parts.   echoes: the text before each text.
    key: a unique name.   reading: how far a prompt has been read, where that is told.
    """

    def __init__(
        self,
        asked: Any,
        model: Decoding,
        texts: Sequence[SampledText],
        warnings: Sequence[str],
        *,
        reader: Callable[[], CallReader] = CallReader,
        echoes: Sequence[str] = (),
    ) -> None:
        self.asked, self.model, self.texts, self.warnings = asked, model, texts, warnings
        self.written = [Written(reader(), echo) for echo in echoes or [""] * len(texts)]
        self.key, self.created = uuid4().hex, int(time.time())
        self.reading: Reading | None = None

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer."""

    def begin(self) -> Sequence[Event]:
        """Events before the first token."""
        return ()

    @abstractmethod
    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        """Takes what a step added to text i; the events that tell it."""

    @abstractmethod
    def blank(self, i: int) -> Event:
        """An event of text i without content."""

    def progress(self, i: int, reading: Reading) -> Event:
        """The event that tells how far the prompt of text i has been read."""
        self.reading, (name, data) = reading, self.blank(i)
        extra = {"prompt_progress": reading._asdict(), "timings": self.timings}
        return name, {**data, **extra}  # type: ignore[dict-item]

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
        """Tokens of prompts that were stored already."""
        return sum(stored for _, stored in prompts_of(self.texts))

    @property
    def new_tokens(self) -> int:
        return sum(written.tokens for written in self.written)

    @property
    def timings(self) -> dict[str, float]:
        """Times as llama.cpp's clients read them: of the prompt to the first token, and of the tokens after it."""
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


def event(kind: str, **more: Any) -> Event:
    """An event whose data tells its name, too."""
    return kind, {"type": kind, **more}


def _pace(what: str, count: int, steps: int, seconds: float) -> dict[str, float]:
    each = seconds / steps if steps else 0.0
    rate = steps / seconds if steps and seconds else 0.0
    paces = {"n": count, "ms": 1e3 * seconds, "per_token_ms": 1e3 * each, "per_second": rate}
    return {f"{what}_{name}": value for name, value in paces.items()}


def told_tokens(vocabulary: Vocabulary, deltas: Sequence[Delta], *, drawn: bool = False) -> list[Any]:
    """Tokens and their log-probabilities, as conversations tell them; `drawn`: their probabilities that are not 0."""

    def record(token: int, log_prob: float) -> dict[str, Any]:
        spelled = vocabulary.text_bytes(token, special=True) or b""
        value = {"prob": exp(log_prob)} if drawn else {"logprob": log_prob}
        return {"id": token, "token": spelled.decode(errors="replace"), **value, "bytes": list(spelled)}

    top = "top_probs" if drawn else "top_logprobs"
    return [
        record(delta.token, delta.log_prob or 0.0)
        | {top: [record(*pair) for pair in delta.top_log_probs if not drawn or exp(pair[1])]}
        for delta in deltas
        if delta.token is not None
    ]


def token_text(vocabulary: Vocabulary, token: int) -> str:
    """A token as text; bytes that are no whole character are replaced."""
    return (vocabulary.text_bytes(token, special=True) or b"").decode(errors="replace")


@dataclass
class Block:
    """Parts of one kind in a row.

    index: its place.   name: of the function, of a call, whose text is its arguments.   key: a unique name.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""
    key: str = field(default_factory=lambda: uuid4().hex)


class BlockAnswer(Answer):
    """The one text of a conversation as blocks (reasoning, text, calls of tools), each told from its beginning to its
    end; there is at least one when it has ended."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0

    @abstractmethod
    def open(self, block: Block) -> Sequence[Event]:
        """Events of a block that begins."""

    @abstractmethod
    def grow(self, block: Block, more: str) -> Sequence[Event]:
        """Events of a block that has got more text."""

    @abstractmethod
    def close(self, block: Block) -> Sequence[Event]:
        """Events of a block that has ended."""

    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        ends = delta.finish_reason is not None
        parts = [part for part in self.written[i].add(delta) if part.text]
        if ends and not parts and not self.blocks:
            parts = [Part("text", "")]
        events = [event for part in parts for event in self._take(part)]
        if delta.token is not None and self.blocks and self.blocks[-1].kind == "reasoning":
            self.reasoning_tokens += 1
        return [*events, *self.close(self.blocks[-1])] if ends else events

    def _take(self, part: Part) -> list[Event]:
        kind: Any = "call" if part.kind == "arguments" else part.kind
        events: list[Event] = []
        if part.kind == "call" or not self.blocks or self.blocks[-1].kind != kind:
            self.blocks.append(Block(len(self.blocks), kind, part.text if part.kind == "call" else ""))
            before = self.blocks[-2:-1]
            events += [
                *(event for block in before for event in self.close(block)),
                *self.open(self.blocks[-1]),
            ]
        block = self.blocks[-1]
        if part.kind != "call" and part.text:
            block.text += part.text
            events += self.grow(block, part.text)
        return events
