"""Constraints on the next token: which ids may come, and changes of their logits, in this order.

    repetition penalty -> frequency and presence penalties -> bias -> forbidden -> grammar -> no repeated n-gram
    -> no early end -> forced first tokens and last one

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
    """A growing sequence: its request, its new tokens, and its page table, which is None while the request waits."""

    request: Request
    ids: list[int]
    table: PageTable | None = None
    _seen: Tensor | None = field(default=None, repr=False)
    _state: Grammar | None = field(default=None, repr=False)

    @property
    def tokens(self) -> list[int]:
        """All tokens: the prompt, then the new ones."""
        return [*self.request.prompt, *self.ids]

    @property
    def rest(self) -> list[int]:
        """The tokens that the model has yet to read."""
        return self.tokens if self.table is None else self.tokens[len(self.table.ids) :]

    @property
    def is_read(self) -> bool:
        """Whether all tokens but the last have been read."""
        length = len(self.request.prompt) + len(self.ids)
        return self.table is not None and len(self.table.ids) == length - 1

    def seen(self, like: Tensor) -> Tensor:
        """Returns which tokens occur in prompt and text: bool [V], on the device of `like` [V]."""
        if self._seen is None:
            self._seen = torch.zeros_like(like, dtype=torch.bool)
            self._seen[torch.tensor(self.tokens, device=like.device)] = True
        return self._seen

    @property
    def state(self) -> Grammar | None:
        """Its state in the grammar of its request; None without a grammar."""
        if self._state is None and (grammar := self.request.config.grammar) is not None:
            self._state = grammar.copy()
        return self._state

    def append(self, token: int) -> None:
        """Adds one new token."""
        if self.state is not None:
            self.state.advance(token)
        self.ids.append(token)
        if self._seen is not None:
            self._seen[token] = True

    def copy(self) -> "Text":
        """Returns an independent copy without pages."""
        return Text(self.request, [*self.ids], _state=None if self._state is None else self._state.copy())


def constrain(values: Tensor, texts: Sequence[Text], config: GenerationConfig) -> Tensor:
    """Applies the constraints to logits or log probabilities [R, V] of the next token; tokens that `config` excludes
    get -inf.

    The order is that of `transformers`; changed log probabilities are not renormalized. The argument is not modified;
    it is returned itself if nothing constrains."""
    sampling = config.sampling
    if (penalty := sampling.repetition_penalty) != 1:
        values = penalize_repetition(values, penalty, torch.stack([text.seen(values[0]) for text in texts]))
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    if frequency or presence:
        rows = zip(values, texts, strict=True)
        values = torch.stack([penalize_counts(row, text.ids, frequency, presence) for row, text in rows])
    if config.bias:
        bias_ids = _index(tuple(config.bias), values.shape[-1], values.device)
        bias = values.new_tensor([*config.bias.values()])
        values = values.index_add(-1, bias_ids, bias.expand(len(values), -1))
    if config.forbidden:
        forbidden = _index(tuple(config.forbidden), values.shape[-1], values.device)
        values = values.index_fill(-1, forbidden, float("-inf"))
    if config.grammar is not None:
        allowed = torch.stack([text.state.allowed() for text in texts if text.state is not None])
        values = values.masked_fill(~allowed.to(values.device), float("-inf"))
    if not config.constrains:
        return values
    forced = [forced_token(text, config) for text in texts]
    banned = [banned_tokens(text, config) for text in texts]
    if any(token is not None for token in forced) or any(banned):
        values = values.clone()
        for row, token, excluded in zip(values, forced, banned, strict=True):
            if token is not None:
                row.fill_(float("-inf"))
                row[token] = 0.0
            elif ids := [i for i in sorted(excluded) if 0 <= i < values.shape[-1]]:
                row[torch.tensor(ids, device=values.device)] = float("-inf")
    return values


def forced_token(text: Text, config: GenerationConfig) -> int | None:
    """Returns the only token that may come next; None if it is not forced."""
    if config.forced_last is not None and len(text.ids) == text.request.max_new_tokens - 1:
        return config.forced_last
    forced = [*(() if config.forced_first is None else (config.forced_first,)), *config.prefix]
    return forced[len(text.ids)] if len(text.ids) < len(forced) else None


def banned_tokens(text: Text, config: GenerationConfig) -> set[int]:
    """Returns tokens that may not come next, besides those that are always forbidden."""
    banned: set[int] = set()
    n = config.no_repeat_ngram
    if n and n <= len(past := text.tokens):
        end = past[len(past) - n + 1 :]
        # n = 3, past 5 6 7 5 6: the last two tokens, 5 6, occurred before 7, so that 7 is banned
        banned |= {past[i + n - 1] for i in range(len(past) - n + 1) if past[i : i + n - 1] == end}
    if len(text.ids) < config.min_new_tokens:
        banned.update(config.eos)
    return banned


@lru_cache(maxsize=16)
def _index(ids: tuple[int, ...], vocab: int, device: torch.device) -> Tensor:
    """Returns the ids that are inside the vocabulary as an index tensor."""
    with torch.inference_mode(False):
        return torch.tensor([i for i in ids if 0 <= i < vocab], dtype=torch.int64, device=device)
