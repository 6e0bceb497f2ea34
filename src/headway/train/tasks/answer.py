"""Extractive question answering: the span of a text that answers a question (Devlin et al. 2019, section 4.2; Beltagy
et al. 2020, section 5).

Legend: B rows of a batch, T slots.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from headway.data import Batch
from headway.data.encoded import best_answers, windows, without_places
from headway.data.record_kinds import NOWHERE, Question
from headway.errors import DataError
from headway.metrics import CHINESE, answer_measures
from headway.models import Head, ModelSpec
from headway.text import Encoded
from headway.train.config import setting
from headway.train.tasks.base import Sums
from headway.train.tasks.heads import HeadConfig, HeadRows, HeadTask, encoded_whole
from headway.train.tasks.records import Reading


class AnswerConfig(HeadConfig):
    """Settings of training to answer questions.

    batch: windows of one optimizer step
    stride: tokens from one window of a text to the next [default: a quarter of context]
    occurrences: which places of the answer are right: the first that the data gives, all that it gives, or
        wherever the text of one stands (of several: -log of the sum of their probabilities)
    longest: most tokens of an answer that is found in an evaluation
    """

    usual: ClassVar = {"task": "answer", "out": "runs/answer"}
    stride: int | None = setting(None, group="Batch", unit="tokens", ge=1)
    occurrences: Literal["first", "given", "all"] = setting("first", group="Task")
    longest: int = setting(30, group="Task", unit="tokens", ge=1)


class Window(NamedTuple):
    """A window: part of a text with its question.

    question: index of the record. spans: (first, last) slots of its answers; (0, 0), the slot of [CLS], if the window
    holds none."""

    question: int
    text: Encoded
    spans: Sequence[tuple[int, int]]


class QuestionRows(HeadRows):
    """Windows of texts, with the start and end of the answers in each.

        loss = (-log sum over i of p(start = i) - log sum over j of p(end = j)) / 2

    where i are the first tokens and j the last tokens of the answers, and p is a softmax over the row's tokens. With
    one answer it is the loss of `transformers`; with several, that of Clark and Gardner 2018, section 3.3, with which
    Longformer was trained on TriviaQA."""

    unit = "window"

    def __init__(self, records: Sequence[Question], config: AnswerConfig, reading: Reading) -> None:
        self.records, self.spec, self.longest = records, reading.spec, config.longest
        self.parts = list[Window]()
        pairs = (((record.question, record.context), record.where) for record in records)
        split_texts = without_answer = 0
        for i, encoding in enumerate(encoded_whole(reading.tokenizer, pairs, config)):
            parts = windows(encoding, config.context, config.stride or -(-config.context // 4))
            split_texts += len(parts) > 1
            parts = parts[:1] if config.too_long == "cut" else parts
            if encoding.texts[0] is not None:
                raise DataError(
                    "windows without an answer are trained to point at the token before the question ([CLS]), but this "
                    "tokenizer puts none there; use a tokenizer with such a template"
                )
            places = PLACES[config.occurrences](records[i])
            spans = [slots_of(part, places) for part in parts]
            without_answer += bool(places) and not any(spans)
            encodings = parts if reading.scored else map(without_places, parts)
            self.parts += [Window(i, part, at or [(0, 0)]) for part, at in zip(encodings, spans, strict=True)]
        self.texts = [part.text for part in self.parts]
        of_questions, long_texts = (
            f"of {len(records)} questions have",
            f"texts of more than {config.context} tokens",
        )
        self.remarks = [
            *([f"{split_texts} {of_questions} {long_texts}: {config.too_long}"] if split_texts else []),
            *([f"{without_answer} {of_questions} no answer in what is read"] if without_answer else []),
        ]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Returns these windows as a batch. Targets are bool [B, T, 2]: whether answers start, or end, there."""
        parts, inputs = [self.parts[i] for i in indices], self.inputs(indices)
        targets = torch.zeros(*inputs["ids"].shape, 2, dtype=torch.bool)
        for row, part in enumerate(parts):
            for side in (0, 1):
                targets[row, [span[side] for span in part.spans], side] = True
        return Batch(inputs, targets)

    def loss(self, outputs: Tensor, batch: Batch) -> Sums:
        valid = batch.inputs["tokens"].valid.unsqueeze(-1)
        logits = outputs.masked_fill(~valid, -torch.inf)
        right = logits.masked_fill(~batch.targets, -torch.inf).logsumexp(1)
        total = (logits.logsumexp(1) - right).sum() / 2
        return Sums(total, total.detach())

    def predicted(self, outputs: Tensor, batch: Batch) -> list[Tensor]:
        counts = batch.inputs["tokens"].valid.sum(1).tolist()
        return [out[:count] for out, count in zip(outputs, counts, strict=True)]

    def scores(self, predictions: Sequence[Tensor]) -> dict[str, float]:
        """Returns means over the questions, for the best answer over all windows of each: exact match and F1, as
        defined for the data's language; `hit`, whether it overlaps an answer of the data (or both are empty); `guess`,
        the probability that a character drawn from the text lies in an answer of the data. If some question has no
        answer, "no answer" is among the candidates (with `no_answer` = 0)."""
        windows_of: dict[int, list[int]] = {}
        for i, part in enumerate(self.parts):
            windows_of.setdefault(part.question, []).append(i)
        open_ended = 0.0 if any(not record.answers for record in self.records) else None
        gold = [[answer.text for answer in record.answers] for record in self.records]
        exact, f1 = answer_measures([text for texts in gold for text in texts])
        sums = [0.0, 0.0, 0.0, 0.0]
        for question, numbers in windows_of.items():
            (best,) = best_answers(
                self.records[question].context,
                [self.parts[i].text for i in numbers],
                [predictions[i] for i in numbers],
                longest=self.longest,
                no_answer=open_ended,
            )
            sums[0] += exact(gold[question], best.text)
            sums[1] += f1(gold[question], best.text)
            places = given_spans(self.records[question])
            sums[2] += any(best.start < stop and start < best.end for start, stop in places) or not (
                best.text or gold[question]
            )
            covered = {place for start, stop in places for place in range(start, stop)}
            sums[3] += len(covered) / max(len(self.records[question].context), 1)
        names = ("exact", "f1", "hit", "guess")
        return {name: total / len(self.records) for name, total in zip(names, sums, strict=True)}


