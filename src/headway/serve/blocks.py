"""Answers that are lists of blocks (reasoning, text, calls of tools), each told from its beginning to its end."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from headway.generate import Delta
from headway.serve.answers import Answer, Event, Writing
from headway.serve.markup import Part


@dataclass
class Block:
    """Parts of one kind in a row.

    index: its place.   name: of the function, of a call, whose text is its arguments.   key: a name of its own.
    """

    index: int
    kind: Literal["text", "reasoning", "call"]
    name: str = ""
    text: str = ""
    key: str = field(default_factory=lambda: uuid4().hex)


class BlockAnswer(Answer):
    """The one text of a conversation, as blocks, of which there is at least one when it has ended."""

    def __init__(self, writing: Writing, asked: Any) -> None:
        super().__init__(writing, asked)
        self.blocks: list[Block] = []
        self.key, self.reasoning_tokens = uuid4().hex, 0
        self._reader = writing.reader()

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
        parts = [part for part in self._reader.push(delta.text, last=ends) if part.text]
        if ends and not parts and not self.blocks:
            parts = [Part("text", "")]
        events = [event for part in parts for event in self._take(part)]
        self.written[i].add(delta)
        if delta.token is not None and self.blocks and self.blocks[-1].kind == "reasoning":
            self.reasoning_tokens += 1
        return [*events, *self.close(self.blocks[-1])] if ends else events

    def _take(self, part: Part) -> list[Event]:
        kind: Any = "call" if part.kind == "arguments" else part.kind
        events: list[Event] = []
        if part.kind == "call" or not self.blocks or self.blocks[-1].kind != kind:
            if self.blocks:
                events += self.close(self.blocks[-1])
            self.blocks.append(Block(len(self.blocks), kind, part.text if part.kind == "call" else ""))
            events += self.open(self.blocks[-1])
        block = self.blocks[-1]
        if part.kind != "call" and part.text:
            block.text += part.text
            events += self.grow(block, part.text)
        return events


def event(kind: str, **more: Any) -> Event:
    """An event whose data tells its name, too."""
    return kind, {"type": kind, **more}
