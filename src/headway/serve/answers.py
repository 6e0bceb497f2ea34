"""Responses to generation requests: as one body or as a stream of events, in the format of each protocol."""

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
"""An event of a stream: its name, or None, and its data."""
REASONS = {"eos": "stop", "stop": "stop", "length": "length", None: None}


@dataclass
class Written:
    """The text generated so far for one sequence: an initial text (the echoed prompt) plus its deltas, and the parts
    into which the reader divides it."""

    reader: CallReader
    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    deltas: list[Delta] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)

    def add(self, delta: Delta) -> list[Part]:
        """Adds the delta of a step; returns the parts that it completes."""
        self.text += delta.text
        self.tokens += delta.token is not None
        self.finish_reason = REASONS[delta.finish_reason]
        self.deltas.append(delta)
        parts = self.reader.push(delta.text, last=delta.finish_reason is not None)
        self.parts += parts
        return parts


class Answer(ABC):
    """The response to a request, in the format of its protocol.

    asked: the request.   texts: the sequences that are generated for it.   warnings: warnings about its fields.
    reader: makes the reader that divides a sequence into parts.   echoes: the text that precedes each sequence.
    key: a unique id.   reading: the latest progress of reading a prompt, if progress is reported.
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
        """Returns the complete response body."""

    def begin(self) -> Sequence[Event]:
        """Returns the events before the first token."""
        return ()

    @abstractmethod
    def add(self, i: int, delta: Delta) -> Sequence[Event]:
        """Adds the delta of a step to sequence i; returns the events that report it."""

    @abstractmethod
    def blank(self, i: int) -> Event:
        """Returns an event of sequence i without content."""

    def progress(self, i: int, reading: Reading) -> Event:
        """Returns the event that reports how much of the prompt of sequence i has been read."""
        self.reading, (name, data) = reading, self.blank(i)
        extra = {"prompt_progress": reading._asdict(), "timings": self.timings}
        return name, {**data, **extra}  # type: ignore[dict-item]

    def timed(self, events: Sequence[Event]) -> Sequence[Event]:
        """Returns the events, with the timings so far if the request sets `timings_per_token`."""
        if not self.asked.timings_per_token:
            return events
        timings = {"timings": self.timings}
        return [(name, data if isinstance(data, str) else data | timings) for name, data in events]

    def end(self) -> Sequence[Event]:
        """Returns the events after the last token."""
        return ()

    def fail(self, status: int, message: str) -> Sequence[Event]:
        """Returns the events that end a stream that failed."""
        return [(None, shaped(status, message))]

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; a prompt that several sequences share counts once."""
        return sum(tokens for tokens, _ in prompts_of(self.texts))

    @property
    def cached_tokens(self) -> int:
        """Number of prompt tokens that came from the prefix cache."""
        return sum(stored for _, stored in prompts_of(self.texts))

    @property
    def new_tokens(self) -> int:
        return sum(written.tokens for written in self.written)

    @property
    def timings(self) -> dict[str, float]:
        """Timings in llama.cpp's format: `prompt_*` up to the first token, `predicted_*` for the tokens after it."""
        first = max((written.deltas[0].seconds for written in self.written if written.deltas), default=0.0)
        last = max((written.deltas[-1].seconds for written in self.written if written.deltas), default=0.0)
        read, new = self.prompt_tokens - self.cached_tokens, self.new_tokens
        if self.reading is not None and not new:
            read = self.reading.processed - self.reading.cache
            first = last = self.reading.time_ms / 1e3
        steps = max(0, new - len(self.written))  # the first token of each sequence comes with its prompt
        return {
            "cache_n": self.cached_tokens,
            **_pace("prompt", read, read, first),
            **_pace("predicted", new, steps, last - first),
        }

    @property
    def vocabulary(self) -> Vocabulary:
        return self.model.lm.need_tokenizer()


def event(kind: str, **more: Any) -> Event:
    """Returns an event whose data repeats its name as `type`."""
    return kind, {"type": kind, **more}


def _pace(what: str, count: int, steps: int, seconds: float) -> dict[str, float]:
    per_step = seconds / steps if steps else 0.0
    rate = steps / seconds if steps and seconds else 0.0
    paces = {"n": count, "ms": 1e3 * seconds, "per_token_ms": 1e3 * per_step, "per_second": rate}
    return {f"{what}_{name}": value for name, value in paces.items()}


def told_tokens(vocabulary: Vocabulary, deltas: Sequence[Delta], *, drawn: bool = False) -> list[Any]:
    """Returns a record per token with its log-probability, in the format of chat completions. With `drawn`, records
    have probabilities instead, and of the likeliest tokens only those whose probability is not 0."""

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
    """Returns the text of a token; bytes that form no whole character are replaced."""
    return (vocabulary.text_bytes(token, special=True) or b"").decode(errors="replace")


@dataclass
class Block:
    """Consecutive parts of one kind.

    index: its position.   name: the function's name, if it is a call; its text is then the arguments.   key: a unique
        id.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""
    key: str = field(default_factory=lambda: uuid4().hex)


class BlockAnswer(Answer):
    """The response to a conversation, as blocks of one sequence: reasoning, text and tool calls.

    Each block is reported from its beginning to its end; a finished response has at least one."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0

    @abstractmethod
    def open(self, block: Block) -> Sequence[Event]:
        """Returns the events that begin a block."""

    @abstractmethod
    def grow(self, block: Block, more: str) -> Sequence[Event]:
        """Returns the events that add text to a block."""

    @abstractmethod
    def close(self, block: Block) -> Sequence[Event]:
        """Returns the events that end a block."""

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
            previous = self.blocks[-2:-1]
            events += [
                *(event for block in previous for event in self.close(block)),
                *self.open(self.blocks[-1]),
            ]
        block = self.blocks[-1]
        if part.kind != "call" and part.text:
            block.text += part.text
            events += self.grow(block, part.text)
        return events
