"""A model of a server, and the sequences that it generates for requests."""

import asyncio
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch

from headway.api import LanguageModel
from headway.api.loading import AnyModel
from headway.cache import PAGE
from headway.checkpoints import load_folder
from headway.checkpoints.adapters import load_adapter
from headway.checkpoints.bases import check_bases
from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig, Sampling
from headway.generate.ranks import reader_of
from headway.generate.requests import check_prompts, context_limit, make_requests
from headway.generate.sequences import SampledText
from headway.nn.adapters import attach, beside, detach
from headway.nn.lora import only_rows
from headway.serve.errors import PromptTooLong, Unavailable
from headway.serve.grammar import Asked, CompiledGrammar, Grammars
from headway.serve.visits import VISIT, own_salt
from headway.serve.worker import Told, Worker

T = TypeVar("T")
BESIDE = {"cpu": 24, "cuda": 256}
"""Prompt tokens that a step reads while other sequences are being generated, by device. Their arithmetic takes about as
long as reading the weights, so the gap between two tokens of a sequence grows to a few times the usual one at most."""
NEARLY = 0.05
"""Maximum difference of ln p that another order of sums may cause with weights of few bits."""


class Served:
    """A model under the name that requests give.

    model: the model of the Python API.   source: its folder, or None.
    exact: whether the output for a text is the same bit for bit, whatever else is being served.
    """

    def __init__(self, name: str, model: AnyModel, worker: Worker, *, exact: bool = False) -> None:
        self.name, self.created, self.exact, self._worker = name, int(time.time()), exact, worker
        self.model: Any = model
        self.source: Path | None = None
        self.task = model.spec.task

    @property
    def context(self) -> int | None:
        """Maximum number of tokens of a sequence; None is no limit."""
        return context_limit(self.model.spec.encoder or self.model.spec, GenerationConfig())

    @property
    def nbytes(self) -> int:
        """Bytes of its weights."""
        weights = self.model.model
        return sum(t.nbytes for t in (*weights.parameters(), *weights.buffers()))

    @property
    def described(self) -> dict[str, Any]:
        """Its entry in `/v1/models`."""
        return {"created": self.created, "task": self.task, "max_model_len": self.context}


