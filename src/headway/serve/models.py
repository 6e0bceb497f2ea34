"""The models of a server, by the names that requests give: loading, use, and unloading to make room for others."""

import asyncio
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from headway.errors import ConfigError, check_known
from headway.serve.errors import Unavailable, UnknownModel
from headway.serve.served import Decoding, Served
from headway.serve.visits import VISIT

LOG = logging.getLogger(__name__)
S = TypeVar("S", bound=Served)
T = TypeVar("T")
PAGES = 8
"""Weights must leave at least 1/8 of the memory to the pages of KV caches."""


def size_of(model: Path) -> int:
    """Returns the bytes of the weights in a folder or file; 0 if it is not downloaded yet."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def in_passing(work: Callable[[], T]) -> T:
    """Returns the result of `work`, run in a thread that ends with it.

    Every thread that multiplies matrices has its own pool of OpenMP threads. If these outnumber the cores, libgomp no
    longer lets them spin between two operations, and each of the many small operations of a step waits for the system
    to wake them: with two threads on two cores, a token took 3.6 ms instead of 2.3."""
    with ThreadPoolExecutor(1, "headway-passing") as thread:
        return thread.submit(work).result()


@dataclass(eq=False)
class Place:
    """A slot for a model: a name that requests give, and its model; None while unloaded.

    load: loads the model; called outside the event loop's thread.   size: bytes of its weights, or an estimate.
    base: the slot whose model this one is an adapter of.   error: why the last load failed.   live: requests that use
        it.
    used: time of the last use or load, by `time.monotonic`.   aliases: all its names.   tags: words that `/v1/models`
        reports.   source: where the model is.
    """

    name: str
    load: Callable[[], Served]
    model: Served | None = None
    size: int = 0
    base: "Place | None" = None
    error: str | None = None
    live: int = 0
    used: float = 0.0
    checked: bool = False
    aliases: Sequence[str] = ()
    tags: Sequence[str] = ()
    source: str = ""

    @contextmanager
    def asked(self) -> Iterator[None]:
        """While open, a request uses the model, and its base if it is an adapter."""
        self.live += 1
        try:
            with nullcontext() if self.base is None else self.base.asked():
                yield
        finally:
            self.live, self.used = self.live - 1, time.monotonic()

    @property
    def state(self) -> str:
        """Its state: "loaded", "failed" or "unloaded"."""
        return "loaded" if self.model is not None else "failed" if self.error else "unloaded"

    @property
    def described(self) -> dict[str, Any]:
        """Its entry in `/v1/models`."""
        more = {"created": 0} if self.model is None else self.model.described
        names = {"aliases": [*self.aliases] or [self.name], "tags": [*self.tags], "state": self.state}
        return {"id": self.name, "object": "model", "owned_by": "headway", **more, **names}


class Models:
    """All models of a server.

    memory: bytes for weights and pages together; None is no limit. Idle models are unloaded to make room for others,
        the least recently used first. What the weights leave is shared among the pages of decoders.
    ttl: seconds after which an idle model is unloaded; None is never.
    """

    def __init__(
        self, places: Sequence[Place], *, memory: int | None = None, ttl: float | None = None
    ) -> None:
        self.memory, self.ttl = memory, ttl
        self.places = {place.name: place for place in places}
        self.aliases = {alias: place.name for place in places for alias in place.aliases}
        names = [name for place in places for name in {place.name, *place.aliases}]
        if len({*names}) < len(names):
            raise ConfigError(
                f"serve: model names must be unique, got {', '.join(names)}; give --alias NAME=MODEL"
            )
        self._loads = asyncio.Lock()
        self._share()

    def loaded(self) -> list[Place]:
        """Returns the slots whose models are loaded."""
        return [place for place in [*self.places.values()] if place.model is not None]

    async def find(self, name: str | None, kind: type[S], *tasks: str) -> S:
        """Returns the model of a name, loaded. Without a name, it is the only one of this kind and of one of the tasks
        (any task if none is given). Raises UnknownModel, ConfigError for a model of another kind or task, Unavailable
        if it cannot be loaded."""

        def fits(model: Served | None) -> TypeGuard[S]:
            return isinstance(model, kind) and (not tasks or model.task in tasks)

        place = self.choose(name, fits)
        model = await self.open(place)
        if not fits(model):
            names = ", ".join(slot.name for slot in self.loaded() if fits(slot.model)) or "none"
            raise ConfigError(
                f"{place.name} is a model for {model.task}, but this path needs one for "
                f"{' or '.join(tasks) or 'causal-lm'}; loaded: {names}"
            )
        return model

    def choose(self, name: str | None, fits: Callable[[Served], bool]) -> Place:
        """Returns the slot of a name; without a name, the only slot whose model may fit. Raises UnknownModel."""
        places = [place for place in self.places.values() if place.base is None]
        fitting = [place for place in places if place.model is None or fits(place.model)]
        return fitting[0] if name is None and len(fitting) == 1 else self.place(name)

    def place(self, name: str | None) -> Place:
        """Returns the slot of a name. Raises UnknownModel."""
        if name is None:
            raise UnknownModel(f"model is missing; there are {', '.join(self.places)}")
        name = self.aliases.get(name, name)
        check_known(name, self.places, "there is no model", error=UnknownModel)
        return self.places[name]

    async def open(self, place: Place) -> Served:
        """Returns the model of a slot; loads it in another thread if necessary. Raises Unavailable if that fails."""
        if (visit := VISIT.get()) is not None:
            visit.after.enter_context(place.asked())
        if place.model is None:
            async with self._loads:
                return await asyncio.to_thread(self.load, place)
        return place.model

    def load(self, place: Place) -> Served:
        """Loads the model of a slot unless it is loaded already. Raises Unavailable if that fails."""
        if place.model is not None:
            return place.model
        try:
            if place.base is not None:
                self.load(place.base)
            self._make_room(place)
            model = in_passing(place.load)
            (place.base or place).size = model.nbytes
            self._make_room(place)  # the weights may take more than the estimate
        except Exception as error:  # the files may hold anything
            place.error = str(error)
            LOG.error("%s cannot be loaded (%s)", place.name, type(error).__name__)
            raise Unavailable(f"{place.name} cannot be loaded: {error}") from error
        place.model, place.error, place.checked, place.used = model, None, False, time.monotonic()
        self._share()
        return model

    def _make_room(self, place: Place) -> None:
        """Unloads idle models until the weights of this one fit. Raises Unavailable if they cannot."""
        while self.memory is not None:
            left = self.memory - self.memory // PAGES - sum(other.size for other in self.loaded())
            if place.size <= left:
                return
            idle = [other for other in self.loaded() if not (other.live or other is place.base)]
            if not idle:
                raise Unavailable(
                    f"its weights take {place.size} bytes; {max(left, 0)} of {self.memory} are left; raise --memory"
                )
            self.unload(min(idle, key=lambda other: other.used))

    def _share(self) -> None:
        """Divides the memory that weights leave equally among the pages of decoders."""
        if self.memory is not None:
            left = self.memory - sum(place.size for place in self.loaded())
            models = [place.model for place in self.loaded() if place.base is None]
            decoders = [model for model in models if isinstance(model, Decoding)]
            for model in decoders:
                model.keep(max(left, 0) // len(decoders))

    def unload(self, place: Place) -> None:
        """Unloads the model of a slot, and its adapters; requests that use it finish with it."""
        for slot in [*self.places.values()]:
            if slot.base is place:
                slot.model = None
        place.model = None
        gc.collect()
        self._share()

    async def expire(self) -> None:
        """Unloads models that have been idle for `ttl`, until cancelled."""
        while self.ttl is not None:
            await asyncio.sleep(min(1.0, self.ttl / 4))
            for place in self.loaded():
                idle = not (place.live or place.base)
                if idle and time.monotonic() - place.used > self.ttl:
                    self.unload(place)

    async def check(self) -> None:
        """Checks each loaded decoder once. Raises Unavailable if a check fails."""
        for place in self.loaded():
            if isinstance(place.model, Decoding) and not place.checked:
                await place.model.check()
                place.checked = True

    def add_adapter(self, name: str, base: Place, folder: str) -> Place:
        """Adds a slot for a model with an adapter, not loaded yet. Raises ConfigError if the name is taken."""
        if name in self.places or name in self.aliases:
            raise ConfigError(f"the model name {name!r} is taken; choose another, or unload that adapter")

        def load() -> Served:
            assert isinstance(base.model, Decoding)
            return base.model.adapted(name, folder)

        self.places[name] = place = Place(name, load, base=base)
        return place

    def drop_adapter(self, name: str) -> None:
        """Removes an adapter; sequences that use it are finished. Raises UnknownModel, ConfigError if the name is not
        an adapter's."""
        place = self.place(name)
        if place.base is None:
            raise ConfigError(f"{name} is a model, not an adapter; only adapters can be unloaded")
        del self.places[name]
        if isinstance(place.model, Decoding):
            place.model.drop()