class Answer(HeadTask):
    """The task of finding the span of a text that answers a question."""

    settings = AnswerConfig
    head_task = "answer"
    kinds = (Question,)
    rows = QuestionRows
    measured_by = (*HeadTask.measured_by, "stride", "occurrences", "longest")
    next_command = "headway answer {model} 'QUESTION' 'TEXT'"

    def head(self, records: Sequence[Question], spec: ModelSpec) -> Head:
        return Head("answer")

    @classmethod
    def texts(cls, records: Sequence[Question]) -> Iterator[str]:
        before = None
        for record in records:
            yield record.question
            if record.context != before:
                yield record.context
            before = record.context


def given_spans(record: Question) -> list[tuple[int, int]]:
    """Returns (start, stop) in characters of each answer of the data that has a place, without surrounding spaces."""
    spans = []
    for answer in record.answers:
        if answer.start == NOWHERE:
            continue
        start = answer.start + len(answer.text) - len(answer.text.lstrip())
        spans.append((start, start + len(answer.text.strip())))
    return spans


def occurrences(record: Question) -> list[tuple[int, int]]:
    """Returns (start, stop) in characters of the answers of the data, and of all further places where the text of an
    answer occurs as whole words (Chinese text: anywhere)."""
    places = {*given_spans(record)}
    letter = rf"(?!{CHINESE.pattern})\w"
    for text in {answer.text.strip() for answer in record.answers} - {""}:
        before = rf"(?<![^\W{CHINESE.pattern[1:-1]}])" if re.match(letter, text[0]) else ""
        after = rf"(?!{letter})" if re.match(letter, text[-1]) else ""
        places |= {match.span() for match in re.finditer(before + re.escape(text) + after, record.context)}
    return sorted(places)


PLACES: Mapping[str, Callable[[Question], list[tuple[int, int]]]] = {
    "first": lambda record: given_spans(record)[:1],
    "given": given_spans,
    "all": occurrences,
}


def slots_of(text: Encoded, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns (first, last) slot of each place (start, stop) that lies completely in a window: the first and last token
    of the context that overlap it."""
    inside = [
        (i, at) for i, (at, side) in enumerate(zip(text.offsets, text.texts, strict=True)) if side == 1 and at
    ]
    if not inside:
        return []
    begin, end = inside[0][1][0], inside[-1][1][1]
    spans = []
    for start, stop in places:
        covered = [i for i, at in inside if at[0] < stop and at[1] > start]
        if covered and begin <= start and stop <= end:
            spans.append((covered[0], covered[-1]))
    return spans
