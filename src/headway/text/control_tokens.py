"""Control tokens of a conversation come from its template, never from a message.

A message's text may contain what looks like a control token, and the template decides the order of everything. So the
first character of each such place in a message is replaced by an unguessable escape; after rendering, what still
matches a control token was written by the template and becomes a stand-in token of a private copy of the tokenizer, in
which real control tokens are plain text.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend


class ControlTokens:
    """`specials`: the control tokens, name -> id."""

    def __init__(self, backend: Backend, specials: Mapping[str, int]) -> None:
        self._ids = dict(specials)
        self._key = f"hw{secrets.token_hex(8)}"
        names = sorted(specials, key=len, reverse=True)
        self._controls = re.compile("|".join(map(re.escape, names)) if names else r"(?!)")
        self._backend = Backend.from_str(backend.to_str())
        self._backend.encode_special_tokens = True
        added = backend.get_added_tokens_decoder()
        stand_ins = {i: f"{self._key}#{i};" for i in specials.values()}
        self._backend.add_tokens(
            [AddedToken(name, special=False, normalized=False, lstrip=added[i].lstrip, rstrip=added[i].rstrip)
             for i, name in stand_ins.items()]
        )  # fmt: skip
        self._real = {int(self._backend.token_to_id(name) or 0): i for i, name in stand_ins.items()}

    def cover(self, value: Any) -> Any:
        """The same messages, in which no string holds a control token."""
        if isinstance(value, str):
            places = re.finditer(f"(?={self._controls.pattern})", value) if self._ids else ()
            for at in sorted((m.start() for m in places), reverse=True):
                value = f"{value[:at]}{self._key}{ord(value[at]):x};{value[at + 1 :]}"
            return value
        if isinstance(value, dict):
            return {k: self.cover(v) for k, v in value.items()}
        return [self.cover(v) for v in value] if isinstance(value, (list, tuple)) else value

    def ids(self, text: str) -> list[int]:
        """Ids of what the template made of covered messages."""
        text = self._controls.sub(lambda m: f"{self._key}#{self._ids[m[0]]};", text)
        text = re.sub(rf"{self._key}([0-9a-f]+);", lambda m: chr(int(m[1], 16)), text)
        return [self._real.get(i, i) for i in self._backend.encode(text, add_special_tokens=False).ids]
