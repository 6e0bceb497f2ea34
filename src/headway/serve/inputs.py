"""Request bodies for encoders and translators, and the calls of the Python API that answer them."""

import base64
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from headway.api import Answerer, Classifier, Embedder, MaskedLM, Tagger, Translator
from headway.errors import ConfigError
from headway.serve.bodies import ModelRequest, several
from headway.similarity import cosine

MOST_TEXTS, MOST_CHARACTERS, MOST_WINDOWS, MOST_TRANSLATED, MOST_BEAMS = 2048, 1 << 20, 8192, 128, 512
ALL = 1 << 20
"""A batch size that hands all texts of a call to the engine at once; the engine then shares its steps among
requests."""
Texts = Annotated[list[str], Field(min_length=1, max_length=MOST_TEXTS)]
Ids = Annotated[list[int], Field(min_length=1)]
ManyIds = Annotated[list[list[int]], Field(min_length=1, max_length=MOST_TEXTS)]
Document = Annotated[dict[Literal["text"], str], Field(min_length=1)]
Content = dict[str, Any]
Scorer = Embedder | Classifier


class Task(ModelRequest, ABC):
    """A request that is answered by a call of the Python API.

    tasks: tasks of the models that can answer it.   path: its route.
    """

    tasks: ClassVar[tuple[str, ...]]
    path: ClassVar[str]

    @abstractmethod
    def told(self, model: Any) -> Content:
        """Returns the content of the response; `completion_tokens` too if text is generated. Raises what the model's
        calls raise."""


class Embed(Task):
    """Computes the embeddings of texts, or of token ids as they are."""

    tasks, path = ("embed",), "/v1/embeddings"
    input: str | Ids | Texts | ManyIds
    truncate: bool = False
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1)

    def told(self, model: Embedder) -> Content:
        vectors = model.embed(
            several(self.input), cut=self.truncate, dimensions=self.dimensions, batch_size=ALL
        )
        rows: list[Any] = vectors.tolist()
        if self.encoding_format == "base64":  # little-endian float32
            rows = [base64.b64encode(row.tobytes()).decode() for row in vectors.numpy().astype("<f4")]
        return listed([{"object": "embedding", "embedding": row} for row in rows])


