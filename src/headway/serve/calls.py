"""Models that are asked by calls of the Python API, each in a thread; what calls read is read together."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from headway.errors import ConfigError
from headway.serve.errors import Busy
from headway.serve.served import Served
from headway.serve.visits import VISIT
from headway.serve.worker import Steps, Work, Worker

MOST_TOKENS = 300_000
"""That a call may read."""
M = TypeVar("M")
T = TypeVar("T")
Run = Callable[[Sequence[Work]], None]


class Called(Served, Generic[M]):
    """A model that is asked by calls.

    exact: what is given for a text is the same bits whatever else is asked.
    """

    def __init__(self, name: str, model: M, worker: Worker, *, exact: bool = False) -> None:
        super().__init__(name)
        self.model, self.exact, self._worker = model, exact, worker
        self._threads = ThreadPoolExecutor(max(1, worker.most), f"headway-{name}")
        self._live = 0

    @property
    def weights(self) -> Any:
        return self.model.model  # type: ignore[attr-defined]

    @property
    @abstractmethod
    def engine(self) -> Steps:
        """What reads for all calls."""

    @abstractmethod
    def asking(self, run: Run) -> M:
        """The model for one call, whose texts are run by the engine: `run` waits until it is done with them."""

    async def call(self, act: Callable[[M], T]) -> tuple[T, int]:
        """What a call gives, and how many tokens it has read; where the caller is cancelled, so is what it waits for.
        Raises what the call raises, as `Worker.write`, and ConfigError for too many tokens."""
        if self._live >= self._worker.most:
            raise Busy(f"{self._live} calls are being answered, and no more may be; ask again")
        loop, waits, tokens, is_over = asyncio.get_running_loop(), list[Future[None]](), 0, False

        async def write(texts: Sequence[Work]) -> None:
            async for _ in self._worker.write(self.engine, texts):
                pass

        def run(texts: Sequence[Work]) -> None:
            nonlocal tokens
            tokens += sum(text.request.prompt_tokens for text in texts)
            if tokens > MOST_TOKENS:
                raise ConfigError(
                    f"more than {MOST_TOKENS} tokens are too many for a request; send less at a time"
                )
            if is_over:
                raise CancelledError
            waits.append(asyncio.run_coroutine_threadsafe(write(texts), loop))
            waits[-1].result()

        self._live += 1
        try:
            return await loop.run_in_executor(self._threads, act, self.asking(run)), tokens
        finally:
            is_over, self._live = True, self._live - 1
            for wait in waits:
                wait.cancel()
            if (visit := VISIT.get()) is not None:
                visit.read += tokens
