"""What an endpoint is asked, and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headway.text.chat import Message


@dataclass(frozen=True)
class Reply:
    """text: verbatim. finish_reason: as the endpoint says it; "length" where the text was cut off by `max_tokens`."""

    text: str
    finish_reason: str


class Endpoint(Protocol):
    """Answers conversations. `name` tells it from others, and stands in transcripts."""

    name: str

    def chat(self, messages: Sequence[Message], *, seed: int, temperature: float, max_tokens: int) -> Reply:
        """The reply to [{"role": "user", "content": "..."}, ...], of at most `max_tokens` tokens; temperature 0 takes
        the most probable ones. Raises HeadwayError where there is none."""
        ...
