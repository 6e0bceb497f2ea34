"""Which tokens a search may take next, and at what price.

    repetition penalty -> forbidden -> no repeated n-gram -> no early end -> forced first and last token

Legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.generate.sampling import RepetitionPenalty


@dataclass(frozen=True)
class Text:
    """Where a row stands: its prompt, its new tokens so far, and how many new tokens it may have in all."""

    prompt: Sequence[int]
    ids: Sequence[int]
    room: int


@dataclass(frozen=True, kw_only=True)
class TokenConstraints:
    """The order is that of `transformers`; numbers that are changed are not made to sum to 1 again.

    eos: ids that end a text.   forbidden: ids that are never taken.
    repetition_penalty: as in `RepetitionPenalty`, over prompt and text.
    no_repeat_ngram: no n tokens in a row occur twice in prompt and text (0: they may).
    min_new_tokens: no EOS among so many first tokens.
    forced_first, forced_last: this id is the first new token, or the last one when the room is used up; it is
        certain then, so that its log probability is 0.
    """

    eos: frozenset[int] = frozenset()
    forbidden: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    min_new_tokens: int = 0
    forced_first: int | None = None
    forced_last: int | None = None

    def __call__(self, values: Tensor, texts: Sequence[Text]) -> Tensor:
        """Logits or log probabilities [R, V] of the next token -> the same, -inf where a token may not be taken."""
        values = values.clone()
        if self.repetition_penalty != 1:
            seen = torch.zeros_like(values, dtype=torch.bool)
            for row, text in zip(seen, texts, strict=True):
                row[torch.tensor([*text.prompt, *text.ids], device=values.device)] = True
            values = RepetitionPenalty(self.repetition_penalty)(values, seen)
        vocab = values.shape[-1]
        for row, text in zip(values, texts, strict=True):
            forced = self.forced(text)
            if forced is not None:
                row.fill_(float("-inf"))
                row[forced] = 0.0
            elif banned := self.banned(text, vocab):
                row[torch.tensor(sorted(banned), device=values.device)] = float("-inf")
        return values

    def forced(self, text: Text) -> int | None:
        """The only token that may come next, if there is but one."""
        if self.forced_last is not None and len(text.ids) == text.room - 1:
            return self.forced_last
        return self.forced_first if not text.ids else None

    def banned(self, text: Text, vocab: int) -> set[int]:
        """Tokens that may not come next."""
        banned = set(self.forbidden)
        n = self.no_repeat_ngram
        if n and n <= len(past := [*text.prompt, *text.ids]):
            end = past[len(past) - n + 1 :]
            banned |= {past[i + n - 1] for i in range(len(past) - n + 1) if past[i : i + n - 1] == end}
        if len(text.ids) < self.min_new_tokens:
            banned |= self.eos
        return {i for i in banned if 0 <= i < vocab}
