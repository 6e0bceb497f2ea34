"""Encodes rendered conversations so that control tokens can come from the chat template only."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from headway.text.sentencepiece import OUTER_SPACES


class ControlTokens:
    """Encodes conversations whose control tokens come from the chat template, never from a message.

    A message's text may contain what looks like a control token, and the template decides the order of everything. So
    the first character of each such place in a message is replaced by an unguessable escape ("</s>" becomes
    "KEY3c;/s>", where 3c is "<" in hexadecimal). After rendering, everything that still matches a control token was
    written by the template; it is replaced by a stand-in token of a private copy of the tokenizer, in which the real
    control tokens are plain text.

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
        """Returns the same value (messages, say) with control tokens escaped in all of its strings."""
        if isinstance(value, str):
            places = re.finditer(f"(?={self._controls.pattern})", value) if self._ids else ()
            for at in sorted((m.start() for m in places), reverse=True):
                value = f"{value[:at]}{self._key}{ord(value[at]):x};{value[at + 1 :]}"
            return value
        if isinstance(value, dict):
            return type(value)((self.cover(k), self.cover(v)) for k, v in value.items())
        return [self.cover(v) for v in value] if isinstance(value, (list, tuple)) else value

    def encode(self, pieces: Sequence[str], *, goes_on: bool = False) -> list[list[int]]:
        """Returns the ids of consecutive pieces of what the template wrote for covered messages; every second piece is
        an answer.

        `goes_on`: an answer will follow the last piece. No token straddles two pieces. Where text continues with text,
        the tokenizer adds no space of its own between them, and removes none. After a control token a piece is encoded
        as it would be in the whole text. The ids before an answer do not depend on the answer.
        """
        substitute = self._controls.sub
        texts = [substitute(lambda m: f"{self._key}#{self._ids[m[0]]};", piece) for piece in pieces]
        rows, last_control = [], None
        for k, text in enumerate(texts):
            end = re.search(rf"{self._key}#\d+;\Z", text)
            following = next((t for t in texts[k + 1 :] if t), "")
            answered = k % 2 == 0 and (k + 1 < len(texts) or goes_on)
            open_end = not end and (
                answered or (following != "" and not following.startswith(f"{self._key}#"))
            )
            text = re.sub(rf"{self._key}([0-9a-f]+);", lambda m: chr(int(m[1], 16)), text)
            row = self._encoded(f"{last_control or ''}{text}", last_control == "", open_end)
            rows.append([self._real.get(i, i) for i in (row[1:] if last_control else row)])
            if text:
                last_control = end[0] if end else ""
        return rows

    def _encoded(self, text: str, continues: bool, goes_on: bool) -> list[int]:
        """Returns the ids of a text. `continues`: other text stands directly before it; `goes_on`: directly after
        it."""

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
        tail_length = next(i for i, token in enumerate(reversed(tail)) if token in self._real)
        # the text before the first control token continues, that behind the last is open; between them `whole` holds
        return head[:first] + whole[controls[0] : controls[-1] + 1] + tail[len(tail) - tail_length :]

    def _edge(self, continues: bool, goes_on: bool) -> Backend:
        """Returns the tokenizer for a text with other text before (`continues`) or after it (`goes_on`)."""
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
    """Returns a normalizer or pre-tokenizer that neither adds nor removes spaces where a text is continued; None if
    nothing is left."""
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
