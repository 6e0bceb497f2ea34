"""The models of a server, by the names that requests give: loaded, used, and given up for others."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from headway.errors import ConfigError, HeadwayError, did_you_mean
from headway.serve.errors import Unavailable, UnknownModel
from headway.serve.served import Served

LOG = logging.getLogger(__name__)
S = TypeVar("S", bound=Served)


@dataclass(eq=False)
class Place:
    """A name that requests give, and the model that has it; None while it is not loaded.

    load: makes the model, in a thread that is not the event loop's.   error: why it could not be loaded.
    used: when it was last asked for, by `time.monotonic`.
    """

    name: str
    load: Callable[[], Served]
    model: Served | None = None
    error: str | None = None
    used: float = 0.0

    @staticmethod
    def of(model: Served) -> Place:
        """That of a model which is loaded already."""
        return Place(model.name, lambda: model, model)

    @property
    def described(self) -> dict[str, Any]:
        """As `/v1/models` tells it."""
        state = "loaded" if self.model is not None else "failed" if self.error else "unloaded"
        bare = {"id": self.name, "object": "model", "created": 0, "owned_by": "headway"}
        return {**(bare if self.model is None else self.model.described), "state": state}


class Models:
    """All models of a server; those that are given stay."""

    def __init__(self, models: Sequence[Served | Place]) -> None:
        places = [model if isinstance(model, Place) else Place.of(model) for model in models]
        self.places = {place.name: place for place in places}
        if len(self.places) < len(places):
            raise ConfigError(f"serve: names repeat among {', '.join(place.name for place in places)}")
        self._loads = asyncio.Lock()

    @property
    def by_name(self) -> dict[str, Served]:
        """Those that are loaded."""
        return {name: place.model for name, place in self.places.items() if place.model is not None}

    def __iter__(self) -> Iterator[Served]:
        return iter(self.by_name.values())

    async def find(self, name: str | None, kind: type[S] = Served) -> S:  # type: ignore[assignment]
        """The model of a name, loaded; where none is given, the only one of a kind. Raises UnknownModel, ConfigError
        where it is of another kind, Unavailable where it cannot be loaded."""
        fitting = [place for place in self.places.values() if isinstance(place.model, kind | None)]
        place = fitting[0] if name is None and len(fitting) == 1 else self.place(name)
        model = await self.open(place)
        if not isinstance(model, kind):
            others = ", ".join(each.name for each in self if isinstance(each, kind)) or "none"
            raise ConfigError(
                f"{place.name} is {model.what}, and this is asked of {kind.what}; there are {others}"
            )
        return model

    def place(self, name: str | None) -> Place:
        """The place of a name. Raises UnknownModel."""
        if name is None or name not in self.places:
            asked = "no model is named" if name is None else f"there is no model {name!r}"
            hint = did_you_mean(name or "", self.places)
            raise UnknownModel(f"{asked}{hint}; there are {', '.join(self.places)}")
        return self.places[name]

    async def open(self, place: Place) -> Served:
        """The model of a place; it is loaded, beside what goes on, where it is not. Raises Unavailable."""
        if place.model is None:
            async with self._loads:
                model = await asyncio.to_thread(self.load, place)
        else:
            model = place.model
        place.used = time.monotonic()
        return model

    def load(self, place: Place) -> Served:
        """Loads the model of a place, where it is not. Raises Unavailable."""
        if place.model is not None:
            return place.model
        try:
            model = place.load()
        except (HeadwayError, OSError) as error:
            place.error = str(error)
            LOG.error("%s: %s", place.name, error)
            raise Unavailable(f"{place.name} cannot be loaded: {error}") from error
        place.model, place.error = model, None
        return model
