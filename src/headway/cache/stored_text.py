"""A copy of one sequence's keys and values in token order: any of its tokens can be recomputed over them, in isolation.

Legend: T tokens of a step, S of the sequence, K kv heads, D per key, E per value.
"""

from collections.abc import Hashable, Sequence
from copy import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.cache.page_table import PAGE, PageTable, root_key
from headway.cache.paged_cache import PagedCache
from headway.cache.paged_step import PagedStep, Places
from headway.tokens import Tokens


class ComputedAgain(PagedStep):
    """A step that recomputes some tokens of a sequence, by their indices [T], attending to those of its keys that are
    `held`."""

    def __init__(self, numbers: Tensor, held: Sequence[Tensor]) -> None:
        self.tokens, self.tables, self.is_fresh = Tokens(numbers.unsqueeze(0)), [], False
        self.runs = [numbers for _ in held]
        slots = torch.arange(len(held[0]), device=numbers.device)
        order = slots.int().unsqueeze(0)
        key_indices = (torch.where(mask, slots, -1).unsqueeze(0) for mask in held)
        self._places = {of: Places(Tokens(index), order) for of, index in enumerate(key_indices)}


@dataclass(eq=False)
class StoredText:
    """A copy of a sequence's keys and values, k [1, K, S, D] and v [1, K, S, E] in each layer; zeros for missing keys.

    cache: pass it to the model with the tokens of `begin`.   held: which keys are present, bool [S] for each class.
    """

    cache: PagedCache
    held: list[Tensor]

    @staticmethod
    def of(cache: PagedCache, ids: Sequence[int], root: Hashable = ()) -> "StoredText | None":
        """Copies what the pages of a cache hold of a sequence under `root`; None if a class holds none of its pages, or
        holds states."""
        table, count, replica = PageTable(root_key(root), list(ids), []), len(ids), copy(cache)
        replica.layers, held = [copy(layer) for layer in cache.layers], list[Tensor]()
        for of, pages in enumerate(cache.pool.stored):
            keys = [table.key(number) for number in range(count // PAGE)]
            pairs = [(number, pages.page[key]) for number, key in enumerate(keys) if key in pages.page]
            if pages.kind.state or not pairs:
                return None
            slots = torch.tensor(pairs, device=cache.device).T.unsqueeze(2) * PAGE
            positions, stored = (slots + torch.arange(PAGE, device=cache.device)).flatten(1)
            held.append(
                torch.zeros(count, dtype=torch.bool, device=cache.device).index_fill_(0, positions, True)
            )
            for layer in replica.layers:
                if layer.of == of:
                    layer.cache = replica
                    layer.tensors = tuple(
                        t.new_zeros(*t.shape[:2], count, *t.shape[3:]).index_copy_(
                            2, positions, t[:, :, stored]
                        )
                        for t in layer.tensors
                    )
        return StoredText(replica, held)

    @property
    def end(self) -> int:
        """One more than the index of the last token whose keys all layers hold."""
        return 1 + min(int(mask.nonzero().max()) for mask in self.held)

    def sees(self, numbers: Sequence[int]) -> bool:
        """Returns whether all keys that these tokens attend to are held in every layer, or belong to these tokens
        themselves."""
        indices = torch.tensor([*numbers], device=self.cache.device)
        for kind, held in zip(self.cache.pool.classes, self.held, strict=True):
            known, retention = held.index_fill(0, indices, True), kind.retention
            if not all(
                known[retention.first(n) : n].all() and known[: min(n, retention.sinks)].all()
                for n in numbers
            ):
                return False
        return True

    def begin(self, numbers: Sequence[int]) -> Tokens:
        """Returns the tokens of a step that recomputes these tokens, in ascending order; their keys are held from then
        on."""
        with torch.inference_mode(False):  # as in PagedCache.begin
            at = torch.tensor([*numbers], device=self.cache.device)
            for mask in self.held:
                mask[at] = True
            self.cache.step = ComputedAgain(at, self.held)
        return self.cache.step.tokens
