"""A model of a server, and the texts that it writes for requests."""

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
"""Tokens of prompts that a step reads beside texts that are being written, by device: so many that its arithmetic takes
about as long as reading the weights, so that the gap between two tokens is a few times the usual one at most."""
NEARLY = 0.05
"""The most that the order of sums may change ln p, with weights of few bits."""


class Served:
    """A model under the name that requests give.

    model: of the Python API.   source: its folder, which says whether an adapter is one of it.
    exact: what is given for a text is the same bits whatever else is asked.
    """

    def __init__(self, name: str, model: AnyModel, worker: Worker, *, exact: bool = False) -> None:
        self.name, self.created, self.exact, self._worker = name, int(time.time()), exact, worker
        self.model: Any = model
        self.source: Path | None = None
        self.task = model.spec.task

    @property
    def context(self) -> int | None:
        """The longest text, in tokens; None is no limit."""
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
    """A decoder: its engine, which stays open, and how requests become texts.

    keep: bytes of keys and values that stay for texts that begin as earlier ones did.
    adapters: those that its texts have.
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
        """Ids that no text has."""
        return self.lm.need_tokenizer().unused_ids(self.lm.spec.vocab)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that its texts followed."""
        return Grammars(self.lm.need_tokenizer(), self.lm.spec.vocab, self.lm.eos)

    async def grammar(self, asked: Asked | None, within: str = "") -> CompiledGrammar | None:
        """The grammar that a request asks for, compiled. Raises ConfigError as `Grammars.compile`."""
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
        """`count` texts for each prompt, those of a prompt numbered from 0 as `LanguageModel.generate` numbers a list
        that has it so often: equal seeds give equal texts. Where no number of new tokens is asked for, there is `room`
        for them. Raises DataError and ConfigError as `generate`."""
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
        """See `Worker.write`."""
        if (visit := VISIT.get()) is not None:
            visit.texts.append((self.name, texts))
        return self._worker.write(self.engine, texts, progress)

    async def check(self) -> None:
        """Whether a prompt gives the same twice, the second time from what was stored. Raises Unavailable."""
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
            raise Unavailable(f"{self.name}: ln p of a token is {first}, and {again} from what was stored")
        reader = self.engine.reader
        keeps = reader.shares_prefixes and reader.cache.pool.keep != 0
        if keeps and len(prompt) > PAGE and not warm.stored:
            raise Unavailable(f"{self.name}: what a prompt has stored is not found by the same prompt")

    def alone(self) -> AbstractContextManager[None]:
        """While open, passes of its model have its own adapters, and none of the others that are on it."""
        active, device = beside(self.lm.model), self.engine.reader.device
        return only_rows({name: torch.tensor([[name in self.adapters]], device=device) for name in active})

    def between(self, act: Callable[[], T]) -> T:
        """Does something between two steps, or at once where there are none any longer; what came of it."""
        return self._worker.between(act).result() if self._worker.is_alive else act()

    def room(self, tokens: int) -> int | None:
        """How many new tokens a prompt of so many tokens has room for, in the context and in memory; None where the
        context has no bound. One that has no room in memory gets one, and is refused by the engine."""
        pool, context = self.engine.reader.cache.pool, self.context
        if context is None:
            return None
        rest = max(0, context - tokens)
        if pool.budget is None:
            return rest
        most, step = pool.most, self.engine.step_tokens
        fits = bisect_right(range(rest + 1), pool.budget, key=lambda new: most(tokens + new, step)) - 1
        return min(rest, max(1, fits))

    def keep(self, nbytes: int) -> None:
        """Bytes that pages of its texts may take, from the next step on; those that are written keep their room."""

        def keep() -> None:
            engine = self.engine
            pool = engine.reader.cache.pool
            of_jobs = [engine.most(job.request) for job in (*engine.running, *engine.waiting)]
            if engine.reader.shares_prefixes:  # else texts of one model cannot wait for room
                pool.budget, pool.keep = max(nbytes, *of_jobs, 0), None

        self._worker.between(keep)

    def adapted(self, name: str, folder: str) -> "Decoding":
        """This model with an adapter, as a model that shares all else with it. Raises CheckpointError, ConfigError for
        a folder that is no adapter of this model."""
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
        other = copy(self)
        other.name, other.created, other.adapters = name, int(time.time()), [*self.adapters, key]
        return other

    def drop(self) -> None:
        """Takes its last adapter off the model, when no text is written with it any longer."""
        engine, key = self.engine, self.adapters[-1]

        def used() -> bool:
            jobs = *engine.running, *engine.waiting
            return any(key in (job.request.config.adapters or ()) for job in jobs)

        def take() -> None:
            detach(self.lm.model, key)
            engine.reader.renew()

        self._worker.between(take, lambda: not used())
