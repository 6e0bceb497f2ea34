"""Streaming parser that divides generated text into reasoning, text and tool calls.

It holds back only what may turn out to be markup: white space, the beginning of a mark, a function's name, a value
between tags, calls in notations of their own. Markup that contains no call is text."""

import re
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from headway.generate.stop import begun
from headway.serve.formats import HEADED, PYTHON_TAG, CallFormat, Reasoning, Tags
from headway.serve.notations import dumped, json_of, loaded


class Part(NamedTuple):
    """A piece of a response.

    kind: "text"; "reasoning", which precedes it; "call", the beginning of a call, whose `text` is the function's name;
        "arguments", a piece of the call's JSON.
    call: index of the call, from 0.
    """

    kind: Literal["text", "reasoning", "call", "arguments"]
    text: str
    call: int = 0


T = Generator[None, None, Any]
"""A parser that is a coroutine: it yields when it needs more text."""
SPACE, SEPARATORS, MOST = " \t\r\n", " \t\r\n,;[", 512
"""Characters around marks, and between calls; the maximum length of the head of a call."""
KEYS = ("name", "tool_name"), ("arguments", "parameters")
"""Keys under which a call that is one JSON object may name its parts."""
NAME = r"(?:functions\.)?(?P<name>[^\s\"{}<>\[\]]{1,128}?)(?::\d+)?(?:\[CALL_ID\]\w*)?(?![^\s\"{}<>\[\]])"
SPACES, BRACE = re.compile(r"\s*"), re.compile(r"\s*(?={)")
BEGINNING = re.compile(rf"\s*(?:{re.escape(PYTHON_TAG)}\s*)?(?={{)")
REST = re.compile(r"[^{}<>\[\]]*}")
STRUCTURE = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
HEADER = re.compile(
    r"\s*(?:<\|(?:end|call|return|eom|eot)\|>)?(?P<header>(?:[^<]|<\|(?:start|channel|constrain)\|>)*?)<\|message\|>"
)
RECIPIENT = re.compile(r"to=(functions\.)?([^\s<]+)")
ENDS = "<|end|>", "<|call|>", "<|return|>", "<|eom|>", "<|eot|>", "<|start|>"
THOUGHTS = "analysis", "to=self"
"""Parts of the messages of OpenAI's harmony and Muse's format: headers, recipients, ends, and what marks reasoning."""


