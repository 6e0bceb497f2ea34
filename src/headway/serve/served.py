"""A model of a server: what it is asked, and what it writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from headway.api import LanguageModel
from headway.generate import Engine, GenerationConfig
from headway.generate.ranks import reader_of
from headway.generate.requests import check_prompts, context_limit, make_requests
from headway.generate.sequences import SampledText
from headway.serve.errors import PromptTooLong
from headway.serve.grammar import CompiledGrammar, Grammars
from headway.serve.structure import Asked
from headway.serve.worker import Told, Worker


class Served:
    """A model under the name that requests give."""

    task, what = "", "a model"
    """Of `headway.load`, and in errors."""

    def __init__(self, name: str) -> None:
        self.name, self.created = name, int(time.time())

    @property
    def context(self) -> int | None:
        """The longest text, in tokens; None is no limit."""
        return None

    @property
    def described(self) -> dict[str, Any]:
        """As `/v1/models` tells it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "headway",
            "task": self.task,
            "max_model_len": self.context,
        }


class Decoding(Served):
    """A decoder: its engine, which stays open, and how requests become texts.

    keep: bytes of keys and values that stay for texts that begin as earlier ones did.   exact: see `GenerationConfig`.
    """

    task, what = "causal-lm", "a language model"

    def __init__(
        self, name: str, lm: LanguageModel, worker: Worker, *, keep: int, exact: bool = False
    ) -> None:
        super().__init__(name)
        self.lm, self._worker, self._keep, self.exact = lm, worker, keep, exact

    @cached_property
    def engine(self) -> Engine:
        """What writes its texts."""
        return Engine(reader_of(self.lm.model, keep=self._keep, exact=self.exact))

    @cached_property
    def unused(self) -> list[int]:
        """Ids that no text has."""
        return self.lm.need_tokenizer().unused_ids(self.lm.spec.vocab)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that its texts followed."""
        return Grammars(self.lm.need_tokenizer(), self.lm.spec.vocab, self.lm.eos)

    async def grammar(self, asked: Asked | None, within: str = "") -> CompiledGrammar | None:
        """What a request asks for, compiled. Raises ConfigError as `Grammars.compile`."""
        if asked is None:
            return None
        return await asyncio.to_thread(lambda: self.grammars.compile(*asked, within=within))

    @property
    def context(self) -> int | None:
        return context_limit(self.lm.spec, GenerationConfig())

    @property
    def described(self) -> dict[str, Any]:
        spec, tokenizer = self.lm.spec, self.lm.tokenizer
        patterns = list(map(str, spec.patterns))
        sizes = {"layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads, "patterns": patterns}
        return {**super().described, "chat": bool(tokenizer and tokenizer.chat_template), **sizes}

    def texts(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig, count: int = 1
    ) -> list[SampledText]:
        """`count` texts for each prompt, those of a prompt numbered from 0 as `LanguageModel.generate` numbers a list
        that has it so often: equal seeds give equal texts. Raises DataError and ConfigError as `generate`."""
        config = replace(config, eos=self.lm.eos, forbidden=self.unused, exact=self.exact)
        made = []
        for prompt in check_prompts(prompts, self.lm.spec.vocab):
            if self.context is not None and len(prompt) > self.context:
                raise PromptTooLong(len(prompt), self.context)
            requests = make_requests([prompt] * count, config, self.lm.spec)
            made += [SampledText(request, self.lm.tokenizer) for request in requests]
        return made

    def write(self, texts: Sequence[SampledText]) -> AsyncIterator[Told]:
        """See `Worker.write`."""
        return self._worker.write(self.engine, texts)
