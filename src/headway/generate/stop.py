"""Detection of stop strings in a stream of text, however it is split into pieces."""

from collections.abc import Sequence

from headway.errors import ConfigError


class StopScanner:
    """Passes text on until a stop string is complete.

    Invariant: however a text is split into pieces, the output is the text up to the stop string that is completed first
    (of those that end at the same place, the longest), or the whole text. Text that may still become a stop string is
    held back, so that no part of a stop string is ever passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ConfigError(f"stop strings must be non-empty strings, got {stop!r}")
        self.stops = tuple(stops)
        self.hit: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """Returns the text that may be shown now; `hit` is set when a stop string is complete."""
        if self.hit is not None:
            return ""
        self._held += text
        hits = [(self._held.find(s) + len(s), -len(s), s) for s in self.stops if s in self._held]
        if hits:
            end, _, self.hit = min(hits)
            shown, self._held = self._held[: end - len(self.hit)], ""
            return shown
        cut = len(self._held) - begun(self._held, self.stops)
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """Returns the text that was held back; call it at the end of the text."""
        shown, self._held = self._held, ""
        return shown


def begun(text: str, marks: Sequence[str]) -> int:
    """Returns the length of the longest suffix of `text` that one of the marks begins with (not the whole mark)."""
    # text "ab</", mark "</s>": 2, since "</" may become the mark
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
