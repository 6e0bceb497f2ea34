"""Encoders that classify: one label per text or pair, one per token, or the span of a text that answers a question
(Devlin et al. 2019, sections 4.2 and 4.3).

Legend: N texts, C labels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.api.encoders import TextEncoder
from headway.api.pretrained import BATCH, OneOrSeveral
from headway.data.encoded import Answer, Span, best_answers, spans, windows
from headway.errors import ConfigError, check_whole
from headway.models import Encoder
from headway.text import Tokenizer
from headway.text.tokenizer import Text

INDEPENDENT = "multi_label_classification"  # the problem_type of config.json


@dataclass(frozen=True)
class Label:
    """A label and its probability."""

    label: str
    probability: float


class Classifier(TextEncoder):
    """Classifies a text, or a pair of texts.

    independent: whether each label is predicted independently (a sigmoid each), rather than exactly one of them (a
        softmax).
    """

    heads, single = ("classify",), (str, tuple)

    def __init__(
        self, model: Encoder, tokenizer: Tokenizer | None = None, *, independent: bool = False
    ) -> None:
        super().__init__(model, tokenizer)
        self.independent = independent
        self.config_keys = {"problem_type": INDEPENDENT} if independent else {}

    @OneOrSeveral
    def classify(
        self, texts: Sequence[Text], *, top_k: int | None = None, batch_size: int = BATCH, cut: bool = False
    ) -> list[list[Label]]:
        """Returns the labels of a text (or of a pair, given as a tuple) with their probabilities, the likeliest first;
        for a list of texts, one such list each.

        top_k: maximum number of labels (None: all).   cut: truncate texts to the model's context; of a pair, the longer
        text is truncated first.
        Raises ConfigError for a text beyond the context without `cut`, and for a model with a single label, whose
        output is a number: read it from `logits`.
        """
        names = self.spec.head.labels
        if top_k is not None:
            check_whole("top_k", top_k)
        if len(names) == 1 and not self.independent:
            raise ConfigError(
                f"this model has one label, {names[0]!r}, so its output is a score, not a class; read it with "
                "logits(texts)"
            )
        logits = self.logits(texts, batch_size=batch_size, cut=cut)
        probs = logits.sigmoid() if self.independent else logits.softmax(-1)
        ranked = [sorted(zip(row, names, strict=True), key=lambda pair: -pair[0]) for row in probs.tolist()]
        return [[Label(name, p) for p, name in row[:top_k]] for row in ranked]

    def logits(self, texts: Sequence[Text], *, batch_size: int = BATCH, cut: bool = False) -> Tensor:
        """Returns the logits [N, C], before the softmax or sigmoid."""
        return torch.stack(self._outputs(self._read(texts, cut), batch_size))


class Tagger(TextEncoder):
    """Labels spans of a text: names, places, parts of speech."""

    heads = ("tag",)

    @OneOrSeveral
    def tag(self, texts: Sequence[str], *, batch_size: int = BATCH) -> list[list[Span]]:
        """Returns the labelled spans of a text, in order; for a list of texts, one such list each.

        Each token gets its likeliest label. Consecutive tokens with one label form a span; "B-" begins a new span, "I-"
        continues one, and tokens labelled "O" are in none (Ramshaw and Marcus 1995, section 3).
        """
        read = self._read(texts)
        tagged = []
        for text, encoded, logits in zip(texts, read, self._outputs(read, batch_size), strict=True):
            best = logits.softmax(-1).max(-1)
            names = [self.spec.head.labels[i] for i in best.indices.tolist()]
            tokens = zip(names, best.values.tolist(), encoded.offsets, strict=True)
            tagged.append(spans(text, [(name, p, at) for name, p, at in tokens if at is not None]))
        return tagged


class Answerer(TextEncoder):
    """Finds the answer to a question in a text."""

    heads = ("answer",)

    def answer(
        self,
        question: str,
        context: str,
        *,
        top_k: int = 1,
        longest: int = 30,
        stride: int = 128,
        no_answer: float | None = None,
        batch_size: int = BATCH,
    ) -> list[Answer]:
        """Returns the `top_k` likeliest answers, the best first; each span of the context occurs at most once.

        The span from token i to token j has the probability p(begins at i) p(ends at j), each a softmax over the tokens
        of the context (of all its windows). A context that is longer than the model's is split into windows, each
        `stride` tokens after the previous one; a span has its highest score over the windows.

        With `no_answer` = t, the answers include that the context has no answer. For the logits S and E of beginning
        and end and the first token C of the row ([CLS]),

            s_null = S_C + E_C, the minimum over windows      s(i, j) = S_i + E_j, i <= j

        and spans with s(i, j) > s_null + t rank before it, the others after it (Devlin et al. 2019, section 4.3, for
        SQuAD v2.0; the minimum over windows as in their code). Choose t on held-out questions, by comparison with
        log p(no answer) - log p(best span). C then takes part in both softmaxes.

        longest: maximum number of tokens of an answer.
        Raises DataError for a context without tokens; ConfigError if the question leaves no room for the context, if
        no_answer is NaN, and for no_answer with a tokenizer that puts no token before the question.
        """
        for name, value in (("top_k", top_k), ("longest", longest), ("stride", stride)):
            check_whole(name, value)
        parts = windows(self._read([(question, context)])[0], self.limit, stride)
        if no_answer is not None and math.isnan(no_answer):
            raise ConfigError(
                "no_answer must be a number, a difference of scores (0 is a good start), got nan"
            )
        if no_answer is not None and parts[0].texts[0] is not None:
            raise ConfigError(
                "no_answer is scored at the token before the question ([CLS]), but this tokenizer adds none; "
                "leave no_answer out"
            )
        outputs = self._outputs(parts, batch_size)
        return best_answers(context, parts, outputs, top_k=top_k, longest=longest, no_answer=no_answer)
