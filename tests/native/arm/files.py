"""The file that driver.cpp reads: a sequence of commands, each a letter and its operands.

    R id align size bytes         memory, at an address that is `align` modulo 64
    P id offset size bytes        bytes that are written there
    L id offset id offset         an address that is written there
    C name count arguments        a call, which must return 0: "i" number, or "p" id offset
    E name id type count, then offsets, float64 results and tolerances    numbers to be checked, in elements
    T id offset count token piece the largest of float32 numbers must be this one; the piece of text is printed
    F name                        a case ends; its memory is freed

Numbers are int64, strings their length and UTF-8."""

import struct
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import numpy as np

from tests.native.arm.calls import Call, Place

TYPES = {"float32": 0, "bfloat16": 1, "int64": 2, "uint8": 3}


class CaseFile:
    """A writer of such a file."""

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

    def memory(self, address: int, data: bytes) -> None:
        self._last += 1  # an address that had other memory before gets a new id
        self.ids[address] = self._last
        self._to.write(b"R" + struct.pack("<3q", self._last, address % 64, len(data)) + data)

    def patch(self, address: int, offset: int, data: bytes) -> None:
        self._to.write(b"P" + struct.pack("<3q", self.ids[address], offset, len(data)) + data)

    def links(self, links: Iterable[tuple[Place, Place]]) -> None:
        for (address, offset), (target, target_offset) in links:
            self._to.write(
                b"L" + struct.pack("<4q", self.ids[address], offset, self.ids[target], target_offset)
            )

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
        self,
        name: str,
        address: int,
        kind: str,
        offsets: np.ndarray,
        expected: np.ndarray,
        tolerances: np.ndarray,
    ) -> None:
        assert len(offsets) == len(expected) == len(tolerances)
        self._to.write(b"E" + _text(name) + struct.pack("<3q", self.ids[address], TYPES[kind], len(offsets)))
        for numbers, dtype in ((offsets, np.int64), (expected, np.float64), (tolerances, np.float64)):
            self._to.write(np.ascontiguousarray(numbers, dtype).tobytes())
        self.checks += 1
        self.numbers += len(offsets)

    def token(self, address: int, offset: int, count: int, token: int, piece: str) -> None:
        self._to.write(b"T" + struct.pack("<4q", self.ids[address], offset, count, token) + _text(piece))

    def end(self, name: str) -> None:
        self._to.write(b"F" + _text(name))
        self.ids.clear()
        self.cases += 1


def _text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<q", len(data)) + data
