"""The class of a text, or of a pair of texts (Devlin et al. 2019, section 4.1).

Legend: B rows of a batch, C labels.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from headway.data import Batch
from headway.data.record_kinds import Labelled
from headway.errors import ConfigError, DataError, did_you_mean
from headway.metrics import Confusion, accuracy, macro_f1, matthews
from headway.models import Head, ModelSpec
from headway.models.families import find_family
from headway.models.head import Pool
from headway.text.tokenizer import Text
from headway.train.config import setting
from headway.train.tasks.heads import HeadRows, HeadTask, WholeConfig, encoded
from headway.train.tasks.records import Reading


class ClassifyConfig(WholeConfig):
    """Settings of a classifier's training.

    labels: names of the classes in their order [default: the model's, where they do; else those of the data,
        sorted]
    pool: what the class is read from: the first token's state, as in BERT, or the mean over the tokens, from
        which a model with little pre-training learns sooner
    """

    usual: ClassVar = {"task": "classify", "out": "runs/classify"}
    labels: tuple[str, ...] = setting((), group="Task")
    pool: Pool = setting("first", group="Task")


class LabelledRows(HeadRows):
    """Texts and the number of the label of each [N].

    loss = -log softmax(logits)[label]
    """

    one_each = True

    def __init__(self, records: Sequence[Labelled], config: WholeConfig, reading: Reading) -> None:
        numbers = label_numbers(reading.spec, [(record.label, record.where) for record in records])
        texts: list[Text] = [
            record.text if record.pair is None else (record.text, record.pair) for record in records
        ]
        wheres = [record.where for record in records]
        self.texts, self.remarks = encoded(reading.tokenizer, texts, wheres, config)
        self.labels, self.spec = [numbers[record.label] for record in records], reading.spec

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch(self.inputs(indices), torch.tensor([self.labels[i] for i in indices]))

    def scores(self, predictions: Sequence[int]) -> dict[str, float]:
        """Accuracy, macro F1 and Matthews' correlation."""
        measures = {"accuracy": accuracy, "f1": macro_f1, "matthews": matthews}
        return {name: measure(self.labels, predictions) for name, measure in measures.items()}

    def confusion(self, predictions: Sequence[int]) -> Confusion:
        return Confusion.of(self.spec.head.labels, self.labels, predictions)


class Classify(HeadTask):
    """One label of a text or a pair."""

    settings = ClassifyConfig
    config: ClassifyConfig
    head_task = "classify"
    kinds = (Labelled,)
    rows = LabelledRows
    next_command = "headway classify {model} 'a text'"

    def head(self, records: Sequence[Labelled], spec: ModelSpec) -> Head:
        labels, pool = [record.label for record in records], self.config.pool
        names = label_names(labels, self.config.labels, spec.head, "classify")
        fresh = Head("classify", labels=names, pool=pool, dense=find_family(spec.family).classifier)
        same = spec.head.task == "classify" and (spec.head.labels, spec.head.pool) == (names, pool)
        return spec.head if same else fresh

    @classmethod
    def texts(cls, records: Sequence[Labelled]) -> Iterator[str]:
        return (text for record in records for text in (record.text, record.pair) if text is not None)


def label_names(found: Sequence[str], asked: tuple[str, ...], own: Head, task: str) -> tuple[str, ...]:
    """The names of the labels, in order: those that are asked for, those of a head of the same task that has all that
    are found, or those that are found, sorted (as numbers where they are)."""
    there = set(found)
    if asked:
        if len(set(asked)) < len(asked):
            raise ConfigError(f"labels: a name is there twice: {', '.join(asked)}")
        return asked
    if own.task == task and there <= {*own.labels}:
        return own.labels
    if len(there) < 2:
        raise DataError(
            f"the data has the label {', '.join(there)!r} only, and there is nothing to learn from one; give data with "
            "several, or all of them as labels"
        )
    are_numbers = all(name.lstrip("-").isdecimal() for name in there)
    return tuple(sorted(there, key=(lambda name: (int(name), name)) if are_numbers else None))


def label_numbers(spec: ModelSpec, labels: Iterable[tuple[str, str]]) -> dict[str, int]:
    """The number of each label of a model. Raises DataError for the first of `labels`, each with its file and line,
    that the model lacks."""
    names = spec.head.labels
    for name, where in labels:
        if name not in names:
            raise DataError(
                f"{where}: the label {name!r} is none of the model's{did_you_mean(name, names)}; there are "
                f"{', '.join(names[:20])}"
            )
    return {name: i for i, name in enumerate(names)}
