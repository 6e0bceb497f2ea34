"""A paged slot policy, written outside the package: the interface is enough for it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from headway.cache import SlotPolicy
from headway.tokens import Tokens


@dataclass(frozen=True)
class Paged(SlotPolicy):
    """Pages of `page` neighbouring slots, each of one document: token i is in place i mod page of its page i // page,
    which is any page that was free when its first token came. A page is free when none of its tokens is kept."""

    name = "paged"
    page: int = 4

    def place(self, held: Tokens, row_N: Tensor, new: Tokens) -> Tensor:
        pages: dict[tuple[int, int, int], int] = {}
        for row, slot in held.valid.nonzero().tolist():
            document, index = int(held.documents[row, slot]), int(held.index[row, slot])
            pages[row, document, index // self.page] = slot // self.page
        slots = []
        for row, document, index in zip(
            row_N.tolist(), new.documents[0].tolist(), new.index[0].tolist(), strict=True
        ):
            key = (row, document, index // self.page)
            if key not in pages:
                used = {page for (other, *_), page in pages.items() if other == row}
                pages[key] = next(page for page in count() if page not in used)
            slots.append(pages[key] * self.page + index % self.page)
        return torch.tensor(slots, dtype=torch.int64)
