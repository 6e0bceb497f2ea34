"""Classification of a text or a pair of texts (Devlin et al. 2019, section 4.1), and tagging of words (ibid., 5.3).

Legend: B rows of a batch, T slots, C labels.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import ClassVar, NamedTuple

import torch

from headway.data import Batch
from headway.data.encoded import pieces, select, without_places
from headway.data.record_kinds import Labelled, Tagged
from headway.data.rows import padded
from headway.errors import ConfigError, DataError, did_you_mean
from headway.metrics import Confusion, accuracy, entity_f1, macro_f1, matthews
from headway.models import Head, ModelSpec
from headway.models.families import find_family
from headway.models.head import Pool
from headway.nn import IGNORE_INDEX
from headway.text import Encoded
from headway.text.tokenizer import Text
from headway.text.wordpiece import HAN
from headway.train.config import setting
from headway.train.tasks.heads import HeadConfig, HeadRows, HeadTask, WholeConfig, encoded, encoded_whole
from headway.train.tasks.records import Reading

OUTSIDE = "O"
_HAN = re.compile(HAN)


class ClassifyConfig(WholeConfig):
    """Settings of training a classifier.

    labels: names of the classes in their order [default: the model's, if they include the data's; else those
        of the data, sorted]
    pool: what the class is predicted from: the first token's state, as in BERT, or the mean over the tokens,
        from which a model with little pre-training learns sooner
    """

    usual: ClassVar = {"task": "classify", "out": "runs/classify"}
    labels: tuple[str, ...] = setting((), group="Task")
    pool: Pool = setting("first", group="Task")


class LabelledRows(HeadRows):
    """Rows of texts or pairs, with the index of the label of each as targets [B].

    loss = -log softmax(logits)[label]
    """

    one_each = True

    def __init__(self, records: Sequence[Labelled], config: WholeConfig, reading: Reading) -> None:
        numbers = label_numbers(reading.spec, [(record.label, record.where) for record in records])
        texts: list[tuple[Text, str]] = [
            (record.text if record.pair is None else (record.text, record.pair), record.where)
            for record in records
        ]
        self.texts, self.remarks = encoded(reading.tokenizer, texts, config)
        self.labels, self.spec = [numbers[record.label] for record in records], reading.spec

    def batch(self, indices: Sequence[int]) -> Batch:
        return Batch(self.inputs(indices), torch.tensor([self.labels[i] for i in indices]))

    def scores(self, predictions: Sequence[int]) -> dict[str, float]:
        """Returns accuracy, macro F1 and Matthews' correlation."""
        measures = {"accuracy": accuracy, "f1": macro_f1, "matthews": matthews}
        return {name: measure(self.labels, predictions) for name, measure in measures.items()}

    def confusion(self, predictions: Sequence[int]) -> Confusion:
        return Confusion.of(self.spec.head.labels, self.labels, predictions)


class Classify(HeadTask):
    """The task of predicting one label of a text or pair."""

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


def label_names(labels: Sequence[str], names: tuple[str, ...], head: Head, task: str) -> tuple[str, ...]:
    """Returns the names of the labels in order: `names` if given; those of `head` if it is of the same task and has all
    `labels` of the data; else these, sorted (numerically if all are numbers).

    Raises ConfigError for duplicate names, DataError if the data has a single label."""
    present = set(labels)
    if names:
        if len(set(names)) < len(names):
            raise ConfigError(f"labels must be different from each other, got {', '.join(names)}")
        return names
    if head.task == task and present <= {*head.labels}:
        return head.labels
    if len(present) < 2:
        raise DataError(
            f"the data has only the label {', '.join(present)!r}, but training needs two or more; give more data, or "
            "all names as labels"
        )
    are_numbers = all(name.lstrip("-").isdecimal() for name in present)
    return tuple(sorted(present, key=(lambda name: (int(name), name)) if are_numbers else None))


def label_numbers(spec: ModelSpec, labels: Iterable[tuple[str, str]]) -> dict[str, int]:
    """Returns the index of each label of a model. Raises DataError for the first of `labels`, each with its file and
    line, that the model lacks."""
    names = spec.head.labels
    for name, where in labels:
        if name not in names:
            raise DataError(
                f"{where}: the model has no label {name!r}{did_you_mean(name, names)}; it has {', '.join(names[:20])}"
            )
    return {name: i for i, name in enumerate(names)}


class TagConfig(HeadConfig):
    """Settings of training a tagger.

    labels: names of the tags in their order [default: the model's, if they include the data's; else those of
        the data, sorted]
    """

    usual: ClassVar = {"task": "tag", "out": "runs/tag"}
    labels: tuple[str, ...] = setting((), group="Task")


