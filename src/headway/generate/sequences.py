"""Texts in progress that grow by one chosen token a step.

Legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from headway.errors import ConfigError
from headway.generate.constraints import Text
from headway.generate.requests import Request
from headway.generate.results import Delta, FinishReason
from headway.generate.sampling import uniform
from headway.generate.stop import StopScanner
from headway.text import StreamDecoder, Tokenizer

Row = tuple[int, int]
"""A row of the next step: which of its text's rows of the last step it continues, and its new token."""


class SampledText:
    """One request that is sampled (or greedy).

    ids: its new tokens.   rows: its row of the next step; none when it has ended.   deltas: what each step added; one
    without a token where it gets none.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.ids: list[int] = []
        self.rows: list[Row] = []
        none = Delta(request.number, None, "", "length", 0.0)
        self.deltas: list[Delta] = [] if request.max_new_tokens else [none]
        self._decoder: StreamDecoder | None = tokenizer.stream(after=request.prompt) if tokenizer else None
        self._scanner = StopScanner(request.config.stop)
        self._seen: Tensor | None = None

    @property
    def count(self) -> int:
        """New tokens so far."""
        return len(self.ids)

    @property
    def text(self) -> Text:
        """Prompt and new tokens."""
        return Text(self.request.prompt, self.ids, self.request.max_new_tokens)

    def seen(self, like: Tensor) -> Tensor:
        """Which tokens stand in prompt and text: bool [V], on the device of `like` [V]."""
        if self._seen is None:
            self._seen = torch.zeros_like(like, dtype=torch.bool)
            self._seen[torch.tensor([*self.request.prompt, *self.ids], device=like.device)] = True
        return self._seen

    def advance(self, token: int, seconds: float) -> None:
        """Adds the token that was chosen, `seconds` after the call began."""
        self.ids.append(token)
        if self._seen is not None:
            self._seen[token] = True
        text, reason = self._shown(token)
        self.rows = [(0, token)] if reason is None else []
        self.deltas.append(Delta(self.request.number, token, text, reason, seconds))

    def _shown(self, token: int) -> tuple[str, FinishReason | None]:
        """The text that became certain, and why the request ends if it does."""
        reason: FinishReason | None = None
        text = ""
        if token in self.request.config.eos:
            reason = "eos"
        else:
            if self._decoder is not None:
                text = self._scanner.push(self._decoder.push(token))
            if self._scanner.hit is not None:
                return text, "stop"
            if len(self.ids) == self.request.max_new_tokens:
                reason = "length"
        if reason is not None and self._decoder is not None:
            text += self._scanner.push(self._decoder.flush())
            if self._scanner.hit is not None:
                return text, "stop"
            text += self._scanner.flush()
        return text, reason


def choose_tokens(logits: Tensor, texts: Sequence[SampledText]) -> list[int]:
    """The next token of each text, from logits [R, V] float32. All requests have equal configs."""
    config = texts[0].request.config
    values = config.constraints(logits, [one.text for one in texts])
    if values is not logits and bool((values.amax(-1) == float("-inf")).any()):
        raise ConfigError("forbidden: no token is left to choose")
    seen = values.new_zeros(0, dtype=torch.bool)
    if config.sampling.needs_history:
        seen = torch.stack([one.seen(logits[0]) for one in texts])
    noise = [uniform(config.seed, one.request.number, len(one.ids)) for one in texts]
    chosen: list[int] = config.sampling.choose(values, seen, noise).tolist()
    return chosen
