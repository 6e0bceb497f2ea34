"""Whose turn it is, where each turn takes a time of its own."""

from collections.abc import Iterable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Turns(Generic[T]):
    """Gives each of those who have something to do the same time, however long a single turn of theirs is.

    Next is who has had the least. Time counts from when one had something to do: who comes late is not owed the time
    before, and waits for one turn of each other at most."""

    def __init__(self) -> None:
        self._had: WeakKeyDictionary[T, float] = WeakKeyDictionary()
        self._now = 0.0  # what the last one had had before its turn

    def next(self, among: Iterable[T]) -> T:
        """One of them; the first of those who have had as little."""
        chosen = min(among, key=self._before)
        self._now = self._had[chosen] = self._before(chosen)
        return chosen

    def took(self, one: T, seconds: float) -> None:
        """It has had its turn."""
        self._had[one] = self._before(one) + seconds

    def _before(self, one: T) -> float:
        return max(self._now, self._had.get(one, 0.0))
