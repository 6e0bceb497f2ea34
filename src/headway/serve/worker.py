"""The thread in which engines write: it steps them in turn, and hands what a step added to the event loop at once."""

import asyncio
import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from headway.generate.sequences import Job, SampledText
from headway.serve.errors import Busy, Unavailable

LOG = logging.getLogger(__name__)
T = TypeVar("T")
Told = list[tuple[int, Any]]
"""News of a step: the number of a text of its ticket, and a `Delta`, a `Reading`, or an output of an encoder."""


class Reading(NamedTuple):
    """How far a prompt of `total` tokens has been read, `time_ms` after it was asked for; `cache`: what was stored."""

    total: int
    cache: int
    processed: int
    time_ms: float


class Steps(Protocol):
    """Anything that is stepped: an `Engine`, or a `Packing`."""

    def add(self, job: Any) -> None: ...

    def cancel(self, job: Any) -> None: ...

    def step(self) -> None: ...


@dataclass(eq=False)
class Ticket:
    """Texts that are asked for together, of one engine: those of one HTTP request. `progress`: whether it is told how
    far their prompts have been read."""

    engine: Steps
    texts: Sequence[Job]
    loop: asyncio.AbstractEventLoop
    progress: bool = False
    told: asyncio.Queue[Told | BaseException | None] = field(default_factory=asyncio.Queue)
    counts: Counter[int] = field(default_factory=Counter)
    """How many deltas of each text have been told."""
    read: dict[int, int] = field(default_factory=dict)
    """How far prompts were read when that was told."""

    def news(self) -> Told:
        """News that have not been told yet: how far prompts have been read, where that is asked for, and deltas."""
        texts = [*enumerate(self.texts)]
        read = [(i, part) for i, text in texts for part in (self._readings(i, text) if self.progress else ())]
        added = [(i, delta) for i, text in texts for delta in text.deltas[self.counts[i] :]]
        self.counts.update(i for i, _ in added)
        return [*read, *added]

    def _readings(self, i: int, text: Job) -> Iterator[Reading]:
        """News of a prompt that is being read: at first what was stored."""
        assert isinstance(text, SampledText)
        total, passed = text.request.prompt_tokens, 1e3 * (time.perf_counter() - text.begun)
        reached = total if text.count else -1 if text.table is None else min(len(text.table), total)
        for processed in (text.stored, reached) if reached >= 0 else ():
            if processed > self.read.get(i, -1):
                self.read[i] = processed
                yield Reading(total, text.stored, processed, passed if processed > text.stored else 0.0)

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to write."""
        return all(text.ended for text in self.texts)

    @property
    def waiting(self) -> int:
        """Tokens of its prompts of which nothing has been written yet, each prompt counted once."""
        new = {id(text.request.prompt): text.request.prompt_tokens for text in self.texts if not text.count}
        return 0 if self.is_done else sum(new.values())


class FairTurns(Generic[T]):
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

    def took(self, who: T, seconds: float) -> None:
        """Records that `who` has had its turn."""
        self._had[who] = self._before(who) + seconds

    def _before(self, who: T) -> float:
        return max(self._now, self._had.get(who, 0.0))


class Worker:
    """Steps engines as long as they have something to do; each gets the same time (`FairTurns`). Any thread may submit.

    What a step raises fails the texts of its engine, and no others. What ends the thread fails all that is being
    written; another thread takes its place.

    most: requests that may be written or wait at once.   most_waiting: tokens of prompts that may wait.
    slots: requests that are written at once; more wait for one of them to end (`waiting`). None is no bound.
    steps: of all engines.   restarts: how often the thread has ended and another one began.
    """

    def __init__(self, most: int = 256, most_waiting: int | None = None, *, slots: int | None = None) -> None:
        self.most, self.most_waiting, self.slots = most, most_waiting, slots
        self.waiting: list[Ticket] = []
        self.steps = self.restarts = 0
        self._free = asyncio.Semaphore(slots or sys.maxsize)
        self.turns: FairTurns[Steps] = FairTurns()
        self._changed = threading.Condition()
        self._tickets: list[Ticket] = []
        self._calls: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        self._closed = False
        self._start()

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="headway-engines", daemon=True)
        self._thread.start()

    async def write(self, engine: Steps, texts: Sequence[Job], progress: bool = False) -> AsyncIterator[Told]:
        """Writes texts; yields what each step added to them, to the end, and with `progress` how far their prompts have
        been read. When the caller stops to listen, or its task is cancelled, they are cancelled, and their pages are
        free after the step that runs. Raises Busy where there is no room, ConfigError for a text that never fits, and
        what one of them failed by."""
        ticket = Ticket(engine, texts, asyncio.get_running_loop(), progress)
        added: list[Job] = []
        self._check_room(ticket)
        self.waiting.append(ticket)
        try:
            await self._free.acquire()
        finally:
            self.waiting.remove(ticket)
        try:
            for text in texts:
                engine.add(text)
                added.append(text)
            with self._changed:
                self._tickets.append(ticket)
                self._changed.notify()
            while (told := await ticket.told.get()) is not None:
                if isinstance(told, BaseException):
                    raise told
                yield told
        finally:
            self._free.release()
            for text in added:
                if not text.ended:
                    engine.cancel(text)

    def _check_room(self, ticket: Ticket) -> None:
        if (count := self.count + len(self.waiting)) >= self.most:
            raise Busy(f"{count} requests are being written, and no more may be; ask again")
        waiting = sum(other.waiting for other in [*self._tickets, *self.waiting])
        if self.most_waiting is not None and waiting and waiting + ticket.waiting > self.most_waiting:
            raise Busy(
                f"prompts of {waiting} tokens wait, these have {ticket.waiting}, and {self.most_waiting} may; ask again"
            )

    def between(self, act: Callable[[], T], when: Callable[[], bool] = lambda: True) -> Future[T]:
        """Has the thread do something between two steps, as soon as a condition holds; what came of it."""
        future = Future[T]()

        def call() -> None:
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)

        with self._changed:
            self._calls.append((when, call))
            self._changed.notify()
        return future

    @property
    def count(self) -> int:
        """Requests that are being written."""
        return len(self._tickets)

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after its step; requests that are being written fail."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        why = "the server ends"
        try:
            while not self._closed:
                self._turn()
        except BaseException:
            LOG.exception("the thread of the engines has ended; another takes its place")
            why = "what writes had to begin anew"
            self.restarts += 1
        finally:
            with self._changed:
                self._tell([*self._tickets], Unavailable(f"{why}; ask again"))
                if not self._closed:
                    self._start()

    def _turn(self) -> None:
        """A step of the engine whose turn it is."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or self._tickets or any(when() for when, _ in self._calls)
            )
            calls = [call for call in self._calls if call[0]()]
            self._calls = [call for call in self._calls if call not in calls]
            tickets = [*self._tickets]
        for _, call in calls:
            call()
        if not tickets or self._closed:
            return
        engine, begun = self.turns.next([ticket.engine for ticket in tickets]), time.perf_counter()
        failure: Exception | None = None
        self.steps += 1
        try:
            engine.step()  # where it is of some texts alone, these have failed
        except Exception as error:
            LOG.exception("a step failed")
            failure = error
        self.turns.took(engine, time.perf_counter() - begun)
        self._tell([ticket for ticket in tickets if ticket.engine is engine], failure)

    def _tell(self, tickets: Sequence[Ticket], failure: Exception | None = None) -> None:
        """Hands out what was added to texts, and how they ended: all of them by a failure, where there is one. One call
        of the event loop for all of it."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Told | BaseException | None]]] = {}
        for ticket in tickets:
            to, errors = news.setdefault(ticket.loop, []), [text.error for text in ticket.texts if text.error]
            error = failure or next(iter(errors), None)
            if told := ticket.news():
                to.append((ticket, told))
            if ticket in self._tickets and (error is not None or ticket.is_done):
                to.append((ticket, error))
                with self._changed:
                    self._tickets.remove(ticket)
        for loop, some in news.items():
            if some and not loop.is_closed():
                loop.call_soon_threadsafe(_put, some)


def _put(news: Sequence[tuple[Ticket, Told | BaseException | None]]) -> None:
    for ticket, told in news:
        ticket.told.put_nowait(told)
