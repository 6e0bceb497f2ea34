"""Typed access to the metadata of a GGUF file, and numbers of 32 bits as people wrote them."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from headway.errors import CheckpointError, did_you_mean
from headway.storage.gguf import Value

LARGEST = (2 - 2**-23) * 2.0**127
"""Number of 32 bits."""


class Keys:
    """The keys of one file that begin with `prefix`; errors name the file and the whole key.

    `asked` collects what was asked for: what is left at the end is unknown (`refuse_others`)."""

    def __init__(self, metadata: Mapping[str, Value], path: Path, prefix: str) -> None:
        self.metadata, self.path, self.prefix = metadata, path, prefix
        self.asked: set[str] = set()

    def get(self, name: str) -> Value | None:
        self.asked.add(name)
        return self.metadata.get(self.prefix + name)

    def whole(self, name: str, default: int | None = None) -> int:
        value = self._needed(name, default)
        if type(value) is not int or not 0 < value < 1 << 31:
            self.wrong(name, "a whole number from 1 to below 2^31", value)
        return value

    def index(self, name: str) -> int:
        """A whole number from 0, such as the id of a token."""
        value = self._needed(name, None)
        if type(value) is not int or not 0 <= value < 1 << 31:
            self.wrong(name, "a whole number from 0 to below 2^31", value)
        return value

    def maybe_whole(self, name: str) -> int | None:
        return None if self.get(name) is None else self.whole(name)

    def number(self, name: str, default: float | None = None) -> float:
        value = self._needed(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            self.wrong(name, "a number of at least 0", value)
        return decimal(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._needed(name, default)
        if not isinstance(value, bool):
            self.wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._needed(name, default)
        if not isinstance(value, str):
            self.wrong(name, "text", value)
        return value

    def texts(self, name: str) -> list[str]:
        value = self._needed(name, None)
        if not isinstance(value, list):
            self.wrong(name, "an array of texts", value)
        return value

    def numbers(self, name: str, count: int) -> list[Any] | None:
        """An array of `count` numbers, None where there is none."""
        value = self.get(name)
        if value is not None and (not isinstance(value, array) or len(value) != count):
            self.wrong(name, f"an array of {count:,} numbers", value)
        return None if value is None else list(value)

    def only(self, name: str, *allowed: object) -> None:
        """Raise CheckpointError unless a key is absent or has one of these values."""
        value = self.get(name)
        if value is not None and not any(type(value) is type(one) and value == one for one in allowed):
            raise CheckpointError(
                f"{self.path}: {self.prefix}{name} is {_short(value)}, which is unsupported; supported is "
                f"{' or '.join(map(repr, allowed))}"
            )

    def refuse_others(self, harmless: Iterable[str] = ()) -> None:
        """Raise CheckpointError for a key of the prefix that nobody asked for: it may change what is computed."""
        for name in self.metadata:
            end = name.removeprefix(self.prefix)
            if end != name and end not in self.asked and not end.endswith(tuple(harmless)):
                known = [self.prefix + one for one in sorted(self.asked)]
                raise CheckpointError(
                    f"{self.path}: unknown key {name}{did_you_mean(name, known)}: whether it changes what the model "
                    "computes is not known"
                )

    def wrong(self, name: str, wanted: str, value: object) -> NoReturn:
        raise CheckpointError(f"{self.path}: {self.prefix}{name} must be {wanted}, got {_short(value)}")

    def _needed(self, name: str, default: Any) -> Any:
        value = self.get(name)
        if value is None and default is None:
            raise CheckpointError(f"{self.path} lacks the key {self.prefix}{name}")
        return default if value is None else value


def decimal(value: float) -> float:
    """A number that was rounded to 32 bits as the shortest decimal that rounds to it: 1e-05 of 9.99999974e-06."""
    value = float(value)
    if abs(value) > LARGEST or struct.unpack("<f", struct.pack("<f", value))[0] != value:
        return value
    stored = struct.pack("<f", value)
    shortest = (float(f"{value:.{digits}g}") for digits in range(1, 10))
    return next(one for one in shortest if struct.pack("<f", one) == stored)


def _short(value: object) -> str:
    text = f"{len(value):,} items" if isinstance(value, list | array) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
