"""The cache of a layer that grows in place.

Legend: B rows, K kv heads, S tokens so far, T new ones, C tokens that there is room for, D per head.
"""

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from headway.cache import PAGE


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """`DynamicLayer` whose keys and values [B, K, S, D] are the begin of memory [B, K, C, D] that doubles when it is
    full: a new token is written where it belongs, and nothing is copied for it. C is a multiple of 64."""

    _room: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Keeps the keys and values of new tokens [B, K, T, D]; returns those of all. Tensors with a gradient are
        joined as `DynamicLayer` does."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            self._room = None
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        past = self.get_seq_length()
        count = past + key_states.shape[2]
        for room, new in zip(
            self.with_room(count, key_states, value_states), (key_states, value_states), strict=True
        ):
            room[:, :, past:count] = new
        return self.show(count)

    def with_room(self, count: int, *like: Tensor) -> tuple[Tensor, Tensor]:
        """Memory for `count` keys and values, `like` these but for their number, which begins with those that are kept:
        the same one, where they lie there still."""
        kept: tuple[Any, ...] = self.keys, self.values
        if self._room is None or not all(map(_is_begin, kept, self._room)) or self._room[0].shape[2] < count:
            capacity = -(-2 * count // PAGE) * PAGE
            keys, values = (t.new_empty(*t.shape[:2], capacity, t.shape[3]) for t in like)
            if past := self.get_seq_length():
                keys[:, :, :past], values[:, :, :past] = kept
            self._room = keys, values
        return self._room

    def show(self, count: int) -> tuple[Tensor, Tensor]:
        """Has the first tokens of the memory as keys and values."""
        assert self._room is not None
        self.keys, self.values = (room[:, :, :count] for room in self._room)
        return self.keys, self.values


def _is_begin(kept: Tensor, room: Tensor) -> bool:
    where = kept.data_ptr(), kept.stride(), kept.shape[0]
    return where == (room.data_ptr(), room.stride(), room.shape[0])


def growing(cache: Cache) -> None:
    """Has the layers of a cache grow in place, those that join tensors for each token."""
    for layer in cache.layers:
        if type(layer) is DynamicLayer:
            layer.__class__ = GrowingLayer
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
