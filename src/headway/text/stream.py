"""Decoding one token at a time, never breaking a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from headway.text.byte_table import ByteTable


class Decodes(Protocol):
    """What a StreamDecoder needs to know of a tokenizer."""

    def text_bytes(self, token: int, *, special: bool) -> bytes | None: ...

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str: ...

    @property
    def table(self) -> ByteTable | None: ...


class StreamDecoder:
    """Text of a growing token sequence.

    Law: `"".join(push(i) for i in ids) + flush() == tokenizer.decode(ids)`, and no delta ends inside a
    character: bytes that may still become one are kept until the next tokens (or `flush`) decide.

    `after`: tokens before the stream (a prompt). Nothing of them is emitted; they decide
    whether a SentencePiece tokenizer's leading space belongs to the text.
    `special`: show special tokens (BOS, EOS, chat markers) as text; by default they contribute nothing.
    """

    def __init__(self, tokenizer: Decodes, *, after: Sequence[int] = (), special: bool = False) -> None:
        self._of_bytes = tokenizer.table is not None
        self._push = self._bytes_pusher(tokenizer, after, special) if self._of_bytes else None
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # window[:read] is already emitted; it stays because joining rules look at the token before
        self._window, self._read = list(after)[-4:], len(list(after)[-4:])

    def push(self, token: int) -> str:
        """The text that becomes certain with this token; often empty, sometimes several characters."""
        if self._push is not None:
            return self._utf8.decode(self._push(token))
        self._window.append(token)
        return self._advance(final=False)

    def flush(self) -> str:
        """The bytes that were kept and never became a character, as U+FFFD. The stream is then at its
        end."""
        if self._of_bytes:
            return self._utf8.decode(b"", final=True)
        return self._advance(final=True)

    def _bytes_pusher(
        self, tokenizer: Decodes, after: Sequence[int], special: bool
    ) -> Callable[[int], bytes]:
        table = tokenizer.table
        assert table is not None
        begun = any(tokenizer.text_bytes(i, special=special) for i in after)
        strip = table.strips_space and not begun

        def push(token: int) -> bytes:
            nonlocal strip
            piece = tokenizer.text_bytes(token, special=special) or b""
            if strip and piece:
                strip = False
                return piece.removeprefix(b" ")
            return piece

        return push

    def _advance(self, *, final: bool) -> str:
        before = self._tokenizer.decode(self._window[: self._read], special=self._special)
        whole = self._tokenizer.decode(self._window, special=self._special)
        if not final and whole.endswith("\ufffd"):
            return ""
        self._window, self._read = self._window[-4:], len(self._window[-4:])
        return whole[len(before) :]
