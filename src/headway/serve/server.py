"""What a server has: its models, the thread in which they write, and its settings."""

import time
from dataclasses import dataclass
from typing import TypeVar

from headway.errors import ConfigError
from headway.serve.bodies import ModelRequest
from headway.serve.metrics import Metrics
from headway.serve.models import Models
from headway.serve.served import Served
from headway.serve.visits import Visit
from headway.serve.worker import Worker

S = TypeVar("S", bound=Served)


@dataclass
class Server:
    """All that its routes need. `strict`: fields of requests that are unknown are refused, where otherwise warnings
    tell that they change nothing."""

    models: Models
    worker: Worker
    strict: bool = False
    ending: bool = False
    """Whether it takes no more requests."""

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.models, self.worker)
        self.open: set[Visit] = set()
        self.begun = time.time()

    async def begin(self, asked: ModelRequest, kind: type[S], *tasks: str) -> tuple[S, list[str]]:
        """The model of a request, as `Models.find` finds and raises, and warnings of its fields."""
        if asked.unknown and self.strict:
            raise ConfigError(f"unknown fields: {', '.join(asked.unknown)}; leave them out")
        warnings = [f"{name} is unknown here and changes nothing" for name in asked.unknown]
        return await self.models.find(asked.model, kind, *tasks), warnings
