"""Encoders and translators of a server. Each request is a call of the Python API in its own thread; the texts of
concurrent calls are batched together."""

import asyncio
import logging
import threading
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
from headway.generate import Engine, GenerationConfig
from headway.generate.constraints import Text
from headway.generate.loop import OpenEngine
from headway.generate.ranks import reader_of
from headway.generate.requests import Request
from headway.generate.sequences import Job
from headway.serve.errors import Busy
from headway.serve.served import Decoding, Served
from headway.serve.visits import VISIT
from headway.serve.worker import Steps, Worker
from headway.text import Encoded

MOST_TOKENS = 300_000
"""Maximum number of tokens that a call may read."""
BUDGET = 1024
"""Tokens per step: more would hardly be faster, and the server's other models wait until the step ends."""
LOG = logging.getLogger(__name__)
T = TypeVar("T")
Run = Callable[[Sequence[Job]], None]


class Packed(Job):
    """A text to encode, as a job of the engine: a request for 0 new tokens.

    before: number of tokens before it in its call.   turn: its priority; texts with a smaller turn are read first.
    deltas: the head's output, once the text has been read.
    """

    deltas: list[Any]

    def __init__(self, text: Encoded, before: int = 0) -> None:
        request = Request(0, text.ids, GenerationConfig(), 0)
        super().__init__(request, [Text(request, [])])
        self.text, self.before, self.turn = text, before, 0


class Packing:
    """An engine that encodes texts in steps of up to `budget` tokens; a longer text is read alone.

    Requests take turns by token count, so that a short one does not wait for all of a long one that came before it, and
    none starves. A step reads what is waiting and never waits for more texts to fill its budget.

    Args:
        read: returns the outputs of texts that are encoded as one batch (`TextEncoder.read`).

    waiting: texts that have not been read yet, including cancelled ones.
    """

    def __init__(self, read: Callable[[Sequence[Encoded]], list[Tensor]], budget: int = BUDGET) -> None:
        self.budget, self._read = budget, read
        self._lock = threading.Lock()
        self.waiting: list[Packed] = []
        self._now = 0  # the highest turn that has been read

    def add(self, job: Packed) -> None:
        """Adds a text to the queue."""
        with self._lock:
            job.turn = self._now + job.before
            self.waiting.append(job)

    def cancel(self, job: Packed) -> None:
        """Cancels a text, which is then not read."""
        job.texts = []

    def step(self) -> None:
        """Encodes the next texts in turn. An exception fails these texts only."""
        texts = self._next()
        if not texts:
            return
        try:
            outputs = self._read([text.text for text in texts])
            for text, output in zip(texts, outputs, strict=True):
                if bool(output.isfinite().all()):
                    text.deltas, text.count = [output], 1
                else:
                    text.error = FloatingPointError("the model's output has NaN or infinite values")
        except Exception as error:
            LOG.exception("texts could not be read")
            for text in texts:
                text.error = error
        for text in texts:
            text.texts = []

    def _next(self) -> list[Packed]:
        """Removes the texts of the next step from the queue and returns them."""
        with self._lock:
            waiting = sorted((text for text in self.waiting if not text.ended), key=lambda text: text.turn)
            count, tokens = 0, 0
            for text in waiting:
                tokens += len(text.text.ids)
                if count and tokens > self.budget:
                    break
                count += 1
            self.waiting = waiting[count:]
            self._now = max([self._now, *(text.turn for text in waiting[:count])])
            return waiting[:count]


class Called(Served, ABC):
    """A model that is used through calls of the Python API."""

    def __init__(self, name: str, model: AnyModel, worker: Worker, *, exact: bool = False) -> None:
        super().__init__(name, model, worker, exact=exact)
        self._threads = ThreadPoolExecutor(max(1, worker.most), f"headway-{name}")
        self._live = 0

    @property
    @abstractmethod
    def engine(self) -> Steps:
        """The engine that all calls share."""

    @abstractmethod
    def asking(self, run: Run) -> Any:
        """Returns a copy of the model for one call, whose jobs go to `run`; that blocks until the engine has finished
        them."""

    async def call(self, act: Callable[[Any], T]) -> tuple[T, int]:
        """Returns the result of a call and the number of tokens that it read. If the caller is cancelled, so is the
        call's work in the engine. Raises what the call and `Worker.write` raise, Busy for too many calls, and
        ConfigError for too many tokens."""
        if self._live >= self._worker.most:
            raise Busy(f"{self._live} requests are running, the limit; retry later")
        loop, waits, tokens, is_over = asyncio.get_running_loop(), list[Future[None]](), 0, False

        async def write(texts: Sequence[Job]) -> None:
            async for _ in self._worker.write(self.engine, texts):
                pass

        def run(texts: Sequence[Job]) -> None:
            nonlocal tokens
            tokens += sum(text.request.prompt_tokens for text in texts)
            if tokens > MOST_TOKENS:
                raise ConfigError(f"the request has more than {MOST_TOKENS} tokens, the limit; send less")
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
    """An encoder. With `exact` its texts are read one at a time."""

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
    """An encoder-decoder. For `exact`, see `GenerationConfig`."""

    @cached_property
    def engine(self) -> Engine:
        return Engine(reader_of(self.model.model, exact=self.exact))

    def asking(self, run: Run) -> Translator:
        def write(model: Any, jobs: Sequence[Job], draft: Any = None, most: Any = None) -> Iterator[None]:
            run(jobs)
            yield

        model: Translator = copy(self.model)
        model.engine = OpenEngine(keep=0)
        model.engine.run = write  # type: ignore[method-assign]
        return model


def served_as(name: str, model: AnyModel, worker: Worker, *, keep: int, exact: bool = False) -> Served:
    """Returns the served model of a loaded one. For `keep` and `exact`, see `Decoding`. Raises ConfigError for an
    encoder without a head, which has no task to serve."""
    if isinstance(model, LanguageModel):
        return Decoding(name, model, worker, keep=keep, exact=exact)
    if isinstance(model, Translator):
        return Translating(name, model, worker, exact=exact)
    if not model.heads:
        raise ConfigError(
            f"{name} is an encoder without a head, which has no task to serve; save it as an embedder: "
            'headway.load(MODEL, task="embed").save(FOLDER)'
        )
    return Encoding(name, model, worker, exact=exact)
