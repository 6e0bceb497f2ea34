"""What is answered: whole, or chunk by chunk, in the shapes of OpenAI's completions and chat completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from headway.generate import Delta
from headway.generate.sequences import SampledText
from headway.serve.served import Served
from headway.text.vocabulary import Vocabulary

REASONS = {"eos": "stop", "stop": "stop", "length": "length", None: None}


@dataclass
class Written:
    """A text so far: what its deltas have said."""

    text: str = ""
    finish_reason: str | None = None
    tokens: int = 0
    deltas: list[Delta] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.token is not None
        self.finish_reason = REASONS[delta.finish_reason]
        self.deltas.append(delta)


class Answer:
    """The answer to one request, of a kind ("chat.completion", "text_completion"): `chunks` of it, or the `whole`."""

    kind = "text_completion"
    prefix = "cmpl"

    def __init__(
        self, model: Served, texts: Sequence[SampledText], *, likely: int | None, echoes: Sequence[str] = ()
    ):
        self.model, self.texts, self.likely, self.echoes = model, texts, likely, echoes
        self.written = [Written() for _ in texts]
        self.head = {
            "id": f"{self.prefix}-{uuid4().hex}",
            "object": self.kind,
            "created": int(time.time()),
            "model": model.name,
        }

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of prompts, each counted once, and of texts; `cached_tokens` of them were stored already."""
        prompts = {id(text.request.prompt): text for text in self.texts}.values()
        given, new = sum(t.request.prompt_tokens for t in prompts), sum(w.tokens for w in self.written)
        return {
            "prompt_tokens": given,
            "completion_tokens": new,
            "total_tokens": given + new,
            "prompt_tokens_details": {"cached_tokens": sum(t.stored for t in prompts)},
        }

    def add(self, i: int, delta: Delta) -> dict[str, Any] | None:
        """Takes what a step added to a text; the choice of a chunk that tells it, None where there is nothing to tell
        yet."""
        written = self.written[i]
        first = not written.deltas
        written.add(delta)
        if not delta.text and written.finish_reason is None and self.likely is None and not first:
            return None
        return self.choice(i, self.part(i, delta, first), written.finish_reason, [delta])

    def whole(self) -> dict[str, Any]:
        """All of it."""
        choices = [
            self.choice(i, self.full(i), written.finish_reason, written.deltas)
            for i, written in enumerate(self.written)
        ]
        return {**self.head, "choices": choices, "usage": self.usage}

    def choice(
        self, i: int, said: dict[str, Any], reason: str | None, deltas: Sequence[Delta]
    ) -> dict[str, Any]:
        """One of `choices`."""
        return {"index": i, **said, "logprobs": self.log_probs(deltas), "finish_reason": reason}

    def part(self, i: int, delta: Delta, first: bool) -> dict[str, Any]:
        """What a chunk says."""
        return {"text": (self._echo(i) if first else "") + delta.text}

    def full(self, i: int) -> dict[str, Any]:
        """What a choice says at the end."""
        return {"text": self._echo(i) + self.written[i].text}

    def _echo(self, i: int) -> str:
        return self.echoes[i] if self.echoes else ""

    def log_probs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """Probabilities as completions tell them: columns."""
        if self.likely is None:
            return None
        told = [delta for delta in deltas if delta.token is not None]
        tokens = [text_of(self._vocabulary, delta.token or 0) for delta in told]
        return {
            "tokens": tokens,
            "token_logprobs": [delta.log_prob for delta in told],
            "top_logprobs": [
                {text_of(self._vocabulary, token): value for token, value in delta.top_log_probs}
                for delta in told
            ],
            "text_offset": [sum(map(len, tokens[:n])) for n in range(len(tokens))],
        }

    @property
    def _vocabulary(self) -> Vocabulary:
        return self.model.lm.need_tokenizer()


class ChatAnswer(Answer):
    """To a conversation."""

    kind = "chat.completion"
    prefix = "chatcmpl"

    def part(self, i: int, delta: Delta, first: bool) -> dict[str, Any]:
        role = {"role": "assistant"} if first else {}
        return {"delta": {**role, "content": delta.text} if delta.text or first else {}}

    def full(self, i: int) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": self.written[i].text, "refusal": None}}

    def log_probs(self, deltas: Sequence[Delta]) -> dict[str, Any] | None:
        """Probabilities as conversations tell them: a record for each token."""
        if self.likely is None:
            return None
        told = [delta for delta in deltas if delta.token is not None]
        return {
            "content": [
                {
                    **self._record(delta.token or 0, delta.log_prob or 0.0),
                    "top_logprobs": [self._record(*pair) for pair in delta.top_log_probs],
                }
                for delta in told
            ],
            "refusal": None,
        }

    def _record(self, token: int, log_prob: float) -> dict[str, Any]:
        spelled = self._vocabulary.text_bytes(token, special=True) or b""
        return {
            "token": spelled.decode(errors="replace"),
            "logprob": log_prob,
            "bytes": list(spelled),
        }


def text_of(vocabulary: Vocabulary, token: int) -> str:
    """A token as text; bytes that are no whole character are replaced."""
    return (vocabulary.text_bytes(token, special=True) or b"").decode(errors="replace")
