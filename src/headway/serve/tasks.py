"""Encoders and translators of a server, a class for each of their tasks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeVar

from torch import Tensor

from headway.api import (
    Answerer,
    Classifier,
    Embedder,
    LanguageModel,
    MaskedLM,
    Tagger,
    TextEncoder,
    Translator,
)
from headway.api.loading import AnyModel, task_of
from headway.errors import ConfigError
from headway.generate import Engine, GenerationConfig
from headway.generate.open_engine import OpenEngine
from headway.generate.ranks import reader_of
from headway.generate.requests import context_limit
from headway.generate.sequences import Job
from headway.serve.calls import Called, Run
from headway.serve.packing import BUDGET, Packed, Packing
from headway.serve.served import Decoding, Served
from headway.serve.worker import Worker
from headway.text import Encoded

E = TypeVar("E", bound=TextEncoder)


class Encoding(Called[E]):
    """An encoder. With `exact` its texts are read one by one."""

    what = "an encoder"

    @cached_property
    def engine(self) -> Packing:
        return Packing(self.model.read, 1 if self.exact else BUDGET)

    def asking(self, run: Run) -> E:
        def read(texts: Sequence[Encoded]) -> list[Tensor]:
            packed = [*map(Packed, texts, accumulate((len(text.ids) for text in texts), initial=0))]
            run(packed)
            return [text.deltas[0] for text in packed]

        model = copy(self.model)
        model.read = read  # type: ignore[method-assign]
        return model

    @property
    def context(self) -> int | None:
        return self.model.limit


class Scoring(Encoding[E]):
    """One that says how well two texts go together."""

    what = "an embedder or a classifier"


class Embedding(Scoring[Embedder]):
    task, what = "embed", "an embedder"


class Classifying(Scoring[Classifier]):
    task, what = "classify", "a classifier"


class Tagging(Encoding[Tagger]):
    task, what = "tag", "a tagger"


class Answering(Encoding[Answerer]):
    task, what = "answer", "an encoder that marks answers"


class Filling(Encoding[MaskedLM]):
    task, what = "fill-mask", "an encoder that fills masks"


class Translating(Called[Translator]):
    """An encoder-decoder; `exact`: see `GenerationConfig`."""

    task, what = "translate", "a translator"

    @cached_property
    def engine(self) -> Engine:
        return Engine(reader_of(self.model.model, exact=self.exact))

    def asking(self, run: Run) -> Translator:
        def write(jobs: Sequence[Job], draft: Any = None, most: Any = None) -> Iterator[None]:
            run(jobs)
            yield

        model = copy(self.model)
        model._engine = OpenEngine(model.model, keep=0)
        model._engine.run = write  # type: ignore[method-assign]
        return model

    @property
    def context(self) -> int | None:
        encoder = self.model.spec.encoder
        return None if encoder is None else context_limit(encoder, GenerationConfig())


KINDS: dict[str, type[Called[Any]]] = {
    kind.task: kind for kind in (Embedding, Classifying, Tagging, Answering, Filling, Translating)
}


def served_as(name: str, model: AnyModel, worker: Worker, *, keep: int, exact: bool = False) -> Served:
    """A model under a name; `keep`, `exact`: as in `Decoding`, `Called`. Raises ConfigError for an encoder without a
    head, of which nothing is asked."""
    if isinstance(model, LanguageModel):
        return Decoding(name, model, worker, keep=keep, exact=exact)
    task = task_of(model.spec)
    if task not in KINDS:
        raise ConfigError(
            f"{name} is an encoder without a head, of which nothing is asked here; make it an embedder: "
            'headway.load(MODEL, task="embed").save(FOLDER)'
        )
    return KINDS[task](name, model, worker, exact=exact)
