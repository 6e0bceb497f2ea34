"""The models of a server, by the names that requests give: loaded, used, and given up for others."""

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
"""A part of the memory that weights leave to pages: one of so many."""


def size_of(model: Path) -> int:
    """Bytes of the weights in a folder or file; 0 for what is not here yet."""
    files = [model] if model.is_file() else model.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def in_passing(work: Callable[[], T]) -> T:
    """Returns the result of `work`, done in a thread that ends with it.

    Every thread that multiplies keeps OpenMP threads of its own. Where these are more than the cores of the machine,
    libgomp no longer lets them spin between two operations, and each of the many small ones of a step waits for the
    system to wake them: with two threads on two cores a token took 3.6 ms instead of 2.3."""
    with ThreadPoolExecutor(1, "headway-passing") as thread:
        return thread.submit(work).result()


@dataclass(eq=False)
class Place:
    """A name that requests give, and the model that has it; None while it is not loaded.

    load: makes the model, in a thread that is not the event loop's.   size: bytes of its weights, or what they are
    expected to be.   base: whose adapter it is.   error: why it could not be loaded.   live: requests that use it.
    used: when one did, or when it was loaded, by `time.monotonic`.   aliases: all its names.   tags: words of it that
    are told.   source: where it is.
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
        """While open, a request uses it, and the model that it is an adapter of."""
        self.live += 1
        try:
            with nullcontext() if self.base is None else self.base.asked():
                yield
        finally:
            self.live, self.used = self.live - 1, time.monotonic()

    @property
    def state(self) -> str:
        """Its state in a word."""
        return "loaded" if self.model is not None else "failed" if self.error else "unloaded"

    @property
    def described(self) -> dict[str, Any]:
        """Its entry in `/v1/models`."""
        more = {"created": 0} if self.model is None else self.model.described
        names = {"aliases": [*self.aliases] or [self.name], "tags": [*self.tags], "state": self.state}
        return {"id": self.name, "object": "model", "owned_by": "headway", **more, **names}


class Models:
    """All models of a server.

    memory: bytes of their weights and pages together; models that nobody uses are given up for others, the one that
        was used longest ago first. What weights leave is shared by the pages of decoders; None is no bound.
    ttl: seconds after which a model that nobody uses is given up; None is never.
    """

    def __init__(
        self, places: Sequence[Place], *, memory: int | None = None, ttl: float | None = None
    ) -> None:
        self.memory, self.ttl = memory, ttl
        self.places = {place.name: place for place in places}
        self.aliases = {alias: place.name for place in places for alias in place.aliases}
        names = [name for place in places for name in {place.name, *place.aliases}]
        if len({*names}) < len(names):
            raise ConfigError(f"serve: names repeat among {', '.join(names)}")
        self._loads = asyncio.Lock()
        self._share()

    def loaded(self) -> list[Place]:
        """The places of loaded models."""
        return [place for place in [*self.places.values()] if place.model is not None]

    async def find(self, name: str | None, kind: type[S], *tasks: str) -> S:
        """The model of a name, loaded; where none is given, the only one of a kind that is of one of these tasks, or of
        any where none is named. Raises UnknownModel, ConfigError where it is of another kind or task, Unavailable where
        it cannot be loaded."""

        def fits(model: Served | None) -> TypeGuard[S]:
            return isinstance(model, kind) and (not tasks or model.task in tasks)

        place = self.choose(name, fits)
        model = await self.open(place)
        if not fits(model):
            others = ", ".join(each.name for each in self.loaded() if fits(each.model)) or "none"
            raise ConfigError(
                f"{place.name} is a model for {model.task}, and this is asked of one for "
                f"{' or '.join(tasks) or 'causal-lm'}; there are {others}"
            )
        return model

    def choose(self, name: str | None, fits: Callable[[Served], bool]) -> Place:
        """The place of a name; where none is given, the only one whose model may fit. Raises UnknownModel."""
        places = [place for place in self.places.values() if place.base is None]
        fitting = [place for place in places if place.model is None or fits(place.model)]
        return fitting[0] if name is None and len(fitting) == 1 else self.place(name)

    def place(self, name: str | None) -> Place:
        """The place of a name. Raises UnknownModel."""
        if name is None:
            raise UnknownModel(f"no model is named; there are {', '.join(self.places)}")
        name = self.aliases.get(name, name)
        check_known(name, self.places, "there is no model", error=UnknownModel)
        return self.places[name]

    async def open(self, place: Place) -> Served:
        """The model of a place; it is loaded, beside what goes on, where it is not. Raises Unavailable."""
        if (visit := VISIT.get()) is not None:
            visit.after.enter_context(place.asked())
        if place.model is None:
            async with self._loads:
                return await asyncio.to_thread(self.load, place)
        return place.model

    def load(self, place: Place) -> Served:
        """Loads the model of a place, where it is not. Raises Unavailable."""
        if place.model is not None:
            return place.model
        try:
            if place.base is not None:
                self.load(place.base)
            self._make_room(place)
            model = in_passing(place.load)
            (place.base or place).size = model.nbytes
            self._make_room(place)  # its files may have said less
        except Exception as error:  # whatever is in its files
            place.error = str(error)
            LOG.error("%s cannot be loaded (%s)", place.name, type(error).__name__)
            raise Unavailable(f"{place.name} cannot be loaded: {error}") from error
        place.model, place.error, place.checked, place.used = model, None, False, time.monotonic()
        self._share()
        return model

    def _make_room(self, place: Place) -> None:
        """Gives up models that nobody uses, until the weights of another one have room. Raises Unavailable."""
        while self.memory is not None:
            left = self.memory - self.memory // PAGES - sum(other.size for other in self.loaded())
            if place.size <= left:
                return
            idle = [other for other in self.loaded() if not (other.live or other is place.base)]
            if not idle:
                raise Unavailable(f"its weights take {place.size} bytes; {left} of {self.memory} are left")
            self.unload(min(idle, key=lambda other: other.used))

    def _share(self) -> None:
        """Divides what weights leave among the pages of decoders, in equal parts."""
        if self.memory is not None:
            left = self.memory - sum(place.size for place in self.loaded())
            models = [place.model for place in self.loaded() if place.base is None]
            decoders = [model for model in models if isinstance(model, Decoding)]
            for model in decoders:
                model.keep(max(left, 0) // len(decoders))

    def unload(self, place: Place) -> None:
        """Gives up the model of a place, and those of its adapters; requests that use it go on with it."""
        for other in [*self.places.values()]:
            if other.base is place:
                other.model = None
        place.model = None
        gc.collect()
        self._share()

    async def expire(self) -> None:
        """Gives up models that nobody has used for `ttl`, as long as it is not cancelled."""
        while self.ttl is not None:
            await asyncio.sleep(min(1.0, self.ttl / 4))
            for place in self.loaded():
                idle = not (place.live or place.base)
                if idle and time.monotonic() - place.used > self.ttl:
                    self.unload(place)

    async def check(self) -> None:
        """Checks the decoders that are loaded, each once. Raises Unavailable for one that does not what it should."""
        for place in self.loaded():
            if isinstance(place.model, Decoding) and not place.checked:
                await place.model.check()
                place.checked = True

    def add_adapter(self, name: str, base: Place, folder: str) -> Place:
        """A name for a model with an adapter of it, which is not loaded yet. Raises ConfigError for a name that is
        taken."""
        if name in self.places:
            raise ConfigError(f"there is a model {name!r} already; give another name, or unload that one")

        def load() -> Served:
            assert isinstance(base.model, Decoding)
            return base.model.adapted(name, folder)

        self.places[name] = place = Place(name, load, base=base)
        return place

    def drop_adapter(self, name: str) -> None:
        """Takes an adapter away; what is being written with it goes on. Raises UnknownModel, ConfigError for a name
        that is none of an adapter."""
        place = self.place(name)
        if place.base is None:
            raise ConfigError(f"{name} is a model, and no adapter of one")
        del self.places[name]
        if isinstance(place.model, Decoding):
            place.model.drop()
