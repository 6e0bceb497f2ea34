"""The models of a server, by the names that requests give."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cached_property

from headway.api import LanguageModel
from headway.errors import ConfigError, did_you_mean
from headway.generate import Engine, GenerationConfig
from headway.generate.ranks import reader_of
from headway.generate.requests import check_prompts, context_limit, make_requests
from headway.generate.sequences import SampledText
from headway.serve.errors import Busy, UnknownModel
from headway.serve.worker import Told, Worker


class Served:
    """A decoder under a name: its engine, which stays open, and how requests become texts.

    keep: bytes of keys and values that stay for texts that begin as earlier ones did.   exact: see `GenerationConfig`.
    """

    def __init__(
        self, name: str, lm: LanguageModel, worker: Worker, *, keep: int, exact: bool = False
    ) -> None:
        self.name, self.lm, self.created = name, lm, int(time.time())
        self._worker, self._keep, self.exact = worker, keep, exact

    @cached_property
    def engine(self) -> Engine:
        """What writes its texts."""
        return Engine(reader_of(self.lm.model, keep=self._keep, exact=self.exact))

    @cached_property
    def unused(self) -> list[int]:
        """Ids that no text has."""
        return self.lm.need_tokenizer().unused_ids(self.lm.spec.vocab)

    @property
    def context(self) -> int | None:
        """The longest text, in tokens; None is no limit."""
        return context_limit(self.lm.spec, GenerationConfig())

    def texts(
        self, prompts: Sequence[Sequence[int]], config: GenerationConfig, count: int = 1
    ) -> list[SampledText]:
        """`count` texts for each prompt, those of a prompt numbered from 0 as `LanguageModel.generate` numbers a list
        that has it so often: equal seeds give equal texts. Raises DataError and ConfigError as `generate`."""
        config = replace(config, eos=self.lm.eos, forbidden=self.unused, exact=self.exact)
        made = []
        for prompt in check_prompts(prompts, self.lm.spec.vocab):
            requests = make_requests([prompt] * count, config, self.lm.spec)
            made += [SampledText(request, self.lm.tokenizer) for request in requests]
        return made

    def write(self, texts: Sequence[SampledText]) -> AsyncIterator[Told]:
        """See `Worker.write`. Raises Busy where as many requests as there may be are being written."""
        if self._worker.count >= self._worker.most:
            raise Busy(f"{self._worker.count} requests are being written, and no more may be; ask again")
        return self._worker.write(self.engine, texts)


class Models:
    """All models of a server."""

    def __init__(self, models: Sequence[Served]) -> None:
        self.by_name = {model.name: model for model in models}
        if len(self.by_name) < len(models):
            raise ConfigError(f"serve: names repeat among {', '.join(model.name for model in models)}")

    def find(self, name: str | None) -> Served:
        """The model of a name; the only one where none is given. Raises UnknownModel."""
        if name is None and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        if name is None or name not in self.by_name:
            known = ", ".join(self.by_name)
            asked = "no model is named" if name is None else f"there is no model {name!r}"
            raise UnknownModel(f"{asked}{did_you_mean(name or '', self.by_name)}; there are {known}")
        return self.by_name[name]
