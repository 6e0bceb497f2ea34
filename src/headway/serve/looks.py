"""Looks into models, beside the thread that writes: one at a time, each from the keys that pages hold of its text where
they do, else from a pass over all of it."""

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
"""The most bytes that are kept of a text that is read as a whole: queries, keys, values and states."""
MOST_WAITING = 8
"""Looks that are computed or wait at once, one of them at a time."""
T = TypeVar("T")


def check_size(model: Decoding, count: int) -> None:
    """Raises ConfigError for a text that is too long to be read as a whole."""
    spec, size = model.lm.spec, model.lm.model.stack.like.element_size()
    each = sum((spec.heads + 2 * kv_heads) * head_dim for kv_heads, head_dim in spec.key_sizes)
    need = (each + spec.width * (spec.layers + 1)) * size
    if count * need > MOST_BYTES:
        raise ConfigError(
            f"attention: {count} tokens of this model take {count * need} bytes of queries, keys, values "
            f"and states, and there are {MOST_BYTES}; give at most {MOST_BYTES // need} tokens"
        )


class Look:
    """A text that is looked at: its keys and values, and what was made of the last tokens that were asked for. A token
    takes a pass of that token alone, over keys that pages hold; where one that it attends to was released, a pass over
    the whole text, which is for all of its tokens.

    stored: tokens whose keys pages held in all layers; 0 where the text was read as a whole.
    computed: tokens that passes computed.
    """

    def __init__(self, model: Decoding, ids: Sequence[int], salt: str) -> None:
        self._ids, self._maps = ids, list[tuple[Sequence[int], AttentionMaps]]()
        reader = model.engine.reader
        self._text = model.between(lambda: reader.stored(ids, model.adapters, salt))
        self.stored = self.computed = 0
        if self._text is not None:
            self.stored = int(torch.stack(self._text.held).all(0).sum())
            rest = range(self._text.end, len(ids))
            if rest and self._text.sees(rest):
                self.maps(model, rest)

    def sees(self, number: int) -> bool:
        """Whether a token needs no pass over the whole text."""
        return self._text is None or self._text.sees([number])

    def maps(self, model: Decoding, numbers: Sequence[int]) -> tuple[AttentionMaps, list[int]]:
        """Maps with these tokens, which ascend, among their queries, and where they are there. Raises ConfigError for a
        text that is too long to be read as a whole."""
        for i, (queries, maps) in enumerate(self._maps):
            if {*numbers} <= {*queries}:
                self._maps.insert(0, self._maps.pop(i))
                return maps, [queries.index(number) for number in numbers]
        lm, stack, over = model.lm, model.lm.model.stack, dict[str, Any]()
        if self._text is not None and self._text.sees(numbers):
            over, some = {"cache": self._text.cache, "tokens": self._text.begin(numbers)}, numbers
        else:
            check_size(model, len(self._ids))
            self._text, self.stored, some = None, 0, range(len(self._ids))
        record, texts = attention_record(stack, None), token_texts(lm.tokenizer, self._ids)
        row = torch.tensor([[self._ids[number] for number in some]], device=stack.like.device)
        with model.alone(), evaluating(lm.model):
            lm.model.hidden(row, **over, record=record)
        self.computed += len(some)
        new = attention_maps(record, stack, None, [texts[number] for number in some], texts)
        self._maps = [(some, new), *self._maps[:2]]
        return self.maps(model, numbers)


class Looking:
    """One look at a time, each in a thread that ends with it (`in_passing`), and the last text that was looked at."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headway-looks")
        self._waiting: set[Future[Any]] = set()
        self._last: tuple[ref[LanguageModel], Any, Look] | None = None

    async def run(self, work: Callable[[], T], request: Request) -> T:
        """The result of `work`, behind the looks before it; it is not begun when the client has left before. Raises
        Busy where too many wait."""
        if len(self._waiting) >= MOST_WAITING:
            raise Busy(f"{MOST_WAITING} looks into models are being computed or wait; ask again")
        future = self._thread.submit(in_passing, work)
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return await unless_gone(asyncio.wrap_future(future), request)

    def at(self, model: Decoding, ids: Sequence[int], salt: str = "") -> Look:
        """The look at a text, with what pages hold of it for who has this salt. It has computed nothing yet."""
        of = [*ids], model.adapters, salt
        if self._last is not None and self._last[0]() is model.lm and self._last[1] == of:
            self._last[2].computed = 0
        else:
            self._last = None  # makes room first
            self._last = ref(model.lm), of, Look(model, ids, salt)
        return self._last[2]
