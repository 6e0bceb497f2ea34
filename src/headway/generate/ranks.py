"""Engines of a model sharded across ranks: rank 0 schedules, and the other ranks repeat its calls.

    texts = led(model, lambda: generate(model, prompts))        on every rank; None on all but the first

On rank 0 engines run as usual. Each call of their readers that changes what is stored (opening, forking or closing a
sequence, reading the tokens of a step) is sent to the other ranks, which make the same call with pages of their own
heads. The pages that a call takes depend only on the calls before it, so that page numbers are equal on all ranks. The
logits are gathered on every rank, and rank 0 chooses tokens from them.
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
"""The calls of a reader that change what is stored; an engine uses no others."""
T = TypeVar("T")
_leaders: "WeakKeyDictionary[nn.Module, Leader]" = WeakKeyDictionary()


def led(model: Decoder | EncoderDecoder, body: Callable[[], T], *, beat: float = 60.0) -> T | None:
    """Calls `body` on rank 0 and returns its result. The other ranks of a sharded model (`shard`) serve its reads until
    it ends, and return None. A model that is not sharded is read by this process alone.

    In `body` any generation by an engine may be called, from any thread, but not the model's own forward, which all
    ranks have to call. `beat`: after this many seconds without a step rank 0 sends a sign of life; it must be less than
    the time that the others wait for a message (`joined(patience=)`). Raises what `body` raises, and ConfigError if the
    model is led already."""
    shards = shards_of(model)
    if shards is None:
        return body()
    if shards.tensor.exchange.rank:
        _follow(model, shards.tensor.exchange)
        return None
    if model in _leaders:
        raise ConfigError("led: this model is led already; call generate inside the body that runs")
    with Leader(model, shards.tensor.exchange).beating(beat) as leader:
        _leaders[model] = leader
        try:
            return body()
        finally:
            del _leaders[model]


def reader_of(model: Decoder | EncoderDecoder, **how: Any) -> Reader:
    """Returns `Reader(model, **how)`; if the model is led, a reader whose calls are sent to the other ranks."""
    return Reader(model, **how) if model not in _leaders else _leaders[model].reader(**how)


class Leader:
    """Rank 0 of a model: collects the calls of its readers for the other ranks, and numbers page tables and readers."""

    def __init__(self, model: Decoder | EncoderDecoder, exchange: Exchange) -> None:
        self.model, self.exchange = model, exchange
        self._numbers: WeakKeyDictionary[object, int] = WeakKeyDictionary()
        self._next = count()
        self._calls: list[bytes] = []
        self._gone: deque[int] = deque()  # numbers of readers that were garbage-collected
        self._lock, self._inside = threading.RLock(), False

    def reader(self, **how: Any) -> Reader:
        """Returns a reader whose calls are sent to the other ranks."""
        reader: Reader = self._tell(None, "", Reader)(self.model, **how)
        finalize(reader, self._gone.append, self._numbers[reader])
        for path in TOLD:
            owner, _, name = path.rpartition(".")
            if (of := attrgetter(owner)(reader) if owner else reader) is not None:
                setattr(of, name, self._tell(self._numbers[reader], path, getattr(of, name)))
        return reader

    def _tell(self, number: int | None, path: str, act: Callable[..., T]) -> Callable[..., T]:
        """Wraps `act` so that the other ranks make the same call; collected calls are sent with each read."""

        def told(*args: Any, **named: Any) -> T:
            with self._lock:
                if self._inside:  # a nested call: the other ranks make it within the outer one
                    return act(*args, **named)
                file = BytesIO()  # packed now: the call may change its arguments
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
        """Sends empty messages at this interval while open, and a final one on exit."""
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
            with self._lock:  # a thread of the body may still be reading
                self._send(ends=True)


def _follow(model: Decoder | EncoderDecoder, exchange: Exchange) -> None:
    """Repeats the calls of rank 0 until it ends. HeadwayErrors are ignored, since rank 0 raises the same and handles
    them."""
    objects: dict[int, Any] = {}
    numbers, ends = count(), False
    while not ends:
        size = torch.zeros(1, dtype=torch.int64)
        exchange.start(None, 0, size, 0)()
        message = torch.empty(int(size), dtype=torch.uint8)
        exchange.start(None, 0, message, 0)()
        calls, gone, ends = pickle.loads(message.numpy().tobytes())
        for call in calls:
            number, path, args, kwargs = _Unpacker(BytesIO(call), model, objects).load()
            try:
                result = (Reader if number is None else attrgetter(path)(objects[number]))(*args, **kwargs)
            except HeadwayError:
                continue
            objects.update({next(numbers): made for made in _made(result)})
            if path.endswith("close"):
                objects = {n: item for n, item in objects.items() if item is not args[0]}
        for number in gone:
            del objects[number]


def _made(result: object) -> list[Any]:
    """Returns the page tables and readers in a call's result, which are referred to by number afterwards."""
    results = result if isinstance(result, list) else [result]
    return [item for item in results if isinstance(item, PageTable | Reader)]


class _Packer(pickle.Pickler):
    """Pickles a page table as its number, and the model as -1."""

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