class CallReader:
    """Divides a text into reasoning, text and calls.

    marks: marks around reasoning, which comes first.   inside: whether the text begins inside it.
    how: the format of calls; None parses none.   functions: JSON Schemas of the parameters, by function name.
    """

    def __init__(
        self,
        marks: Reasoning | None = None,
        inside: bool = False,
        how: CallFormat | None = None,
        functions: Mapping[str, Any] | None = None,
    ) -> None:
        self._functions = functions or {}
        self._held = marks.open if marks is not None and inside else ""
        self._taken, self._last, self._calls = "", False, 0
        self._parts: list[Part] = []
        self._steps = self._read(marks, how)

    def push(self, text: str, *, last: bool) -> list[Part]:
        """Adds a piece of the text; returns the parts that became certain, and after the `last` piece all that
        remain."""
        self._held, self._last, self._parts = self._held + text, last, []
        next(self._steps, None)
        return self._parts

    def _read(self, marks: Reasoning | None, how: CallFormat | None) -> T:
        frame = () if marks is None else marks.frame
        if marks in HEADED:
            yield from self._messages(how)
        elif marks is not None and (yield from self._match(_spaced(marks.open), marks.open.strip())):
            yield from self._pass_on("reasoning", [marks.close])
            yield from self._match(SPACES)
            self._taken = ""
        if how is not None and not how.marker and (yield from self._match(BEGINNING, "{", PYTHON_TAG)):
            yield from self._read_calls(how)
        begins = "" if how is None else how.marker or PYTHON_TAG
        while mark := (yield from self._pass_on("text", [*filter(None, [begins, *frame])])):
            if how is not None and mark == begins:
                yield from self._read_calls(how)

    # -- pieces of text --------------------------------------------------------------------------------

    def _emit(self, kind: Literal["text", "reasoning", "call", "arguments"], text: str) -> None:
        if kind == "call":
            self._calls, self._taken = self._calls + 1, ""
        if text:
            self._parts.append(Part(kind, text, max(0, self._calls - 1) if kind[0] in "ca" else 0))

    def _take(self, count: int) -> str:
        """Takes the next characters; `_taken` keeps them, since they become text again if they turn out not to be a
        call."""
        piece, self._held = self._held[:count], self._held[count:]
        self._taken += piece
        return piece

    def _pass_on(self, kind: Literal["text", "reasoning"], marks: Sequence[str]) -> T:
        """Emits text up to one of the marks, without the white space before it; returns the mark, or "" at the end."""
        while True:
            held = self._held
            places = ((held.find(mark), mark) for mark in marks if mark in held)
            at, mark = min(places, default=(len(held), ""))
            # held "a <tool" and the mark "<tool_call>": "a" is passed on, " <tool" is kept
            certain = held[: len(held) - begun(held, marks)].rstrip(SPACE)
            kept = 0 if mark or self._last or not marks else len(held) - len(certain)
            passed = held[:at].rstrip(SPACE) if mark else held[: at - kept]
            self._emit(kind, passed)
            self._taken, self._held = held[at : at + len(mark)], held[at + len(mark) - kept :]
            if mark or self._last:
                return mark
            yield

    def _match(self, pattern: re.Pattern[str], *begins: str) -> T:
        """Takes the match of a pattern at the current position. Returns None if there is none, or if the text begins
        with none of `begins`."""
        while True:
            match = pattern.match(self._held, 0, MOST)
            if match and (match.end() < len(self._held) or self._last):
                self._take(match.end())
                return match
            held = self._held.lstrip(SPACE)
            fits = not begins or any(held.startswith(mark) or mark.startswith(held) for mark in begins)
            if self._last or not fits or len(self._held) > MOST:
                return None
            yield

    def _until(self, mark: str) -> T:
        """Takes the text up to a mark, and the mark; returns the text, or None if the mark never comes."""
        while mark not in self._held:
            if self._last:
                return None
            yield
        piece = self._take(self._held.index(mark))
        self._take(len(mark))
        return piece

    # -- calls -----------------------------------------------------------------------------------------

    def _messages(self, how: CallFormat | None) -> T:
        """Parses messages whose headers give their channel and recipient."""
        while header := (yield from self._match(HEADER, "<|", "to=", "assistant")):
            target = RECIPIENT.search(header["header"])
            if how is not None and target is not None and (target[1] or target[2] in self._functions):
                begins = how.head[1].rpartition("<|message|>")[2]
                yield from self._match(_spaced(begins), begins[:1] or "{")
                yield from self._call(how, target[2])
            else:
                is_thought = any(mark in header["header"] for mark in THOUGHTS)
                yield from self._pass_on("reasoning" if is_thought else "text", ENDS)

    def _read_calls(self, how: CallFormat) -> T:
        """Parses calls after the marker, or at the beginning if the format has none, until something that is not a
        call."""
        read, (head, begins, close) = self._calls, _patterns(how)
        if how.calls is not None:
            for name, arguments in how.calls((yield from self._until(close)) or "", self._functions):
                self._emit("call", name)
                self._emit("arguments", arguments)
        while how.calls is None:
            if (call := (yield from self._match(head, *begins))) is None:
                if not (yield from self._object(how)):
                    break
            elif call["name"] is None or not (how.marker or call["name"] in self._functions):
                break
            else:
                yield from self._call(how, call["name"])
        if self._calls > read:
            yield from self._match(SPACES)
        else:
            self._emit("text", self._taken)

    def _call(self, how: CallFormat, name: str) -> T:
        """Parses a call after its head: arguments, as a JSON object or between tags, and what closes the call."""
        self._emit("call", name)
        if how.tags is not None:
            yield from self._tagged(how.tags, self._functions.get(name) or {})
        elif (yield from self._match(BRACE, "{")):
            yield from self._json(lambda piece: self._emit("arguments", piece))
        behind = how.head[2].strip()
        yield from self._match(REST if behind == "}" else _spaced(behind), behind[:1], ",")
        self._taken = ""

    def _tagged(self, tags: Tags, schema: Mapping[str, Any]) -> T:
        """Parses arguments one by one, and emits them as a JSON object."""
        before, properties = "{", schema.get("properties", {})
        while key := (yield from self._match(_key(tags), tags.key)):
            is_text = key["text"] is not None
            end = tags.text[1] if is_text and tags.text else tags.end_value
            if (value := (yield from self._until(end.strip()))) is None:
                break
            value = value.removesuffix("\n") if end.startswith("\n") else value
            first, last = tags.quotes
            if first and value.startswith(first) and value.endswith(last):
                value = value[len(first) : -len(last)]
            value = dumped(value) if is_text else json_of(value, properties.get(key["key"]))
            self._emit("arguments", f"{before}{dumped(key['key'])}: {value}")
            before = ", "
        self._emit("arguments", "{}" if before == "{" else "}")

    def _object(self, how: CallFormat) -> T:
        """Parses a JSON object with a name and arguments; returns whether it is a call."""
        held = self._held.lstrip(SEPARATORS)
        if not held.startswith("{"):
            return False
        self._take(len(self._held) - len(held))
        pieces: list[str] = []
        yield from self._json(pieces.append)
        call = loaded("".join(pieces)) or {}
        name, arguments = (next((call[key] for key in keys if key in call), None) for keys in KEYS)
        if not isinstance(name, str) or not name or not (how.marker or name in self._functions):
            return False
        self._emit("call", name)
        self._emit("arguments", arguments if isinstance(arguments, str) else dumped(arguments or {}))
        return True

    def _json(self, tell: Callable[[str], None]) -> T:
        """Takes a JSON object and passes it on piece by piece."""
        depth, inside = 0, False
        while True:
            end = len(self._held)
            for mark in STRUCTURE.finditer(self._held):
                if mark[0] == '"':
                    inside = not inside
                elif mark[0] == "\\" and not self._last:  # the escaped character has not come yet
                    end = mark.start()
                elif mark[0] in "{[" and not inside:
                    depth += 1
                elif mark[0] in "}]" and not inside:
                    depth -= 1
                    if depth <= 0:
                        end = mark.end()
                        break
            tell(self._take(end))
            if depth <= 0 or self._last:
                return
            yield


