"""The thread in which engines write: it steps them in turn, and hands what a step added to the event loop at once."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from headway.generate import Delta, Engine
from headway.generate.sequences import SampledText

LOG = logging.getLogger(__name__)
Told = list[tuple[int, Delta]]
"""What a step added: of which text of a ticket, and what."""


@dataclass(eq=False)
class Ticket:
    """Texts that are asked for together, of one engine: those of one HTTP request."""

    engine: Engine
    texts: Sequence[SampledText]
    loop: asyncio.AbstractEventLoop
    told: asyncio.Queue[Told | BaseException | None] = field(default_factory=asyncio.Queue)
    counts: list[int] = field(init=False)
    """How many deltas of each text have been told."""

    def __post_init__(self) -> None:
        self.counts = [0] * len(self.texts)

    def news(self) -> Told:
        """The deltas that have not been told yet."""
        told: Told = []
        for i, text in enumerate(self.texts):
            told += [(i, delta) for delta in text.deltas[self.counts[i] :]]
            self.counts[i] = len(text.deltas)
        return told

    @property
    def is_done(self) -> bool:
        """Whether nothing of it is left to write."""
        return all(text.ended for text in self.texts)

    @property
    def error(self) -> BaseException | None:
        """Why one of its texts ended before its end; None where none did."""
        return next((text.error for text in self.texts if text.error is not None), None)


class Worker:
    """Steps engines, one step of each in turn, as long as they have something to do. Any thread may submit.

    most: requests that may be written or wait at once.
    """

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self._changed = threading.Condition()
        self._tickets: list[Ticket] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="headway-engines", daemon=True)
        self._thread.start()

    async def write(self, engine: Engine, texts: Sequence[SampledText]) -> AsyncIterator[Told]:
        """Writes texts; yields what each step added to them, to the end. When the caller stops to listen, or its task
        is cancelled, they are cancelled, and their pages are free after the step that runs. Raises ConfigError for a
        text that never fits, and what one of them failed by."""
        ticket = Ticket(engine, texts, asyncio.get_running_loop())
        added: list[SampledText] = []
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
            for text in added:
                if not text.ended:
                    engine.cancel(text)

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
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or self._tickets)
                    if self._closed:
                        return
                    tickets = list(self._tickets)
                for engine in {id(ticket.engine): ticket.engine for ticket in tickets}.values():
                    self._step(engine)
                self._tell(tickets)
        finally:
            self._fail(RuntimeError("the thread of the engines has ended"))

    @staticmethod
    def _step(engine: Engine) -> None:
        try:
            engine.step()
        except Exception:  # the engine has failed the texts that it concerns, and is whole
            LOG.exception("a step failed")

    def _tell(self, tickets: Sequence[Ticket]) -> None:
        """One call of the event loop for all that was added."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[Ticket, Told | BaseException | None]]] = {}
        for ticket in tickets:
            to = news.setdefault(ticket.loop, [])
            if told := ticket.news():
                to.append((ticket, told))
            if ticket.error is not None or ticket.is_done:
                to.append((ticket, ticket.error))
                with self._changed:
                    self._tickets.remove(ticket)
        for loop, some in news.items():
            if some and not loop.is_closed():
                loop.call_soon_threadsafe(_put, some)

    def _fail(self, error: BaseException) -> None:
        for ticket in self._tickets:
            if not ticket.loop.is_closed():
                ticket.loop.call_soon_threadsafe(_put, [(ticket, error)])
        self._tickets = []


def _put(news: Sequence[tuple[Ticket, Told | BaseException | None]]) -> None:
    for ticket, told in news:
        ticket.told.put_nowait(told)
