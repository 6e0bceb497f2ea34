"""Watches whether a text's logits are bitwise equal whichever reader and batch computes them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.cache import PageTable
from headway.generate import Reader


class Bits:
    """The logits after every text that the watched readers read: the first reader sets them, later ones must agree."""

    def __init__(self) -> None:
        self.of_text: dict[object, Tensor] = {}
        self.agreed, self.differed = 0, list[object]()

    def watch(self, reader: Reader) -> Reader:
        read = reader.read

        def watched(
            chunks: Sequence[tuple[PageTable, Sequence[int]]],
            wanted: Sequence[Sequence[int]],
            sources: Sequence[PageTable] = (),
            adapters: Sequence[Sequence[str] | None] = (),
        ) -> Tensor:
            logits = read(chunks, wanted, sources, adapters)
            rows = iter(logits)
            for i, ((table, ids), slots) in enumerate(zip(chunks, wanted, strict=True)):
                start = len(table) - len(ids)
                for slot in slots:
                    source = tuple(sources[i].ids) if sources else None
                    names = None if adapters[i] is None else frozenset(adapters[i])
                    self.check((tuple(table.ids[: start + slot + 1]), source, names), next(rows))
            return logits

        reader.read = watched  # type: ignore[method-assign]
        return reader

    def check(self, text: object, logits: Tensor) -> None:
        if text not in self.of_text:
            self.of_text[text] = logits.clone()
        elif torch.equal(logits, self.of_text[text]):
            self.agreed += 1
        else:
            self.differed.append(text)