class Decoding(Served):
    """A decoder with its engine, which stays open between requests.

    keep: bytes of keys and values that the prefix cache retains.
    adapters: keys of the adapters that its sequences use.
    """

    def __init__(
        self, name: str, lm: LanguageModel, worker: Worker, *, keep: int, exact: bool = False
    ) -> None:
        super().__init__(name, lm, worker, exact=exact)
        self.lm = lm
        reader = reader_of(lm.model, keep=keep, exact=exact)
        self.engine = Engine(reader, beside=BESIDE.get(reader.device.type))
        self.adapters = beside(lm.model)

    @cached_property
    def unused(self) -> list[int]:
        """Token ids that no sequence may have."""
        return self.lm.need_tokenizer().unused_ids(self.lm.spec.vocab)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles and caches the grammars of its sequences."""
        return Grammars(self.lm.need_tokenizer(), self.lm.spec.vocab, self.lm.eos)

    async def grammar(self, asked: Asked | None, within: str = "") -> CompiledGrammar | None:
        """Returns the requested grammar, compiled, or None. Raises ConfigError as `Grammars.compile` does."""
        if asked is None:
            return None
        return await asyncio.to_thread(lambda: self.grammars.compile(*asked, within=within))

    @property
    def described(self) -> dict[str, Any]:
        spec, tokenizer = self.lm.spec, self.lm.tokenizer
        patterns = list(map(str, spec.patterns))
        sizes = {"layers": spec.layers, "heads": spec.heads, "kv_heads": spec.kv_heads, "patterns": patterns}
        return {**super().described, "chat": bool(tokenizer and tokenizer.chat_template), **sizes}

    def texts(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig, count: int = 1
    ) -> list[SampledText]:
        """Returns `count` sequences for each prompt, not yet generated. Those of a prompt are numbered from 0, as
        `LanguageModel.generate` numbers repeated prompts: equal seeds give equal texts. If the config has no
        `max_new_tokens`, it is set to `room`. Raises DataError and ConfigError as `generate` does."""
        checked = check_prompts(prompts, self.lm.spec.vocab)
        longest = max(map(len, checked))
        if self.context is not None and longest > self.context:
            raise PromptTooLong(longest, self.context)
        if config.max_new_tokens is None:
            config = replace(config, max_new_tokens=self.room(longest))
        salt = own_salt() + config.cache_salt
        shared: dict[str, Any] = {"exact": self.exact, "adapters": self.adapters, "cache_salt": salt}
        config = replace(config, eos=self.lm.eos, forbidden=self.unused, **shared)
        requests = [make_requests([prompt] * count, config, self.lm.spec) for prompt in checked]
        return [SampledText(request, self.lm.tokenizer) for group in requests for request in group]

    def write(self, texts: Sequence[SampledText], progress: bool = False) -> AsyncIterator[Told]:
        """Generates sequences; see `Worker.write`."""
        if (visit := VISIT.get()) is not None:
            visit.texts.append((self.name, texts))
        return self._worker.write(self.engine, texts, progress)

    async def check(self) -> None:
        """Checks that a prompt has the same log-probability again when it is read from the prefix cache, and that it is
        found there. Raises Unavailable if not."""
        prompt = [i % self.lm.spec.vocab for i in range(min(3 * PAGE, (self.context or 3 * PAGE) - 1))]
        config = GenerationConfig(
            max_new_tokens=1, sampling=Sampling(temperature=0), log_probs=True, prefix_cache=True,
            cache_salt=uuid4().hex,
        )  # fmt: skip
        cold, warm = [self.texts([prompt], config)[0] for _ in range(2)]
        for text in (cold, warm):
            async for _ in self._worker.write(self.engine, [text]):
                pass
        first, again = (text.deltas[0].log_prob or 0.0 for text in (cold, warm))
        if abs(first - again) > NEARLY:
            raise Unavailable(
                f"{self.name}: a token has log-probability {first}, but {again} with the prefix cache"
            )
        reader = self.engine.reader
        keeps = reader.shares_prefixes and reader.cache.pool.keep != 0
        if keeps and len(prompt) > PAGE and not warm.stored:
            raise Unavailable(f"{self.name}: a stored prompt is not found in the prefix cache")

    def alone(self) -> AbstractContextManager[None]:
        """While open, forward passes outside the engine use this model's adapters only, and not the others attached to
        its weights."""
        active, device = beside(self.lm.model), self.engine.reader.device
        return only_rows({name: torch.tensor([[name in self.adapters]], device=device) for name in active})

    def between(self, act: Callable[[], T]) -> T:
        """Returns the result of `act`, run between two steps of the engine, or at once if the worker's thread has
        ended."""
        return self._worker.between(act).result() if self._worker.is_alive else act()

    def room(self, tokens: int) -> int | None:
        """Returns how many new tokens fit after a prompt of `tokens` tokens, in the context and in memory; None if the
        context is unlimited. If memory has no room at all it returns 1, and the engine refuses the request."""
        pool, context = self.engine.reader.cache.pool, self.context
        if context is None:
            return None
        left = max(0, context - tokens)
        if pool.budget is None:
            return left
        most, step = pool.most, self.engine.step_tokens
        fits = bisect_right(range(left + 1), pool.budget, key=lambda new: most(tokens + new, step)) - 1
        return min(left, max(1, fits))

    def keep(self, nbytes: int) -> None:
        """Sets the bytes that pages may take, from the next step on; at least what the largest running or waiting
        sequence needs. Has no effect on a model that cannot share prefixes."""

        def keep() -> None:
            engine = self.engine
            pool = engine.reader.cache.pool
            of_jobs = [engine.most(job.request) for job in (*engine.running, *engine.waiting)]
            if engine.reader.shares_prefixes:  # without shared prefixes, sequences cannot wait for room
                pool.budget, pool.keep = max(nbytes, *of_jobs, 0), None

        self._worker.between(keep)

    def adapted(self, name: str, folder: str) -> "Decoding":
        """Returns this model with an adapter, as a model that shares everything else with it. Raises CheckpointError,
        ConfigError if the folder is not an adapter of this model."""
        if self.source is not None:
            check_bases([folder], load_folder(self.source))
        adapter, key = load_adapter(folder, self.lm.spec), f"{name.replace('.', '_')}-{uuid4().hex}"
        model, reader = self.lm.model, self.engine.reader
        dtype = next(model.parameters()).dtype

        def put() -> None:
            attach(model, adapter, key, dtype=dtype)
            try:
                reader.renew()
            except ConfigError:
                detach(model, key)
                reader.renew()
                raise

        self.between(put)
        clone = copy(self)
        clone.name, clone.created, clone.adapters = name, int(time.time()), [*self.adapters, key]
        return clone

    def drop(self) -> None:
        """Detaches the last adapter once no sequence uses it any longer."""
        engine, key = self.engine, self.adapters[-1]

        def used() -> bool:
            jobs = *engine.running, *engine.waiting
            return any(key in (job.request.config.adapters or ()) for job in jobs)

        def take() -> None:
            detach(self.lm.model, key)
            engine.reader.renew()

        self._worker.between(take, lambda: not used())