def _loose(text: str) -> str:
    """Returns a pattern for a piece of a format that accepts any white space or none, and any text for "{index}"."""
    pieces = map(re.escape, text.replace(":{index}", "").split())
    return r"\s*".join(re.sub(r"\\{\w+\\}", '[^<>"]*?', piece) for piece in pieces)


@lru_cache
def _spaced(mark: str) -> re.Pattern[str]:
    return re.compile(rf"\s*{_loose(mark)}\s*")


@lru_cache
def _key(tags: Tags) -> re.Pattern[str]:
    """Returns the pattern of the text before the value of an argument."""
    text = _loose(tags.text[0]) if tags.text and tags.text[0] != tags.end_key else "(?!)"
    line = r"\n?" if tags.end_key.endswith("\n") else ""
    key = rf"\s*{_loose(tags.key)}(?P<key>.{{1,256}}?)(?:(?P<text>{text})|{_loose(tags.end_key)}{line})"
    return re.compile(key, re.DOTALL)


@lru_cache
def _patterns(how: CallFormat) -> tuple[re.Pattern[str], tuple[str, ...], str]:
    """Returns the pattern of a call's head or the end of the calls, the characters with which these may begin, and the
    closing mark."""
    before, between, _ = how.head
    close = how.close.strip().lstrip("]").strip()
    last = rf"\]?\s*{re.escape(close)}" if close else r"\]" if how.close else "(?!)"
    again = f"(?={re.escape(how.marker)})" if how.marker else "(?!)"
    head = rf"{_loose(before)}\s*{NAME}\s*{_loose(between)}" + (r"\s*(?={)" if before.startswith("{") else "")
    begins = (before[:1] or "", close[:1] or "]", how.marker[:1] or "{", *"{[],;")
    return re.compile(rf"[{SEPARATORS}]*(?:(?:{last}|{again})|{head})"), begins, close
