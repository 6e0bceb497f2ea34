"""Reads reasoning and calls of functions out of a text while it is written.

Of what comes, only that is held back which may become markup: white space, the beginning of a mark, the name of a
function, the value of a parameter that stands between tags. Markup in which there is no call is text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Literal

import orjson

from headway.serve.formats import PYTHON_TAG, CallFormat, Tags
from headway.serve.parts import Part

T = Generator[None, None, Any]
"""Steps of reading; where one yields, more of the text is needed."""
NAME = re.compile(r"(?:functions\.)?(?P<name>[^\s\"{}<>\[\]]{1,128}?)(?::\d+)?(?:\[CALL_ID\]\w*)?")
SPACE, LONGEST_NAME = " \t\r\n", 256


class CallReader:
    """Divides a text into reasoning, text and calls.

    marks: around reasoning, which stands first.   inside: whether the text begins within it.
    how: the format of calls; None reads none.   functions: the schemas of their parameters, by name.
    """

    def __init__(
        self,
        marks: tuple[str, str] | None = None,
        inside: bool = False,
        how: CallFormat | None = None,
        functions: Mapping[str, Any] | None = None,
    ) -> None:
        self._how, self._functions = how, functions or {}
        self._held, self._taken, self._last, self._calls = "", "", False, 0
        self._parts: list[Part] = []
        self._steps = self._read(marks, inside)

    def push(self, text: str, *, last: bool) -> list[Part]:
        """The parts that became certain with a piece of the text; with the `last` piece, all of them."""
        self._held, self._last, self._parts = self._held + text, last, []
        next(self._steps, None)
        return self._parts

    def _read(self, marks: tuple[str, str] | None, inside: bool) -> T:
        if marks is not None and (inside or (yield from self._meets(marks[:1]))):
            yield from self._skip(SPACE)
            yield from self._pass_on("reasoning", marks[1:])
            yield from self._skip(SPACE)
            self._taken = ""
        at_start = self._how is not None and not self._how.marker
        if at_start and (yield from self._meets(["{", PYTHON_TAG], keep=["{"])):
            yield from self._read_calls()
        marker = "" if self._how is None else self._how.marker or PYTHON_TAG
        while (yield from self._pass_on("text", [marker] if marker else [])):
            yield from self._read_calls()

    # -- pieces of text --------------------------------------------------------------------------------

    def _emit(self, kind: Literal["text", "reasoning", "call", "arguments"], text: str) -> None:
        if kind == "call":
            self._calls, self._taken = self._calls + 1, ""
        if text:
            self._parts.append(Part(kind, text, max(0, self._calls - 1) if kind[0] in "ca" else 0))

    def _take(self, count: int) -> str:
        """The next characters, which are text again if no call comes of them."""
        piece, self._held = self._held[:count], self._held[count:]
        self._taken += piece
        return piece

    def _give_back(self) -> None:
        """What was taken is text."""
        self._emit("text", self._taken)
        self._taken = ""

    def _pass_on(self, kind: Literal["text", "reasoning"], marks: Sequence[str]) -> T:
        """Passes text on until a mark comes, without white space before it; whether one came."""
        while True:
            found = [(self._held.find(mark), mark) for mark in marks if mark in self._held]
            if found:
                at, mark = min(found)
                said = self._held[:at].rstrip(SPACE)
                self._emit(kind, said)
                self._taken = self._held[len(said) : at + len(mark)]
                self._held = self._held[at + len(mark) :]
                return True
            kept = "" if self._last or not marks else _may_begin(self._held, marks)
            self._emit(kind, self._held[: len(self._held) - len(kept)])
            self._held = kept
            if self._last:
                return False
            yield

    def _skip(self, characters: str) -> T:
        """Takes these characters; the next that is another one, "" at the end."""
        while True:
            self._take(len(self._held) - len(self._held.lstrip(characters)))
            if self._held or self._last:
                return self._held[:1]
            yield

    def _meets(self, marks: Sequence[str], skipped: str = SPACE, keep: Sequence[str] = ()) -> T:
        """Whether one of these marks comes next, behind characters that are skipped, and which; it is taken, unless it
        is to be kept. Where none comes nothing is taken."""
        while True:
            rest = self._held.lstrip(skipped)
            if mark := next((one for one in marks if rest.startswith(one)), ""):
                self._take(len(self._held) - len(rest) + (0 if mark in keep else len(mark)))
                return mark
            if self._last or (rest and not any(one.startswith(rest) for one in marks)):
                return ""
            yield

    def _until(self, marks: Sequence[str], most: int | None = None, keep: bool = False) -> T:
        """Takes what stands before the first of these marks, and the mark unless it is to be kept; None where none
        comes, or not within `most` characters."""
        while True:
            found = [(self._held.find(one), one) for one in marks if one in self._held]
            if found:
                at, mark = min(found)
                if most is not None and at > most:
                    return None
                piece = self._take(at)
                self._take(0 if keep else len(mark))
                return piece
            if self._last or (most is not None and len(self._held) > most + max(map(len, marks))):
                return None
            yield

    # -- calls -----------------------------------------------------------------------------------------

    def _read_calls(self) -> T:
        """Calls, behind the marker or where they begin without; up to what is none."""
        how = self._how
        assert how is not None
        head, tail = ("", "") if how.head is None else (how.head[0].strip(), how.head[2].strip())
        close = how.close.strip().lstrip("]")
        marks = [one for one in (head, tail, how.marker, close, "{") if one]
        named = how.head is not None and head in ("", how.marker)
        mark, read = how.marker or (yield from self._skip(SPACE)), self._calls
        while True:
            if mark == how.marker and named and (yield from self._skip(SPACE)) not in ("{", "["):
                done = yield from self._named_call()
            elif mark == "{":
                done = yield from self._object_call()
            else:
                done = mark in marks and (mark != head or named or (yield from self._named_call()))
            if not done:
                break
            mark = yield from self._meets(marks, f"{SPACE},;[]", keep="{")
            if mark in ("", close):
                break
            if mark == how.marker:
                self._taken, read = mark, self._calls
        if self._calls > read:
            yield from self._skip(f"{SPACE}]" if how.close == "]" else SPACE)
            self._taken = ""
        else:
            self._give_back()

    def _named_call(self) -> T:
        """A name, and arguments behind it; whether it was one."""
        how = self._how
        assert how is not None
        assert how.head is not None
        after = how.head[1].strip()
        ends = (
            [after] if after else [one for one in ("\n", how.tags.key if how.tags else "", how.close) if one]
        )
        spelled = yield from self._until(ends, most=LONGEST_NAME, keep=not after)
        found = None if spelled is None else NAME.fullmatch(spelled.strip())
        if found is None:
            return False
        self._emit("call", found["name"])
        if how.tags is not None:
            yield from self._tagged(how.tags, self._functions.get(found["name"]) or {})
        elif (yield from self._skip(SPACE)) == "{":
            yield from self._value(lambda piece: self._emit("arguments", piece))
        self._taken = ""
        return True

    def _object_call(self) -> T:
        """A JSON object with a name and arguments; whether it was one."""
        assert self._how is not None
        self._take(1)
        name, early = "", ""
        told = False
        while (following := (yield from self._skip(f"{SPACE},"))) == '"':
            key = _loaded((yield from self._whole()))
            yield from self._skip(f"{SPACE}:")
            if key == self._how.keys[0] and not name:
                found = _loaded((yield from self._whole()))
                if not isinstance(found, str) or (not self._how.marker and found not in self._functions):
                    return False
                name = found
                self._emit("call", name)
                self._emit("arguments", early)
            elif key in (self._how.keys[1], "arguments", "parameters") and not told:
                told = True
                if self._held[:1] == '"':  # JSON within JSON
                    inner = _loaded((yield from self._whole()))
                    early = inner if isinstance(inner, str) else ""
                    self._emit("arguments", early if name else "")
                elif name:
                    yield from self._value(lambda piece: self._emit("arguments", piece))
                else:
                    early = yield from self._whole()
            else:
                yield from self._value(lambda piece: None)
        if following == "}":
            self._take(1)
        if name:
            self._emit("arguments", "" if told else "{}")
            self._taken = ""
        return bool(name)

    def _tagged(self, tags: Tags, schema: Mapping[str, Any]) -> T:
        """Arguments one by one, told as a JSON object."""
        before, properties = "{", schema.get("properties", {})
        while (yield from self._meets([tags.key])):
            key = yield from self._until([tags.end_key.strip()])
            if key is None or (tags.value and not (yield from self._meets([tags.value]))):
                break
            value = yield from self._until([tags.end_value.strip()])
            if value is None:
                break
            value = value.removeprefix("\n").removesuffix("\n")
            inner = properties.get(key.strip())
            spelled = _json_of(value, inner.get("type") if isinstance(inner, dict) else None)
            self._emit("arguments", f"{before}{orjson.dumps(key.strip()).decode()}: {spelled}")
            before = ", "
        self._emit("arguments", "{}" if before == "{" else "}")

    def _whole(self) -> T:
        """The text of the next JSON value."""
        pieces: list[str] = []
        yield from self._value(pieces.append)
        return "".join(pieces)

    def _value(self, tell: Callable[[str], None]) -> T:
        """Takes the next JSON value, and tells it piece by piece; whether it came to its end."""
        depth, inside, escaped, begun = 0, False, False, False
        while True:
            end, done = len(self._held), False
            for i, character in enumerate(self._held):
                if inside:
                    inside, escaped = escaped or character != '"', character == "\\" and not escaped
                    done = not inside and depth == 0
                elif character == '"':
                    inside = True
                elif character in "{[":
                    depth += 1
                elif character in "]}" or (depth == 0 and begun and character in f",{SPACE}"):
                    if depth == 0:  # what stands behind a number, or a word
                        end, done = i, True
                        break
                    depth -= character in "]}"
                    done = depth == 0
                begun = True
                if done:
                    end = i + 1
                    break
            tell(self._take(end))
            if done or self._last:
                return done
            yield


def _loaded(text: str) -> Any:
    """A JSON value; None where it is none."""
    try:
        return orjson.loads(text)
    except ValueError:
        return None


def _json_of(value: str, kind: Any) -> str:
    """A value that stood between tags, as JSON: as it is, unless it is text."""
    is_json = kind != "string" and (value == "null" or _loaded(value) is not None)
    return value if is_json else orjson.dumps(value).decode()


def _may_begin(text: str, marks: Sequence[str]) -> str:
    """The end of a text that may become one of the marks, with the white space before it."""
    longest = max((n for mark in marks for n in range(len(mark)) if text.endswith(mark[:n])), default=0)
    return text[len(text[: len(text) - longest].rstrip(SPACE)) :]
