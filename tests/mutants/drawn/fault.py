"""A fault: one place of a file, what stands there and what is put in its place."""

import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fault:
    """The bytes from `start` to `end` of `file`, which are `old`, become `new`. `line` counts from 1; `operator` says
    what kind of change it is; `id` stays the same while the line does."""

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
    """A fault with its line and its id: a hash of the file's name, the line's text, the place in it, and the change."""
    begins = source.rfind(b"\n", 0, start) + 1
    text = source[begins:].partition(b"\n")[0]
    indent = len(text) - len(text.lstrip())
    words = (file, text.strip().decode(), str(start - begins - indent), operator, new)
    key = hashlib.sha256("\0".join(words).encode()).hexdigest()[:12]
    line = source.count(b"\n", 0, start) + 1
    return Fault(file, line, start, end, source[start:end].decode(), new, operator, key)


def numbered(faults: Iterable[Fault]) -> list[Fault]:
    """Faults in the order of their places, each once; where lines are alike, the second's id ends in -2, and so on."""
    seen = Counter[str]()
    result = []
    for each in sorted(dict.fromkeys(faults), key=lambda f: (f.start, f.end, f.new, f.operator)):
        seen[each.id] += 1
        count = seen[each.id]
        result.append(each if count == 1 else replace(each, id=f"{each.id}-{count}"))
    return result
