"""What a server has: its models, the thread in which they write, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from starlette.exceptions import HTTPException

from headway.serve.models import Models
from headway.serve.served import Served
from headway.serve.worker import Worker

S = TypeVar("S", bound=Served)


class Asked(Protocol):
    """What all requests have: the model's name, and perhaps fields that nothing here knows."""

    model: str | None

    @property
    def unknown(self) -> Sequence[str]: ...


@dataclass
class Server:
    """All that its routes need. `strict`: fields of requests that are unknown are refused, where otherwise warnings
    tell that they change nothing."""

    models: Models
    worker: Worker
    strict: bool = False

    async def begin(self, asked: Asked, kind: type[S]) -> tuple[S, list[str]]:
        """The model of a request, which must be of a kind, and warnings of its fields. Raises as `Models.find`."""
        if asked.unknown and self.strict:
            raise HTTPException(400, f"unknown fields: {', '.join(asked.unknown)}; leave them out")
        warnings = [f"{name} is unknown here and changes nothing" for name in asked.unknown]
        return await self.models.find(asked.model, kind), warnings
