"""What an answer is made of: text, reasoning, and calls of tools, read from a text while it is written."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol


class Part(NamedTuple):
    """A piece of an answer.

    kind: "text"; "reasoning", which stands before it; "call", the beginning of a call, whose `text` is the name of the
        function; "arguments", a piece of the call's JSON.
    call: the number of the call, from 0.
    """

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str
    call: int = 0


class PartReader(Protocol):
    """Divides a text that is being written into its parts."""

    def push(self, text: str, *, last: bool) -> list[Part]:
        """The parts that became certain with a piece of the text; with the `last` piece, all of them."""


class PlainReader:
    """All of it is text."""

    def push(self, text: str, *, last: bool) -> list[Part]:
        return [Part("text", text)] if text else []
