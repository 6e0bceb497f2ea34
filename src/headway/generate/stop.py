"""Stop strings in a stream of text, wherever the pieces are cut."""

from collections.abc import Sequence

from headway.errors import ConfigError


class StopScanner:
    """Passes text on until a stop string is complete.

    Law: what comes out of any way to cut a text into pieces is the text up to the stop string that is
    complete first (of those that end together, the longest), or all of it. Text that may still become a stop
    string is held back, so nothing of a stop string is ever passed on.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise ConfigError(f"stop strings must be non-empty strings, got {stop!r}")
        self.stops = tuple(stops)
        self.hit: str | None = None
        self._held = ""

    def push(self, text: str) -> str:
        """The text that may be shown now; when a stop string is complete `hit` names it."""
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
        """Returns what was held back, when no more text comes."""
        shown, self._held = self._held, ""
        return shown


def begun(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end of a text may become one of the marks: the longest end that one begins with."""
    # "ab</" and the mark "</s>": 2
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)
