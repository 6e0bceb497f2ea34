"""Measures of predictions of classes, tags, answers and similarities. Shares are in 0..1.

Pure functions of Python's own values. Their tests compare them with scikit-learn and scipy, and with the rules of
conlleval and of the scripts of SQuAD and CMRC, written again.
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
    """Share of the predictions that are right: of one class each, of the classes of all tokens, of triplets."""
    _check(targets, predictions)
    return sum(a == b for a, b in zip(targets, predictions, strict=True)) / len(targets)


def macro_f1(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Mean over the classes of targets and predictions of

    F1 = 2 TP / (2 TP + FP + FN)
    """
    _check(targets, predictions)
    actual, predicted = Counter(targets), Counter(predictions)
    right = Counter(a for a, b in zip(targets, predictions, strict=True) if a == b)
    classes = actual | predicted
    return math.fsum(2 * right[c] / (actual[c] + predicted[c]) for c in classes) / len(classes)


def matthews(targets: Sequence[Hashable], predictions: Sequence[Hashable]) -> float:
    """Matthews' correlation of K classes, in -1..1; 0 where all are of one class, on either side.

        (c s - sum_k p_k t_k) / sqrt((s^2 - sum_k p_k^2) (s^2 - sum_k t_k^2))

    s predictions, c right ones, p_k times class k is predicted, t_k times the target (Gorodkin 2004, equation 8)."""
    _check(targets, predictions)
    actual, predicted, s = Counter(targets), Counter(predictions), len(targets)
    c = sum(a == b for a, b in zip(targets, predictions, strict=True))
    within = sum(n * n for n in predicted.values()), sum(n * n for n in actual.values())
    spread = math.sqrt((s * s - within[0]) * (s * s - within[1]))
    return (c * s - sum(predicted[k] * n for k, n in actual.items())) / spread if spread else 0.0


@dataclass(frozen=True)
class ClassScores:
    """Scores of one class: precision TP / (TP + FP), recall TP / (TP + FN), f1 2 TP / (2 TP + FP + FN),
    each 0 where nothing is counted; `count` is TP + FN."""

    label: str
    precision: float
    recall: float
    f1: float
    count: int


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix: `counts[target][predicted]`, both in the order of `labels`."""

    labels: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(labels: Sequence[str], targets: Sequence[int], predictions: Sequence[int]) -> "Confusion":
        """The confusion of predictions, by the numbers of their labels."""
        _check(targets, predictions)
        both, numbers = Counter(zip(targets, predictions, strict=True)), range(len(labels))
        return Confusion(tuple(labels), tuple(tuple(both[a, b] for b in numbers) for a in numbers))

    @property
    def classes(self) -> tuple[ClassScores, ...]:
        """Scores of each class."""

        def share(part: int, whole: int) -> float:
            return part / whole if whole else 0.0

        per_class = []
        for i, (label, row) in enumerate(zip(self.labels, self.counts, strict=True)):
            right, actual, predicted = row[i], sum(row), sum(other[i] for other in self.counts)
            scores = share(right, predicted), share(right, actual), share(2 * right, actual + predicted)
            per_class.append(ClassScores(label, *scores, actual))
        return tuple(per_class)


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """The entities that BIO tags mark, as (label, first, behind the last). "B-" begins a stretch, "I-" goes on with one
    of its label and else begins one; "O" is outside (Ramshaw and Marcus 1995, section 3; CoNLL's conlleval). Tags
    without a prefix go on with their neighbours of the same name."""
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
    """F1 of the entities of texts, by their BIO tags: right is one whose label, beginning and end are right
    (Tjong Kim Sang and De Meulder 2003, section 2.4; what seqeval gives). 1 where there is none on either side."""
    _check(targets, predictions)
    actual, predicted = (
        {(i, *e) for i, tags in enumerate(texts) for e in entities(tags)} for texts in (targets, predictions)
    )
    return 2 * len(actual & predicted) / (len(actual) + len(predicted)) if actual or predicted else 1.0


def squad_exact(answers: Sequence[str], prediction: str) -> float:
    """1 where the answer is one of `answers`, normalised: lower case, no punctuation, no articles, single spaces
    (Rajpurkar et al. 2016, section 6.1). No `answers`: the right answer is none, which is written ""."""
    return float(_squad(prediction) in map(_squad, answers or [""]))


def squad_f1(answers: Sequence[str], prediction: str) -> float:
    """F1 of the answer's normalised words as a bag, of the nearest of `answers` (Rajpurkar et al. 2016, section 6.1;
    Rajpurkar et al. 2018 where one of them is empty: whether both are)."""
    return max(_bag_f1(_squad(answer).split(), _squad(prediction).split()) for answer in answers or [""])


def cmrc_exact(answers: Sequence[str], prediction: str) -> float:
    """1 where the answer is one of `answers`, in lower case and without CMRC's punctuation (Cui et al. 2019, section
    4.1). No `answers`: as in `squad_exact`."""
    return float(_cmrc(prediction) in map(_cmrc, answers or [""]))


def cmrc_f1(answers: Sequence[str], prediction: str) -> float:
    """F1 of the longest run that the answer shares with one of `answers`, in Chinese characters and in words of other
    scripts, of the nearest of them (Cui et al. 2019, section 4.1, and their script; it splits other scripts by nltk,
    here words and punctuation are apart)."""
    return max(
        _run_f1(*(_CMRC_PIECES.findall(_cmrc(text)) for text in (a, prediction))) for a in answers or [""]
    )


Measure = Callable[[Sequence[str], str], float]


def answer_measures(answers: Sequence[str]) -> tuple[Measure, Measure]:
    """(exact match, F1) for data with these answers: CMRC's where one has a Chinese character, else SQuAD's."""
    return (cmrc_exact, cmrc_f1) if any(map(CHINESE.search, answers)) else (squad_exact, squad_f1)


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Pearson's correlation of the ranks; equal values share the mean of their ranks (Spearman 1904). NaN where all
    of one side are equal."""
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
    order = sorted(values)
    return [(bisect_left(order, value) + 1 + bisect_right(order, value)) / 2 for value in values]
