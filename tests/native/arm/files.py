"""The file that driver.cpp reads: commands one after the other, each a letter and what it needs.

    R id align size bytes         memory, at an address that is `align` modulo 64
    P id offset size bytes        bytes that are written there
    L id offset id offset         an address that is written there
    C name count arguments        a call, which must answer 0: "i" number, or "p" id offset
    E name id type count, then offsets, float64 results and tolerances    numbers to be checked, in elements
    T id offset count token piece the largest of float32 numbers is this one; the piece of text is printed
    F name                        a case ends; its memory is given back

Numbers are int64, texts their length and UTF-8."""

import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from tests.native.arm.calls import Call, Place

TYPES = {"float32": 0, "bfloat16": 1, "int64": 2, "uint8": 3}


class CaseFile:
    """Writes cases."""

    def __init__(self, path: Path) -> None:
        self._to = path.open("wb")
        self.ids: dict[int, int] = {}
        self._last = 0
        self.cases = self.calls = self.checks = self.numbers = 0

    def __enter__(self) -> "CaseFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._to.close()

    def memory(self, at: int, data: bytes) -> None:
        self._last += 1  # where other memory was before, it has another number
        self.ids[at] = self._last
        self._to.write(b"R" + struct.pack("<3q", self._last, at % 64, len(data)) + data)

    def patch(self, at: int, offset: int, data: bytes) -> None:
        self._to.write(b"P" + struct.pack("<3q", self.ids[at], offset, len(data)) + data)

    def links(self, links: Iterable[tuple[Place, Place]]) -> None:
        for (at, offset), (to, behind) in links:
            self._to.write(b"L" + struct.pack("<4q", self.ids[at], offset, self.ids[to], behind))

    def call(self, call: Call) -> None:
        self._to.write(b"C" + _text(call.function) + struct.pack("<q", len(call.arguments)))
        for x in call.arguments:
            place = x if isinstance(x, tuple) else None
            self._to.write(
                b"i" + struct.pack("<q", x)
                if place is None
                else b"p" + struct.pack("<2q", self.ids[place[0]], place[1])
            )
        self.calls += 1

    def check(
        self, name: str, at: int, kind: str, offsets: np.ndarray, right: np.ndarray, allowed: np.ndarray
    ) -> None:
        assert len(offsets) == len(right) == len(allowed)
        self._to.write(b"E" + _text(name) + struct.pack("<3q", self.ids[at], TYPES[kind], len(offsets)))
        for numbers, dtype in ((offsets, np.int64), (right, np.float64), (allowed, np.float64)):
            self._to.write(np.ascontiguousarray(numbers, dtype).tobytes())
        self.checks += 1
        self.numbers += len(offsets)

    def token(self, at: int, offset: int, count: int, token: int, piece: str) -> None:
        self._to.write(b"T" + struct.pack("<4q", self.ids[at], offset, count, token) + _text(piece))

    def end(self, name: str) -> None:
        self._to.write(b"F" + _text(name))
        self.ids.clear()
        self.cases += 1


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<q", len(data)) + data
