"""Texts in progress that grow by one chosen token a step.

Legend: R rows, V vocab.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from headway.errors import ConfigError
from headway.generate.constraints import Text, constrain
from headway.generate.requests import Request
from headway.generate.results import Delta, FinishReason
from headway.generate.sampling import uniform
from headway.generate.stop import StopScanner
from headway.text import StreamDecoder, Tokenizer

Row = tuple[int, int]
"""A row of the next step: which of its text's rows of the last step it continues, and its new token."""


class SampledText(Text):
    """One request that is sampled (or greedy).

    rows: its row of the next step; none when it has ended.   deltas: what each step added; one without a token where it
    gets none.
    """

    ids: list[int]

    def __init__(self, request: Request, tokenizer: Tokenizer | None) -> None:
        super().__init__(request.prompt, [], request.max_new_tokens)
        self.request = request
        self.rows: list[Row] = []
        none = Delta(request.number, None, "", "length", 0.0)
        self.deltas: list[Delta] = [] if request.max_new_tokens else [none]
        self._decoder: StreamDecoder | None = tokenizer.stream(after=request.prompt) if tokenizer else None
        self._scanner = StopScanner(request.config.stop)

    @property
    def count(self) -> int:
        """New tokens so far."""
        return len(self.ids)

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
        eos, length = token in self.request.config.eos, len(self.ids) == self.max_new_tokens
        reason: FinishReason | None = "eos" if eos else "length" if length else None
        if self._decoder is None:
            return "", reason
        text = "" if eos else self._scanner.push(self._decoder.push(token))
        if reason is not None and self._scanner.hit is None:
            text += self._scanner.push(self._decoder.flush())
        if self._scanner.hit is not None:
            return text, "stop"
        return text if reason is None else text + self._scanner.flush(), reason


def choose_tokens(logits: Tensor, texts: Sequence[SampledText]) -> list[int]:
    """The next token of each text, from logits [R, V] float32. All requests have equal configs."""
    config = texts[0].request.config
    values = constrain(logits, texts, config)
    if values is not logits and bool((values.amax(-1) == float("-inf")).any()):
        raise ConfigError("forbidden: no token is left to choose")
    noise = [uniform(config.seed, one.request.number, len(one.ids)) for one in texts]
    chosen: list[int] = config.sampling.choose(values, noise).tolist()
    return chosen
