"""Attention maps of texts, computed beside generation, one at a time. Queries attend to the keys that the prefix cache
holds, if these suffice; otherwise the whole text is read."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar
from weakref import ref

import torch
from fastapi import Request

from headway.api import AttentionMaps, LanguageModel
from headway.api.looking import token_texts
from headway.errors import ConfigError
from headway.generate.reader import evaluating
from headway.models.attention_maps import attention_maps, attention_record
from headway.serve.errors import Busy
from headway.serve.models import in_passing
from headway.serve.served import Decoding
from headway.serve.streams import unless_gone

MOST_BYTES = 1 << 30
"""Maximum bytes of queries, keys, values and hidden states that are recorded when a whole text is read."""
MOST_WAITING = 8
"""Maximum number of looks that are being computed or wait; they are computed one at a time."""
T = TypeVar("T")


def check_size(model: Decoding, count: int) -> None:
    """Raises ConfigError if `count` tokens are too many to read as a whole."""
    spec, size = model.lm.spec, model.lm.model.stack.like.element_size()
    numbers = sum((spec.heads + 2 * kv_heads) * head_dim for kv_heads, head_dim in spec.key_sizes)
    token_bytes = (numbers + spec.width * (spec.layers + 1)) * size
    if count * token_bytes > MOST_BYTES:
        raise ConfigError(
            f"attention: {count} tokens of this model take {count * token_bytes} bytes of queries, keys, values "
            f"and states, more than {MOST_BYTES}; give at most {MOST_BYTES // token_bytes} tokens"
        )


class Look:
    """A text whose attention is inspected: its keys and values, and the maps of the tokens that were last asked for.

    A token takes a pass over that token alone, against the keys of the prefix cache. If a key that it attends to was
    released, one pass over the whole text serves all of its tokens.

    stored: number of tokens whose keys the prefix cache held in all layers; 0 once the whole text has been read.
    computed: number of tokens that were computed.
    """

    def __init__(self, model: Decoding, ids: Sequence[int], salt: str) -> None:
        self._ids, self._maps = ids, list[tuple[Sequence[int], AttentionMaps]]()
        reader = model.engine.reader
        self._text = model.between(lambda: reader.stored(ids, model.adapters, salt))
        self.stored = self.computed = 0
        if self._text is not None:
            self.stored = int(torch.stack(self._text.held).all(0).sum())
            missing = range(self._text.end, len(ids))
            if missing and self._text.sees(missing):
                self.maps(model, missing)

    def sees(self, number: int) -> bool:
        """Returns whether a token needs no new pass over the whole text."""
        return self._text is None or self._text.sees([number])

    def maps(self, model: Decoding, numbers: Sequence[int]) -> tuple[AttentionMaps, list[int]]:
        """Returns maps whose queries include these tokens, which must ascend, and the tokens' indices among the
        queries. Raises ConfigError if the whole text must be read and is too long."""
        for i, (queries, maps) in enumerate(self._maps):
            if {*numbers} <= {*queries}:
                self._maps.insert(0, self._maps.pop(i))
                return maps, [queries.index(number) for number in numbers]
        lm, stack, inputs = model.lm, model.lm.model.stack, dict[str, Any]()
        if self._text is not None and self._text.sees(numbers):
            inputs, queried = {"cache": self._text.cache, "tokens": self._text.begin(numbers)}, numbers
        else:
            check_size(model, len(self._ids))
            self._text, self.stored, queried = None, 0, range(len(self._ids))
        record, texts = attention_record(stack, None), token_texts(lm.tokenizer, self._ids)
        ids = torch.tensor([[self._ids[number] for number in queried]], device=stack.like.device)
        with model.alone(), evaluating(lm.model):
            lm.model.hidden(ids, **inputs, record=record)
        self.computed += len(queried)
        new = attention_maps(record, stack, None, [texts[number] for number in queried], texts)
        self._maps = [(queried, new), *self._maps[:2]]
        return self.maps(model, numbers)


class Looking:
    """Runs looks one at a time, each in a short-lived thread (`in_passing`), and keeps the last text that was
    inspected."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headway-looks")
        self._waiting: set[Future[Any]] = set()
        self._last: tuple[ref[LanguageModel], Any, Look] | None = None

    async def run(self, work: Callable[[], T], request: Request) -> T:
        """Returns the result of `work`, run after the looks that wait already; it is not started if the client
        disconnects first. Raises Busy if too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} attention requests are running or waiting, the limit; retry later")
        future = self._thread.submit(in_passing, work)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return await unless_gone(asyncio.wrap_future(future), request)

    def at(self, model: Decoding, ids: Sequence[int], salt: str = "") -> Look:
        """Returns the look at a text, with what the prefix cache holds of it under this salt. Its `computed` counts
        from this call."""
        key = [*ids], model.adapters, salt
        if self._last is not None and self._last[0]() is model.lm and self._last[1] == key:
            self._last[2].computed = 0
        else:
            self._last = None  # frees its memory before the next is made
            self._last = ref(model.lm), key, Look(model, ids, salt)
        return self._last[2]
