"""Constraints on the next token: which ids may come, and changes of their logits, in this order.

    repetition penalty -> penalties of counts -> bias -> forbidden -> grammar -> no repeated n-gram -> no early end
    -> forced first tokens and last one

Legend: R rows, V vocab.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from headway.cache import PageTable
from headway.generate.config import GenerationConfig, Grammar
from headway.generate.requests import Request
from headway.generate.sampling import penalize_counts, penalize_repetition


@dataclass(eq=False)
class Text:
    """A text that grows: its request, its new tokens, and the table of its pages; None while it waits."""

    request: Request
    ids: list[int]
    table: PageTable | None = None
    _seen: Tensor | None = field(default=None, repr=False)
    _state: Grammar | None = field(default=None, repr=False)

    @property
    def tokens(self) -> list[int]:
        """All tokens, those of the prompt first."""
        return [*self.request.prompt, *self.ids]

    @property
    def rest(self) -> list[int]:
        """The tokens that the model has yet to read."""
        return self.tokens if self.table is None else self.tokens[len(self.table.ids) :]

    @property
    def is_read(self) -> bool:
        """Whether it has been read up to its last token."""
        length = len(self.request.prompt) + len(self.ids)
        return self.table is not None and len(self.table.ids) == length - 1

    def seen(self, like: Tensor) -> Tensor:
        """Which tokens stand in prompt and text: bool [V], on the device of `like` [V]."""
        if self._seen is None:
            self._seen = torch.zeros_like(like, dtype=torch.bool)
            self._seen[torch.tensor(self.tokens, device=like.device)] = True
        return self._seen

    @property
    def state(self) -> Grammar | None:
        """Its place in the grammar of its request, if that has one."""
        if self._state is None and (grammar := self.request.config.grammar) is not None:
            self._state = grammar.copy()
        return self._state

    def append(self, token: int) -> None:
        """Adds one token."""
        if self.state is not None:
            self.state.advance(token)
        self.ids.append(token)
        if self._seen is not None:
            self._seen[token] = True

    def copy(self) -> "Text":
        """An independent copy without pages."""
        return Text(self.request, [*self.ids], _state=None if self._state is None else self._state.copy())


def constrain(values: Tensor, texts: Sequence[Text], config: GenerationConfig) -> Tensor:
    """Logits or log probabilities [R, V] of the next token -> the same, -inf where `config` lets a token not be taken.

    The order is that of `transformers`; numbers that are changed are not made to sum to 1 again. The argument is not
    changed; it is returned itself where nothing constrains."""
    sampling = config.sampling
    if (penalty := sampling.repetition_penalty) != 1:
        values = penalize_repetition(values, penalty, torch.stack([text.seen(values[0]) for text in texts]))
    each, once = sampling.frequency_penalty, sampling.presence_penalty
    if each or once:
        pairs = zip(values, texts, strict=True)
        values = torch.stack([penalize_counts(row, text.ids, each, once) for row, text in pairs])
    if config.bias:
        at = _index(tuple(config.bias), values.shape[-1], values.device)
        bias = values.new_tensor([*config.bias.values()])
        values = values.index_add(-1, at, bias.expand(len(values), -1))
    if config.forbidden:
        never = _index(tuple(config.forbidden), values.shape[-1], values.device)
        values = values.index_fill(-1, never, float("-inf"))
    if config.grammar is not None:
        allowed = torch.stack([text.state.allowed() for text in texts if text.state is not None])
        values = values.masked_fill(~allowed.to(values.device), float("-inf"))
    if not config.constrains:
        return values
    forced = [forced_token(text, config) for text in texts]
    banned = [banned_tokens(text, config) for text in texts]
    if any(token is not None for token in forced) or any(banned):
        values = values.clone()
        for row, token, taken in zip(values, forced, banned, strict=True):
            if token is not None:
                row.fill_(float("-inf"))
                row[token] = 0.0
            elif ids := [i for i in sorted(taken) if 0 <= i < values.shape[-1]]:
                row[torch.tensor(ids, device=values.device)] = float("-inf")
    return values


def forced_token(text: Text, config: GenerationConfig) -> int | None:
    """The only token that may come next, if there is but one."""
    if config.forced_last is not None and len(text.ids) == text.request.max_new_tokens - 1:
        return config.forced_last
    first = [*(() if config.forced_first is None else (config.forced_first,)), *config.prefix]
    return first[len(text.ids)] if len(text.ids) < len(first) else None


def banned_tokens(text: Text, config: GenerationConfig) -> set[int]:
    """Tokens that may not come next, beside those that are always forbidden."""
    banned: set[int] = set()
    n = config.no_repeat_ngram
    if n and n <= len(past := text.tokens):
        end = past[len(past) - n + 1 :]
        # n = 3, past 5 6 7 5 6: the end 5 6 occurred before 7, which is banned
        banned |= {past[i + n - 1] for i in range(len(past) - n + 1) if past[i : i + n - 1] == end}
    if len(text.ids) < config.min_new_tokens:
        banned.update(config.eos)
    return banned


@lru_cache(maxsize=16)
def _index(ids: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """The ids of the vocab as an index."""
    with torch.inference_mode(False):
        return torch.tensor([i for i in ids if 0 <= i < vocab], dtype=torch.int64, device=device)
