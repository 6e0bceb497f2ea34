"""Metrics for predictions of classes, tags, answers and similarities. Shares are in 0..1.

Pure functions of Python's own values. Their tests compare them with scikit-learn and scipy, and with reimplementations
of conlleval and of the evaluation scripts of SQuAD and CMRC.
"""

import math
import re
import statistics
import string
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

CHINESE = re.compile("[\u4e00-\u9fa5]")
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_ASCII_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CMRC_PUNCTUATION = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_CMRC_PIECES = re.compile(CHINESE.pattern + rf"|(?:(?!{CHINESE.pattern})\w)+|[^\w\s]")


def accuracy(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Returns the share of correct predictions: one class each, the classes of all tokens, or triplets."""
    _check(targets, predictions)
    return sum(a == b for a, b in zip(targets, predictions, strict=True)) / len(targets)


def macro_f1(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Returns the mean over all classes of targets and predictions of

    F1 = 2 TP / (2 TP + FP + FN)
    """
    _check(targets, predictions)
    actual, predicted = Counter(targets), Counter(predictions)
    right = Counter(a for a, b in zip(targets, predictions, strict=True) if a == b)
    classes = actual | predicted
    return math.fsum(2 * right[c] / (actual[c] + predicted[c]) for c in classes) / len(classes)


def matthews(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Returns Matthews' correlation of K classes, in -1..1; 0 if all targets, or all predictions, are of one class.

        (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))

    There are s predictions, c of them correct; class k is predicted p_k times and is the target t_k times (Gorodkin
    2004, equation 8)."""
    _check(targets, predictions)
    actual, predicted, s = Counter(targets), Counter(predictions), len(targets)
    c = sum(a == b for a, b in zip(targets, predictions, strict=True))
    same_class = sum(n * n for n in predicted.values()), sum(n * n for n in actual.values())
    spread = math.sqrt((s * s - same_class[0]) * (s * s - same_class[1]))
    return (c * s - sum(predicted[k] * n for k, n in actual.items())) / spread if spread else 0.0


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class: precision TP / (TP + FP), recall TP / (TP + FN), f1 2 TP / (2 TP + FP + FN).

    Each is 0 if its denominator is; `count` is TP + FN."""

    label: str
    precision: float
    recall: float
    f1: float
    count: int


@dataclass(frozen=True)
class Confusion:
    """A confusion matrix: `counts[target][predicted]`, both in the order of `labels`."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(labels: Sequence[str], targets: Sequence[int], predictions: Sequence[int]) -> "Confusion":
        """Returns the confusion matrix of predictions; targets and predictions are indices of `labels`."""
        _check(targets, predictions)
        pairs, classes = Counter(zip(targets, predictions, strict=True)), range(len(labels))
        return Confusion(tuple(labels), tuple(tuple(pairs[a, b] for b in classes) for a in classes))

    @property
    def classes(self) -> tuple[ClassScores, ...]:
        """Scores of each class."""

        def share(part: int, whole: int) -> float:
            return part / whole if whole else 0.0

        per_class = []
        for i, (label, row) in enumerate(zip(self.labels, self.counts, strict=True)):
            right, actual, predicted = row[i], sum(row), sum(counts[i] for counts in self.counts)
            scores = share(right, predicted), share(right, actual), share(2 * right, actual + predicted)
            per_class.append(ClassScores(label, *scores, actual))
        return tuple(per_class)


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the entities that BIO tags mark, as (label, first, end), end exclusive.

    "B-" begins an entity, "I-" continues one of the same label or else begins one; "O" is outside (Ramshaw and Marcus
    1995, section 3; CoNLL's conlleval). Adjacent equal tags without a prefix are one entity."""
    spans: list[tuple[str, int, int]] = []
    open_label = "O"
    for i, tag in enumerate(tags):
        label = tag[2:] if tag[:2] in ("B-", "I-") else tag
        if label != "O":
            if label == open_label and not tag.startswith("B-"):
                spans[-1] = (label, spans[-1][1], i + 1)
            else:
                spans.append((label, i, i + 1))
        open_label = label
    return spans


def entity_f1(targets: Sequence[Sequence[str]], predictions: Sequence[Sequence[str]]) -> float:
    """Returns the F1 of the entities of all sequences, by their BIO tags; 1 if there are none on either side.

    An entity is correct if its label, beginning and end are (Tjong Kim Sang and De Meulder 2003, section 2.4; the same
    value as seqeval's)."""
    _check(targets, predictions)
    actual, predicted = (
        {(i, *e) for i, tags in enumerate(sequences) for e in entities(tags)}
        for sequences in (targets, predictions)
    )
    return 2 * len(actual & predicted) / (len(actual) + len(predicted)) if actual or predicted else 1.0


def squad_exact(answers: Sequence[str], prediction: str) -> float:
    """Returns 1 if the normalized prediction is one of the normalized `answers`, else 0.

    Normalization: lower case, no punctuation, no articles, single spaces (Rajpurkar et al. 2016, section 6.1). Without
    `answers` the question has no answer, and the correct prediction is ""."""
    return float(_squad(prediction) in map(_squad, answers or [""]))


def squad_f1(answers: Sequence[str], prediction: str) -> float:
    """Returns the F1 of the prediction's normalized words as a bag, against the best match among `answers`.

    (Rajpurkar et al. 2016, section 6.1. If either side is empty: 1 if both are, else 0, as in Rajpurkar et al.
    2018.)"""
    return max(_bag_f1(_squad(answer).split(), _squad(prediction).split()) for answer in answers or [""])


def cmrc_exact(answers: Sequence[str], prediction: str) -> float:
    """Returns 1 if the prediction is one of `answers`, both in lower case and without CMRC's punctuation, else 0.

    (Cui et al. 2019, section 4.1.) Without `answers` the correct prediction is "", as in `squad_exact`."""
    return float(_cmrc(prediction) in map(_cmrc, answers or [""]))


def cmrc_f1(answers: Sequence[str], prediction: str) -> float:
    """Returns the F1 of the longest common substring with an answer, against the best match among `answers`.

    Lengths are counted in Chinese characters and in words of other scripts (Cui et al. 2019, section 4.1, and their
    script; it splits other scripts by nltk, here words and punctuation are separated)."""
    return max(
        _run_f1(*(_CMRC_PIECES.findall(_cmrc(text)) for text in (a, prediction))) for a in answers or [""]
    )


Measure = Callable[[Sequence[str], str], float]


def answer_measures(answers: Sequence[str]) -> tuple[Measure, Measure]:
    """Returns (exact match, F1) for these answers: CMRC's if any has a Chinese character, else SQuAD's."""
    return (cmrc_exact, cmrc_f1) if any(map(CHINESE.search, answers)) else (squad_exact, squad_f1)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns Pearson's correlation of the ranks; equal values share their mean rank (Spearman 1904).

    NaN if all values of one side are equal."""
    _check(a, b)
    try:
        return statistics.correlation(_ranks(a), _ranks(b))
    except statistics.StatisticsError:
        return math.nan


def _check(targets: Sequence[object], predictions: Sequence[object]) -> None:
    assert len(targets) == len(predictions) > 0, f"{len(predictions)} predictions of {len(targets)}"


def _squad(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_ASCII_PUNCTUATION)).split())


def _cmrc(text: str) -> str:
    return text.lower().strip().translate(_CMRC_PUNCTUATION)


def _bag_f1(targets: Sequence[str], predictions: Sequence[str]) -> float:
    if not targets or not predictions:
        return float(targets == predictions)
    return 2 * (Counter(targets) & Counter(predictions)).total() / (len(targets) + len(predictions))


def _run_f1(targets: Sequence[str], predictions: Sequence[str]) -> float:
    if not targets or not predictions:
        return float(targets == predictions)
    longest = SequenceMatcher(None, targets, predictions, autojunk=False).find_longest_match().size
    return 2 * longest / (len(targets) + len(predictions))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [(bisect_left(ordered, value) + 1 + bisect_right(ordered, value)) / 2 for value in values]
