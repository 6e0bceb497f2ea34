"""The thread that runs the engines: it steps them in turn, and passes the output of each step to the event loop at
once."""

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
"""News of a step: the index of a sequence in its ticket, and a `Delta`, a `Reading`, or an output of an encoder."""


class Reading(NamedTuple):
    """Progress of reading a prompt.

    total: tokens of the prompt.   cache: of these, tokens from the prefix cache.   processed: tokens read so far.
    time_ms: milliseconds since the request.
    """

    total: int
    cache: int
    processed: int
    time_ms: float


class Steps(Protocol):
    """Anything that runs in steps: an `Engine`, or a `Packing`."""

    def add(self, job: Any) -> None: ...

    def cancel(self, job: Any) -> None: ...

    def step(self) -> None: ...


@dataclass(eq=False)
class Ticket:
    """The sequences of one HTTP request, which run on one engine. `progress`: whether the reading of prompts is
    reported."""

    engine: Steps
    texts: Sequence[Job]
    loop: asyncio.AbstractEventLoop
    progress: bool = False
    told: asyncio.Queue[Told | BaseException | None] = field(default_factory=asyncio.Queue)
    counts: Counter[int] = field(default_factory=Counter)
    """Number of deltas of each sequence that have been reported."""
    read: dict[int, int] = field(default_factory=dict)
    """Tokens of each prompt that were read at the last report."""

    def news(self) -> Told:
        """Returns news that have not been reported yet: progress of reading prompts, if `progress`, and deltas."""
        texts = [*enumerate(self.texts)]
        read = [(i, part) for i, text in texts for part in (self._readings(i, text) if self.progress else ())]
        added = [(i, delta) for i, text in texts for delta in text.deltas[self.counts[i] :]]
        self.counts.update(i for i, _ in added)
        return [*read, *added]

    def _readings(self, i: int, text: Job) -> Iterator[Reading]:
        """Yields the progress of reading a prompt; first the tokens from the prefix cache."""
        assert isinstance(text, SampledText)
        total, passed = text.request.prompt_tokens, 1e3 * (time.perf_counter() - text.begun)
        reached = total if text.count else -1 if text.table is None else min(len(text.table), total)
        for processed in (text.stored, reached) if reached >= 0 else ():
            if processed > self.read.get(i, -1):
                self.read[i] = processed
                yield Reading(total, text.stored, processed, passed if processed > text.stored else 0.0)

    @property
    def is_done(self) -> bool:
        """Whether all sequences have ended."""
        return all(text.ended for text in self.texts)

    @property
    def waiting(self) -> int:
        """Number of tokens of distinct prompts whose sequences have no new token yet."""
        new = {id(text.request.prompt): text.request.prompt_tokens for text in self.texts if not text.count}
        return 0 if self.is_done else sum(new.values())


class FairTurns(Generic[T]):
    """Gives everyone who has work the same time, however long a single turn of theirs is.

    Next is whoever has had the least time. Whoever comes late is not owed time from before, and waits for at most one
    turn of each of the others."""

    def __init__(self) -> None:
        self._had: WeakKeyDictionary[T, float] = WeakKeyDictionary()
        self._now = 0.0  # the time that the last one had had before its turn

    def next(self, among: Iterable[T]) -> T:
        """Returns whose turn it is; in a tie the first."""
        chosen = min(among, key=self._before)
        self._now = self._had[chosen] = self._before(chosen)
        return chosen

    def took(self, who: T, seconds: float) -> None:
        """Adds `seconds` to the time that `who` has had."""
        self._had[who] = self._before(who) + seconds

    def _before(self, who: T) -> float:
        return max(self._now, self._had.get(who, 0.0))


class Worker:
    """Steps engines as long as they have work; each gets the same time (`FairTurns`). Any thread may submit work.

    An exception in a step fails the sequences of its engine only. If the thread dies, everything that is being
    generated fails, and a new thread takes its place.

    most: maximum number of requests that run or wait.   most_waiting: maximum number of prompt tokens that wait.
    slots: maximum number of requests that run at once; more wait in `waiting`. None is no limit.
    steps: number of steps of all engines.   restarts: how often the thread has been replaced.
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
        """Generates sequences until all have ended; yields the news of each step, with `progress` also how much of
        their prompts has been read. If the caller stops listening or its task is cancelled, they are cancelled, and
        their pages are freed after the current step. Raises Busy if there is no capacity, ConfigError for a sequence
        that can never fit, and the error of a sequence that failed."""
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
            while (news := await ticket.told.get()) is not None:
                if isinstance(news, BaseException):
                    raise news
                yield news
        finally:
            self._free.release()
            for text in added:
                if not text.ended:
                    engine.cancel(text)

    def _check_room(self, ticket: Ticket) -> None:
        if (count := self.count + len(self.waiting)) >= self.most:
            raise Busy(f"{count} requests are running or waiting, the limit; retry later")
        waiting = sum(queued.waiting for queued in [*self._tickets, *self.waiting])
        if self.most_waiting is not None and waiting and waiting + ticket.waiting > self.most_waiting:
            raise Busy(
                f"{waiting} prompt tokens are waiting, and {ticket.waiting} more exceed the limit of "
                f"{self.most_waiting}; retry later"
            )

    def between(self, act: Callable[[], T], when: Callable[[], bool] = lambda: True) -> Future[T]:
        """Runs `act` in the thread between two steps, as soon as `when` returns True; returns a future of its
        result."""
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
        """Number of requests that are running."""
        return len(self._tickets)

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Ends the thread after its current step; running requests fail."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        why = "the server is shutting down"
        try:
            while not self._closed:
                self._turn()
        except BaseException:
            LOG.exception("the engine thread has died; a new one replaces it")
            why = "the engine thread was restarted"
            self.restarts += 1
        finally:
            with self._changed:
                self._tell([*self._tickets], Unavailable(f"{why}; retry"))
                if not self._closed:
                    self._start()

    def _turn(self) -> None:
        """Runs pending calls, and one step of the engine whose turn it is."""
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
            engine.step()  # an error of single sequences is stored in them, not raised
        except Exception as error:
            LOG.exception("a step failed")
            failure = error
        self.turns.took(engine, time.perf_counter() - begun)
        self._tell([ticket for ticket in tickets if ticket.engine is engine], failure)

    def _tell(self, tickets: Sequence[Ticket], failure: Exception | None = None) -> None:
        """Passes news to the tickets, and to those that ended the end or the error; `failure` fails all of them. Each
        event loop is called once."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Told | BaseException | None]]] = {}
        for ticket in tickets:
            entries, errors = (
                news.setdefault(ticket.loop, []),
                [text.error for text in ticket.texts if text.error],
            )
            error = failure or next(iter(errors), None)
            if unreported := ticket.news():
                entries.append((ticket, unreported))
            if ticket in self._tickets and (error is not None or ticket.is_done):
                entries.append((ticket, error))
                with self._changed:
                    self._tickets.remove(ticket)
        for loop, entries_of_loop in news.items():
            if entries_of_loop and not loop.is_closed():
                loop.call_soon_threadsafe(_put, entries_of_loop)


def _put(news: Sequence[tuple[Ticket, Told | BaseException | None]]) -> None:
    for ticket, entry in news:
        ticket.told.put_nowait(entry)
