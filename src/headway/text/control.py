"""Ids of what a chat template wrote, in which control tokens are the template's alone."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.text.sentencepiece import OUTER_SPACES


class ControlTokens:
    """Control tokens of a conversation come from its template, never from a message.

    A message's text may contain what looks like a control token, and the template decides the order of everything. So
    the first character of each such place in a message is replaced by an unguessable escape ("</s>" becomes
    "KEY3c;/s>", where 3c is "<" in hexadecimal); after rendering, what still matches a control token was written by
    the template and becomes a stand-in token of a private copy of the tokenizer, in which real control tokens are
    plain text.

    `specials`: the control tokens, name -> id.
    """

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
        self._settings = json.loads(self._backend.to_str())
        self._edges: dict[tuple[bool, bool], Backend] = {}

    def cover(self, value: Any) -> Any:
        """The same messages, in which no string holds a control token."""
        if isinstance(value, str):
            places = re.finditer(f"(?={self._controls.pattern})", value) if self._ids else ()
            for at in sorted((m.start() for m in places), reverse=True):
                value = f"{value[:at]}{self._key}{ord(value[at]):x};{value[at + 1 :]}"
            return value
        if isinstance(value, dict):
            return type(value)((self.cover(k), self.cover(v)) for k, v in value.items())
        return [self.cover(v) for v in value] if isinstance(value, (list, tuple)) else value

    def encode(self, pieces: Sequence[str], *, goes_on: bool = False) -> list[list[int]]:
        """Ids of each of the consecutive pieces of what the template made of covered messages; every second is an
        answer, and `goes_on` says that another will follow. A token never straddles two pieces.

        Where text goes on with text, the tokenizer puts no space of its own between, and takes none away. Behind a
        control token a piece is encoded as the whole would be. What stands before an answer does not depend on it.
        """
        stood_in = self._controls.sub
        texts = [stood_in(lambda m: f"{self._key}#{self._ids[m[0]]};", piece) for piece in pieces]
        rows, last = [], None
        for k, text in enumerate(texts):
            end = re.search(rf"{self._key}#\d+;\Z", text)
            behind = next((t for t in texts[k + 1 :] if t), "")
            answered = k % 2 == 0 and (k + 1 < len(texts) or goes_on)
            open_end = not end and (answered or (behind != "" and not behind.startswith(f"{self._key}#")))
            text = re.sub(rf"{self._key}([0-9a-f]+);", lambda m: chr(int(m[1], 16)), text)
            row = self._encoded(f"{last or ''}{text}", last == "", open_end)
            rows.append([self._real.get(i, i) for i in (row[1:] if last else row)])
            if text:
                last = end[0] if end else ""
        return rows

    def _encoded(self, text: str, continues: bool, goes_on: bool) -> list[int]:
        """`continues`: other text stands right before; `goes_on`: and right behind."""

        def ids(before: bool, behind: bool) -> list[int]:
            tokens: list[int] = self._edge(before, behind).encode(text, add_special_tokens=False).ids
            return tokens

        whole = ids(False, False)
        if self._edge(continues, goes_on) is self._backend:
            return whole
        controls = [i for i, token in enumerate(whole) if token in self._real]
        if not controls:
            return ids(continues, goes_on)
        head, tail = ids(continues, False), ids(False, goes_on)
        first = next(i for i, token in enumerate(head) if token in self._real)
        rest = next(i for i, token in enumerate(reversed(tail)) if token in self._real)
        return head[:first] + whole[controls[0] : controls[-1] + 1] + tail[len(tail) - rest :]

    def _edge(self, continues: bool, goes_on: bool) -> Backend:
        """The tokenizer, for a text that is part of a longer one."""
        if (continues, goes_on) not in self._edges:
            steps = {key: self._settings[key] for key in ("normalizer", "pre_tokenizer")}
            changed = {key: _inside(step, continues, goes_on) for key, step in steps.items()}
            backend = self._backend
            if changed != steps:
                backend = Backend.from_str(json.dumps(self._settings | changed))
                backend.encode_special_tokens = True
            self._edges[continues, goes_on] = backend
        return self._edges[continues, goes_on]


def _inside(step: Any, continues: bool, goes_on: bool) -> Any:
    """A normaliser or pre-tokenizer that adds and takes away no space where a text continues another, or goes on."""
    match step:
        case {"type": "Prepend"} if continues:
            return None
        case {"type": "Metaspace"} if continues:
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"} if continues:
            return {**step, "add_prefix_space": False}
        case {"type": "Strip", "strip_left": left, "strip_right": right}:
            return {**step, "strip_left": left and not continues, "strip_right": right and not goes_on}
        case {"type": "Replace", "pattern": {"Regex": pattern}} if pattern == OUTER_SPACES:
            sides = [
                side
                for side, inner in zip(OUTER_SPACES.split("|"), (continues, goes_on), strict=True)
                if not inner
            ]
            return {**step, "pattern": {"Regex": "|".join(sides)}} if sides else None
        case {"type": "Sequence"}:
            key = "normalizers" if "normalizers" in step else "pretokenizers"
            inner = [_inside(part, continues, goes_on) for part in step[key]]
            return {**step, key: [part for part in inner if part is not None]}
    return step