class Scored(Task):
    """The base of requests that score pairs of texts."""

    tasks = "embed", "classify"
    truncate: bool = False
    raw_scores: bool = False

    def scores(self, model: Scorer, pairs: Sequence[tuple[str, str]]) -> tuple[str, list[float]]:
        """Returns the kind of the scores, and the score of each pair: for an embedder the cosine of the two embeddings
        (each distinct text is encoded once), for a classifier with one label its output, between 0 and 1 unless
        `raw_scores`."""
        if isinstance(model, Embedder):
            if self.raw_scores:
                raise ConfigError("raw_scores: an embedder's scores are always cosines; leave raw_scores out")
            at = {text: i for i, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
            vectors = model.embed([*at], cut=self.truncate, batch_size=ALL)
            first, second = (vectors[[at[pair[side]] for pair in pairs]] for side in (0, 1))
            return "cosine", cosine(first, second).tolist()
        if (count := len(model.spec.head.labels)) != 1:
            raise ConfigError(
                f"scores need a model with one label, and this one has {count}; use /v1/classify"
            )
        logits = model.logits(pairs, cut=self.truncate, batch_size=ALL)[:, 0]
        return ("logit", logits.tolist()) if self.raw_scores else ("sigmoid", logits.sigmoid().tolist())


class Rerank(Scored):
    """Sorts documents, given as texts or as {"text": ...}, by their relevance to a query."""

    path = "/v1/rerank"
    query: str
    documents: Annotated[list[str | Document], Field(min_length=1, max_length=MOST_TEXTS)]
    top_n: int | None = Field(None, ge=1)
    return_documents: bool = False

    def told(self, model: Scorer) -> Content:
        texts = [document if isinstance(document, str) else document["text"] for document in self.documents]
        kind, scores = self.scores(model, [(self.query, text) for text in texts])
        order = sorted(range(len(scores)), key=lambda i: -scores[i])[: self.top_n]
        results: list[Content] = [{"index": i, "relevance_score": scores[i]} for i in order]
        for result in results if self.return_documents else ():
            result["document"] = {"text": texts[result["index"]]}
        return {"score": kind, "results": results}


class Score(Scored):
    """Scores pairs of texts: one with each of many, or pair by pair."""

    path = "/v1/score"
    text_1: str | Texts
    text_2: str | Texts

    def told(self, model: Scorer) -> Content:
        first, second = several(self.text_1), several(self.text_2)
        first = first * len(second) if len(first) == 1 else first
        if len(first) != len(second):
            raise ConfigError(
                f"text_1 has {len(first)} texts and text_2 {len(second)}; give equally many, or one text_1 for all"
            )
        kind, scores = self.scores(model, [*zip(first, second, strict=True)])
        return {"score": kind, **listed([{"object": "score", "score": score} for score in scores])}


class Classify(Task):
    """Classifies texts: the likeliest label of each, and the probabilities of all."""

    tasks, path = ("classify",), "/v1/classify"
    input: str | Texts
    truncate: bool = False

    def told(self, model: Classifier) -> Content:
        names, data = model.spec.head.labels, list[Content]()
        for labels in model.classify(several(self.input), cut=self.truncate, batch_size=ALL):
            named = {label.label: label.probability for label in labels}
            probs = [named[name] for name in names]
            data.append({"label": labels[0].label, "probs": probs, "num_classes": len(names)})
        return listed(data)


class Tag(Task):
    """Finds the labelled spans of each text."""

    tasks, path = ("tag",), "/v1/tag"
    input: str | Texts

    def told(self, model: Tagger) -> Content:
        return listed([{"spans": spans} for spans in model.tag(several(self.input), batch_size=ALL)])


class FillMask(Task):
    """Finds the likeliest tokens for each mask of each text."""

    tasks, path = ("masked-lm",), "/v1/fill-mask"
    input: str | Texts
    top_k: int = Field(5, ge=1, le=1000)

    def told(self, model: MaskedLM) -> Content:
        filled = model.fill_mask(several(self.input), top_k=self.top_k, batch_size=ALL)
        return listed([{"masks": masks} for masks in filled])


class Answer(Task):
    """Finds the likeliest answers to a question in a text; the fields are those of `Answerer.answer`."""

    tasks, path = ("answer",), "/v1/answer"
    question: Annotated[str, Field(max_length=MOST_CHARACTERS)]
    context: Annotated[str, Field(max_length=MOST_CHARACTERS)]
    top_k: int = Field(1, ge=1, le=1000)
    longest: int = Field(30, ge=1, le=MOST_CHARACTERS)
    stride: int = Field(128, ge=1, le=MOST_CHARACTERS)
    no_answer: float | None = None

    def told(self, model: Answerer) -> Content:
        if len(self.context) > self.stride * MOST_WINDOWS:
            raise ConfigError(
                f"stride={self.stride}: a context of {len(self.context)} characters may have more than {MOST_WINDOWS} "
                "windows; raise stride"
            )
        options = {name: getattr(self, name) for name in ("top_k", "longest", "stride", "no_answer")}
        return {"answers": model.answer(self.question, self.context, **options, batch_size=ALL)}


class Translate(Task):
    """Translates texts by beam search; the fields are those of `Translator.translate`."""

    tasks, path = ("translation",), "/v1/translate"
    text: str | Annotated[list[str], Field(min_length=1, max_length=MOST_TRANSLATED)]
    beams: int = Field(4, ge=1)
    n_best: int = Field(1, ge=1)
    length_penalty: float = 1.0
    max_tokens: int | None = Field(None, ge=0)
    prefix: str = ""
    source_language: str | None = None
    target_language: str | None = None

    def told(self, model: Translator) -> Content:
        texts = several(self.text)
        if (count := len(texts) * self.beams) > MOST_BEAMS:
            raise ConfigError(
                f"beams={self.beams}: {len(texts)} texts have {count} beams, more than {MOST_BEAMS}; lower beams"
            )
        names = "beams", "n_best", "length_penalty", "prefix", "source_language", "target_language"
        options = {name: getattr(self, name) for name in names}
        generations = model.translate(texts, max_new_tokens=self.max_tokens, **options)
        data = [
            {
                "text": result.text,
                "score": result.score,
                "finish_reason": "length" if result.finish_reason == "length" else "stop",
                "hypotheses": [
                    {"text": hypothesis.text, "score": hypothesis.score} for hypothesis in result.hypotheses
                ],
            }
            for result in generations
        ]
        return {"completion_tokens": sum(len(result.ids) for result in generations), **listed(data)}


def listed(data: Sequence[Content]) -> Content:
    """Returns items in order, each with its index."""
    return {"data": [{"index": i, **item} for i, item in enumerate(data)]}


TASKS: tuple[type[Task], ...] = (Embed, Rerank, Score, Classify, Tag, FillMask, Answer, Translate)
"""The tasks that have routes."""
