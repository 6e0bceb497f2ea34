"""Encoders that choose labels: one for a text or a pair, or one for each token.

Legend: N texts, C labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor

from headway.api.batching import BATCH
from headway.api.encoders import Text, TextEncoder
from headway.errors import ConfigError
from headway.models import Encoder
from headway.text import Tokenizer

INDEPENDENT = "multi_label_classification"  # the problem_type of config.json


@dataclass(frozen=True)
class Label:
    """A label, and how likely it is."""

    label: str
    probability: float


@dataclass(frozen=True)
class Span:
    """A stretch of a text with one label: text[start:end]. `probability`: the mean over its tokens."""

    label: str
    text: str
    start: int
    end: int
    probability: float


class Classifier(TextEncoder):
    """Says which label a text, or a pair of texts, has.

    independent: each label is there or not by itself (a sigmoid each) rather than one of them (a softmax).
    """

    heads = ("classify",)

    def __init__(
        self, model: Encoder, tokenizer: Tokenizer | None = None, *, independent: bool = False
    ) -> None:
        super().__init__(model, tokenizer)
        self.independent = independent

    @property
    def config_keys(self) -> Mapping[str, Any]:
        """Whether labels are independent."""
        return {"problem_type": INDEPENDENT} if self.independent else {}

    @overload  # a str is a Sequence[str], too
    def classify(  # type: ignore[overload-overlap]
        self, texts: Text, *, top_k: int | None = ..., batch_size: int = ..., cut: bool = ...
    ) -> list[Label]: ...

    @overload
    def classify(
        self, texts: Sequence[Text], *, top_k: int | None = ..., batch_size: int = ..., cut: bool = ...
    ) -> list[list[Label]]: ...

    def classify(
        self,
        texts: Text | Sequence[Text],
        *,
        top_k: int | None = None,
        batch_size: int = BATCH,
        cut: bool = False,
    ) -> list[Label] | list[list[Label]]:
        """The labels of a text (or of a pair, a tuple) with their probabilities, the likeliest first; of a list of
        texts, a list of that.

        top_k: at most so many (None: all).   cut: read no more than the model's context, the beginning of a text;
        of a pair the longer one is shortened first.
        Raises ConfigError for a text beyond the context without `cut`, and for a model of one label: that is a
        number to be read from `logits`.
        """
        if isinstance(texts, (str, tuple)):
            return self.classify([texts], top_k=top_k, batch_size=batch_size, cut=cut)[0]
        names = self.spec.head.labels
        if top_k is not None and top_k < 1:
            raise ConfigError(f"top_k must be 1 or more, got {top_k}")
        if len(names) == 1 and not self.independent:
            raise ConfigError(
                f"this model has one label, {names[0]!r}, so its output is a number and no choice; read it with "
                "logits(texts)"
            )
        logits = self.logits(texts, batch_size=batch_size, cut=cut)
        probabilities = logits.sigmoid() if self.independent else logits.softmax(-1)
        ranked = [
            sorted(zip(row, names, strict=True), key=lambda pair: -pair[0]) for row in probabilities.tolist()
        ]
        return [[Label(name, p) for p, name in row[:top_k]] for row in ranked]

    def logits(self, texts: Sequence[Text], *, batch_size: int = BATCH, cut: bool = False) -> Tensor:
        """[N, C] before softmax or sigmoid."""
        return torch.stack(self._outputs(self._read(texts, cut), batch_size))


class Tagger(TextEncoder):
    """Labels stretches of a text: names, places, parts of speech."""

    heads = ("tag",)

    @overload
    def tag(  # type: ignore[overload-overlap]
        self, texts: str, *, batch_size: int = ...
    ) -> list[Span]: ...

    @overload
    def tag(self, texts: Sequence[str], *, batch_size: int = ...) -> list[list[Span]]: ...

    def tag(self, texts: str | Sequence[str], *, batch_size: int = BATCH) -> list[Span] | list[list[Span]]:
        """The labelled stretches of a text, in order; of a list of texts, a list of that.

        Each token has its likeliest label. Neighbours of one label are one stretch; "B-" begins a new one, "I-" goes
        on, and what is labelled "O" is in none (Ramshaw and Marcus 1995, section 3).
        """
        if isinstance(texts, str):
            return self.tag([texts], batch_size=batch_size)[0]
        read = self._read(texts)
        found = []
        for text, one, logits in zip(texts, read, self._outputs(read, batch_size), strict=True):
            best = logits.softmax(-1).max(-1)
            names = [self.spec.head.labels[i] for i in best.indices.tolist()]
            tokens = [
                (name, p, place)
                for name, p, place in zip(names, best.values.tolist(), one.offsets, strict=True)
                if place is not None
            ]
            found.append(spans(text, tokens))
        return found


def spans(text: str, tokens: Iterable[tuple[str, float, tuple[int, int]]]) -> list[Span]:
    """Joins the (label, probability, place) of a text's tokens into stretches."""
    groups: list[tuple[str, list[float], list[tuple[int, int]]]] = []
    for name, p, place in tokens:
        begins, label = name.startswith("B-"), name[2:] if name[:2] in ("B-", "I-") else name
        if begins or not groups or groups[-1][0] != label:
            groups.append((label, [], []))
        groups[-1][1].append(p)
        groups[-1][2].append(place)
    return [
        Span(label, text[at[0][0] : at[-1][1]], at[0][0], at[-1][1], sum(ps) / len(ps))
        for label, ps, at in groups
        if label != "O"
    ]