class Piece(NamedTuple):
    """Part of a text.

    record: index of the text's record. labels: index of each token's label; IGNORE_INDEX for tokens of the template.
    first: (slot, word) of each word that begins in this part."""

    record: int
    text: Encoded
    labels: Sequence[int]
    first: Sequence[tuple[int, int]]


class TaggedRows(HeadRows):
    """Pieces of texts with the labels of their tokens.

        loss = sum over the tokens of words of -log softmax(logits)[label]

    All tokens of a word are trained, since `Tagger.tag` uses the predictions of all: the first token has the word's
    tag, the others its continuation ("I-" for "B-", if there is such a label)."""

    unit = "token"

    def __init__(self, records: Sequence[Tagged], config: TagConfig, reading: Reading) -> None:
        self.records, self.spec, self.parts = records, reading.spec, list[Piece]()
        numbers = label_numbers(self.spec, [(tag, record.where) for record in records for tag in record.tags])
        later = {name: numbers.get(f"I-{name.removeprefix('B-')}", i) for name, i in numbers.items()}
        joined_words = [joined(record.words) for record in records]
        texts = [(text, record.where) for (text, _), record in zip(joined_words, records, strict=True)]
        split_texts = words_lost = 0
        for i, encoding in enumerate(encoded_whole(reading.tokenizer, texts, config)):
            words = [None if at is None else joined_words[i][1][at[0]] for at in encoding.offsets]
            begins = [word is not None and word != words[slot - 1] for slot, word in enumerate(words)]
            labels = [
                IGNORE_INDEX if word is None else (numbers if first else later)[records[i].tags[word]]
                for word, first in zip(words, begins, strict=True)
            ]
            slots = pieces(encoding, config.context)
            split_texts += len(slots) > 1
            for piece in slots[:1] if config.too_long == "cut" else slots:
                first = [
                    (to, word)
                    for to, at in enumerate(piece)
                    if begins[at] and (word := words[at]) is not None
                ]
                text = without_places(select(encoding, piece))
                self.parts.append(Piece(i, text, [labels[at] for at in piece], first))
                words_lost -= len(first)
            words_lost += len(records[i].words)
        self.texts = [part.text for part in self.parts]
        long = (
            f"{split_texts} of {len(records)} texts have more than {config.context} tokens: {config.too_long}"
        )
        self.remarks = [
            *([long] if split_texts else []),
            *([f"{words_lost} words are not read"] if words_lost else []),
        ]

    def batch(self, indices: Sequence[int]) -> Batch:
        targets = padded([self.parts[i].labels for i in indices], IGNORE_INDEX)
        return Batch(self.inputs(indices), targets)

    def count(self, batch: Batch) -> int:
        return int((batch.targets != IGNORE_INDEX).sum())

    def scores(self, predictions: Sequence[list[int]]) -> dict[str, float]:
        """Returns accuracy over words, and F1 of entities. A word has the tag of its first token; words that were cut
        off have the tag "O"."""
        predicted = [[OUTSIDE] * len(record.tags) for record in self.records]
        for part, labels in zip(self.parts, predictions, strict=True):
            for slot, word in part.first:
                predicted[part.record][word] = self.spec.head.labels[labels[slot]]
        targets = [list(record.tags) for record in self.records]
        flat = [list(chain.from_iterable(tags)) for tags in (targets, predicted)]
        return {"accuracy": accuracy(*flat), "f1": entity_f1(targets, predicted)}


class Tag(HeadTask):
    """The task of predicting one label for each word."""

    settings = TagConfig
    config: TagConfig
    head_task = "tag"
    kinds = (Tagged,)
    rows = TaggedRows
    next_command = "headway classify {model} 'a text'"

    def head(self, records: Sequence[Tagged], spec: ModelSpec) -> Head:
        tags = [tag for record in records for tag in record.tags]
        return Head("tag", labels=label_names(tags, self.config.labels, spec.head, "tag"))

    @classmethod
    def texts(cls, records: Sequence[Tagged]) -> Iterator[str]:
        return (joined(record.words)[0] for record in records)


def joined(words: Sequence[str]) -> tuple[str, list[int]]:
    """Joins words to a text; returns it, and for each character the index of its word. Words are separated by a space,
    except between two Chinese ones; the space belongs to the word after it, as in byte-level tokens. For example,
    ["a", "cat"] gives "a cat" and [0, 1, 1, 1, 1]."""
    parts, owner = list[str](), list[int]()
    for i, word in enumerate(words):
        if not word:
            raise DataError(f"word {i + 1} of {' '.join(words)!r} is empty")
        if parts and not (_HAN.match(parts[-1][-1]) and _HAN.match(word[0])):
            parts.append(" ")
            owner.append(i)
        parts.append(word)
        owner += [i] * len(word)
    return "".join(parts), owner
