"""A fault: a place in a file, its old text and its new text."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fault:
    """Replaces the bytes `old` from `start` to `end` of `file` by `new`. `line` counts from 1; `operator` is the kind
    of change; `id` stays the same as long as the line's text does."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    operator: str
    id: str

    @property
    def of_kernels(self) -> bool:
        return not self.file.endswith(".py")

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.file}:{self.line}  {self.operator}: {old or '(nothing)'} -> {new or '(nothing)'}"


def fault(file: str, source: bytes, start: int, end: int, new: str, operator: str) -> Fault:
    """Returns a fault with its line and id: a hash of file name, text of the line, place in it, and change."""
    line_start = source.rfind(b"\n", 0, start) + 1
    text = source[line_start:].partition(b"\n")[0]
    indent = len(text) - len(text.lstrip())
    words = (file, text.strip().decode(), str(start - line_start - indent), operator, new)
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
    line = source.count(b"\n", 0, start) + 1
    return Fault(file, line, start, end, source[start:end].decode(), new, operator, key)


def numbered(faults: Iterable[Fault]) -> list[Fault]:
    """Returns faults ordered by place, each once; for equal lines, the second fault's id ends in -2, and so on."""
    seen = Counter[str]()
    result = []
    for one in sorted(dict.fromkeys(faults), key=lambda f: (f.start, f.end, f.new, f.operator)):
        seen[one.id] += 1
        count = seen[one.id]
        result.append(one if count == 1 else replace(one, id=f"{one.id}-{count}"))
    return result
