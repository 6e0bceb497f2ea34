"""Engines of a model whose layers are shared by ranks: rank 0 schedules, and tells the others what it reads.

    texts = led(model, lambda: generate(model, prompts))        on every rank; None on all but the first

On rank 0 engines run as they always do. Each call of their readers that changes what is stored (a text that begins,
forks or ends, the tokens of a step) is told to the other ranks, which make the same call with pages of their own heads.
Which pages a call takes follows from the calls before it, so that page numbers are equal on all ranks. Logits come
together on each, and rank 0 chooses tokens from them.
"""

import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from itertools import count
from operator import attrgetter
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, finalize

import torch
from torch import nn

from headway.cache import PageTable
from headway.errors import ConfigError, HeadwayError
from headway.generate.reader import Reader
from headway.models import Decoder, EncoderDecoder
from headway.models.tensor_parallel import shards_of
from headway.parallel import Exchange

TOLD = (
    *("open", "read", "trim", "end", "cache.shrink", "cache.pool.fork", "cache.pool.close"),
    *("sources.read", "sources.close"),
)
"""The calls of a reader that change what is stored; all of an engine go by these."""
T = TypeVar("T")
_leaders: "WeakKeyDictionary[nn.Module, Leader]" = WeakKeyDictionary()


def led(model: Decoder | EncoderDecoder, body: Callable[[], T], *, beat: float = 60.0) -> T | None:
    """Calls `body` on rank 0 and returns its result; None on the other ranks of a model that is shared (`shard`), which
    read with it until `body` ends. A model that is not shared is read by this process alone.

    In `body` whatever generates by an engine may be called, from any thread; the forward of the model itself may not,
    since all ranks have to make it. `beat`: after so many seconds without a step rank 0 tells that it is still there;
    less than the others wait for a message (`joined(patience=)`). Raises what `body` raises, ConfigError for a model
    that is led already."""
    shards = shards_of(model)
    if shards is None:
        return body()
    if shards.tensor.exchange.rank:
        _follow(model, shards.tensor.exchange)
        return None
    if model in _leaders:
        raise ConfigError("led: rank 0 reads with this model already; call generate in the body that runs")
    with Leader(model, shards.tensor.exchange).beating(beat) as leader:
        _leaders[model] = leader
        try:
            return body()
        finally:
            del _leaders[model]


def reader_of(model: Decoder | EncoderDecoder, **how: Any) -> Reader:
    """`Reader(model, **how)`; of a model that is led, one whose calls the other ranks are told."""
    return Reader(model, **how) if model not in _leaders else _leaders[model].reader(**how)


class Leader:
    """Rank 0 of a model: collects the calls of its readers for the other ranks, and numbers tables and readers."""

    def __init__(self, model: Decoder | EncoderDecoder, exchange: Exchange) -> None:
        self.model, self.exchange = model, exchange
        self._numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._next = count()
        self._calls: list[bytes] = []
        self._gone: deque[int] = deque()  # readers that are used no longer
        self._lock, self._inside = threading.RLock(), False

    def reader(self, **how: Any) -> Reader:
        """A reader whose calls the other ranks are sent."""
        reader: Reader = self._tell(None, "", Reader)(self.model, **how)
        finalize(reader, self._gone.append, self._numbers[reader])
        for path in TOLD:
            owner, _, name = path.rpartition(".")
            if (of := attrgetter(owner)(reader) if owner else reader) is not None:
                setattr(of, name, self._tell(self._numbers[reader], path, getattr(of, name)))
        return reader

    def _tell(self, number: int | None, path: str, act: Callable[..., T]) -> Callable[..., T]:
        """Wraps `act` so that the other ranks make the same call; calls are sent when a step is read."""

        def told(*args: Any, **named: Any) -> T:
            with self._lock:
                if self._inside:  # a call that another one makes
                    return act(*args, **named)
                file = BytesIO()  # of the call as it is now
                _Packer(file, self.model, self._numbers).dump((number, path, args, named))
                self._calls.append(file.getvalue())
                if path.endswith("read"):
                    self._send()
                self._inside = True
                try:
                    result = act(*args, **named)
                finally:
                    self._inside = False
                for made in _made(result):
                    self._numbers[made] = next(self._next)
                return result

        return told

    def _send(self, ends: bool = False) -> None:
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        message = torch.frombuffer(bytearray(pickle.dumps((self._calls, gone, ends))), dtype=torch.uint8)
        self._calls = []
        for part in (torch.tensor([len(message)]), message):
            for rank in range(1, self.exchange.ranks):
                self.exchange.start(part, rank, None, rank)()

    @contextmanager
    def beating(self, seconds: float) -> "Iterator[Leader]":
        """Tells the others now and then that there is nothing to do, and at last that this is the end."""
        ended = threading.Event()

        def beat() -> None:
            while not ended.wait(seconds):
                with self._lock:
                    self._send()

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            ended.set()
            thread.join()
            with self._lock:  # a thread of the body may be reading yet
                self._send(ends=True)


def _follow(model: Decoder | EncoderDecoder, exchange: Exchange) -> None:
    """Makes the calls of rank 0 until it ends. What it raises there is raised here, too: rank 0 knows what follows."""
    things: dict[int, Any] = {}
    numbers, ends = count(), False
    while not ends:
        size = torch.zeros(1, dtype=torch.int64)
        exchange.start(None, 0, size, 0)()
        message = torch.empty(int(size), dtype=torch.uint8)
        exchange.start(None, 0, message, 0)()
        calls, gone, ends = pickle.loads(message.numpy().tobytes())
        for call in calls:
            number, path, args, named = _Unpacker(BytesIO(call), model, things).load()
            try:
                result = (Reader if number is None else attrgetter(path)(things[number]))(*args, **named)
            except HeadwayError:
                continue
            things.update({next(numbers): made for made in _made(result)})
            if path.endswith("close"):
                things = {n: thing for n, thing in things.items() if thing is not args[0]}
        for number in gone:
            del things[number]


def _made(result: object) -> list[Any]:
    """The tables and readers among what a call returns, which are known by numbers from then on."""
    results = result if isinstance(result, list) else [result]
    return [item for item in results if isinstance(item, PageTable | Reader)]


class _Packer(pickle.Pickler):
    """Writes a table as its number, and the model as -1."""

    def __init__(self, file: BytesIO, model: nn.Module, numbers: Mapping[object, int]) -> None:
        super().__init__(file)
        self._model, self._numbers = model, numbers

    def persistent_id(self, thing: object) -> int | None:
        return -1 if thing is self._model else self._numbers[thing] if isinstance(thing, PageTable) else None


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: BytesIO, model: nn.Module, things: dict[int, Any]) -> None:
        super().__init__(file)
        self._things = {-1: model, **things}

    def persistent_load(self, number: int) -> Any:
        return self._things[number]
