"""The cache of a layer that grows in place.

Legend: B rows, K kv heads, S tokens so far, T new ones, D per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

LEAST = 64
"""Tokens that room is made for at first."""


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """`DynamicLayer` whose keys and values [B, K, S, D] are the begin of memory that doubles when it is full: a new
    token is written where it belongs, and nothing is copied for it."""

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
        own = [self._with_room(i, new, past, count) for i, new in enumerate((key_states, value_states))]
        self._room = own[0], own[1]
        for room, new in zip(self._room, (key_states, value_states), strict=True):
            room[:, :, past:count] = new
        self.keys, self.values = (room[:, :, :count] for room in self._room)
        return self.keys, self.values

    def _with_room(self, which: int, new: Tensor, past: int, count: int) -> Tensor:
        """Memory for `count` tokens that begins with those which are kept: the same one, where they lie there still."""
        kept: Any = (self.keys, self.values)[which]
        room = None if self._room is None else self._room[which]
        if room is not None and room.shape[2] >= count and kept.shape[0] == room.shape[0]:
            where = kept.data_ptr(), kept.stride()
            if where == (room.data_ptr(), room.stride()):
                return room
        made = new.new_empty(*new.shape[:2], max(LEAST, 2 * count), new.shape[3])
        if past:
            made[:, :, :past] = kept
        return made


def growing(cache: Cache) -> None:
    """Has the layers of a cache that is empty yet grow in place, those that join tensors for each token."""
    make: Any = GrowingLayer
    cache.layers = [
        make() if type(one) is DynamicLayer and not one.is_initialized else one for one in cache.layers
    ]
    if cache.layer_class_to_replicate is DynamicLayer:
        cache.layer_class_to_replicate = GrowingLayer
