"""Encoders and translators of a server: models that are asked by calls of the Python API, each in a thread; what calls
read is read together."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from copy import copy
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor

from headway.api import LanguageModel, TextEncoder, Translator
from headway.api.loading import AnyModel
from headway.errors import ConfigError
from headway.generate import Engine
from headway.generate.open_engine import OpenEngine
from headway.generate.ranks import reader_of
from headway.generate.sequences import Job
from headway.serve.errors import Busy
from headway.serve.packing import BUDGET, Packed, Packing
from headway.serve.served import Decoding, Served
from headway.serve.visits import VISIT
from headway.serve.worker import Steps, Work, Worker
from headway.text import Encoded

MOST_TOKENS = 300_000
"""That a call may read."""
T = TypeVar("T")
Run = Callable[[Sequence[Work]], None]


class Called(Served, ABC):
    """A model that is asked by calls."""

    def __init__(
        self, name: str, model: TextEncoder | Translator, worker: Worker, *, exact: bool = False
    ) -> None:
        super().__init__(name, model, worker, exact=exact)
        self._threads = ThreadPoolExecutor(max(1, worker.most), f"headway-{name}")
        self._live = 0

    @property
    @abstractmethod
    def engine(self) -> Steps:
        """What reads for all calls."""

    @abstractmethod
    def asking(self, run: Run) -> Any:
        """The model for one call, whose texts are run by the engine: `run` waits until it is done with them."""

    async def call(self, act: Callable[[Any], T]) -> tuple[T, int]:
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


class Encoding(Called):
    """An encoder. With `exact` its texts are read one by one."""

    @cached_property
    def engine(self) -> Packing:
        return Packing(self.model.read, 1 if self.exact else BUDGET)

    def asking(self, run: Run) -> TextEncoder:
        def read(texts: Sequence[Encoded]) -> list[Tensor]:
            packed = [*map(Packed, texts, accumulate((len(text.ids) for text in texts), initial=0))]
            run(packed)
            return [text.deltas[0] for text in packed]

        model: TextEncoder = copy(self.model)
        model.read = read  # type: ignore[method-assign]
        return model


class Translating(Called):
    """An encoder-decoder; `exact`: see `GenerationConfig`."""

    @cached_property
    def engine(self) -> Engine:
        return Engine(reader_of(self.model.model, exact=self.exact))

    def asking(self, run: Run) -> Translator:
        def write(jobs: Sequence[Job], draft: Any = None, most: Any = None) -> Iterator[None]:
            run(jobs)
            yield

        model: Translator = copy(self.model)
        model._engine = OpenEngine(model.model, keep=0)
        model._engine.run = write  # type: ignore[method-assign]
        return model


def served_as(name: str, model: AnyModel, worker: Worker, *, keep: int, exact: bool = False) -> Served:
    """A model under a name; `keep`, `exact`: as in `Decoding`. Raises ConfigError for an encoder without a
    head, of which nothing is asked."""
    if isinstance(model, LanguageModel):
        return Decoding(name, model, worker, keep=keep, exact=exact)
    if isinstance(model, Translator):
        return Translating(name, model, worker, exact=exact)
    if not model.heads:
        raise ConfigError(
            f"{name} is an encoder without a head, of which nothing is asked here; make it an embedder: "
            'headway.load(MODEL, task="embed").save(FOLDER)'
        )
    return Encoding(name, model, worker, exact=exact)
