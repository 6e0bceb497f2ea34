"""Looking into models: what their layers attend to in a text, beside the thread that writes and never in its way."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import ref

from fastapi import Request

from headway.api import AttentionMaps, LanguageModel
from headway.errors import ConfigError
from headway.serve.errors import Busy
from headway.serve.streams import unless_gone

T = TypeVar("T")
MOST_BYTES = 1 << 30
"""Of what is kept of a text while it is looked at: queries, keys, values and states."""
MOST_WAITING = 8
"""Looks that are computed or wait at once, one of them at a time."""


class Looking:
    """A thread of its own, and the maps of the last text that was looked at: another layer, head or token of it costs
    no more than a row of weights."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headway-looks")
        self._waiting: set[Future[Any]] = set()
        self._last: tuple[ref[LanguageModel], list[int], AttentionMaps] | None = None

    async def run(self, work: Callable[[], T], request: Request) -> T:
        """What `work` returns, in the thread; it is not begun when the client has left before. Raises Busy where too
        many wait."""
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} looks into models are being computed or wait; ask again")
        future = self._thread.submit(work)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return await unless_gone(asyncio.wrap_future(future), request)

    def check(self, lm: LanguageModel, ids: Sequence[int]) -> None:
        """Raises ConfigError for a text that is too long to be looked at as a whole."""
        spec, size = lm.spec, lm.model.stack.like.element_size()
        each = (spec.heads + 2 * spec.kv_heads) * spec.head_dim * spec.layers
        need = (each + spec.width * (spec.layers + 1)) * size
        if len(ids) * need > MOST_BYTES:
            raise ConfigError(
                f"attention: {len(ids)} tokens of this model take {len(ids) * need} bytes of queries, keys, values "
                f"and states, and there are {MOST_BYTES}; give at most {MOST_BYTES // need} tokens"
            )

    def maps(self, lm: LanguageModel, ids: Sequence[int]) -> AttentionMaps:
        """`lm.attention(ids)`. Raises as `check`."""
        if self._last is None or self._last[0]() is not lm or self._last[1] != [*ids]:
            self.check(lm, ids)
            self._last = None  # makes room first
            self._last = ref(lm), [*ids], lm.attention(ids)
        return self._last[2]
