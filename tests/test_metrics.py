"""Metrics against cases by hand, the official scripts' formulas, and (slow) scikit-learn and scipy."""

import collections
import math
import re
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.metrics import (
    Confusion,
    accuracy,
    answer_measures,
    cmrc_exact,
    cmrc_f1,
    entities,
    entity_f1,
    macro_f1,
    matthews,
    spearman,
    squad_exact,
    squad_f1,
)

# predicted answer, right answers, exact match, F1
SQUAD: list[tuple[str, list[str], float, float]] = [
    ("Denver Broncos", ["Denver Broncos"], 1, 1),
    ("denver broncos", ["Denver Broncos"], 1, 1),
    ("the Denver Broncos", ["Denver Broncos"], 1, 1),
    ("Denver Broncos.", ["Denver Broncos"], 1, 1),
    ("  Denver   Broncos ", ["Denver Broncos"], 1, 1),
    ('"Denver Broncos"', ["Denver Broncos"], 1, 1),
    ("A Denver, an Broncos!", ["Denver Broncos"], 1, 1),
    ("Broncos", ["Denver Broncos"], 0, 2 / 3),
    ("Denver", ["Denver Broncos"], 0, 2 / 3),
    ("Broncos Denver", ["Denver Broncos"], 0, 1),
    ("Denver Denver", ["Denver Broncos"], 0, 1 / 2),
    ("Denver Broncos of Colorado", ["Denver Broncos"], 0, 2 / 3),
    ("Carolina Panthers", ["Denver Broncos"], 0, 0),
    ("", ["Denver Broncos"], 0, 0),
    ("", [], 1, 1),
    ("Denver", [], 0, 0),
    ("the", [], 1, 1),
    ("...", [], 1, 1),
    ("the", ["a"], 1, 1),
    ("", [""], 1, 1),
    ("Santa Clara", ["Santa Clara, California", "Levi's Stadium"], 0, 4 / 5),
    ("Levis Stadium", ["Santa Clara, California", "Levi's Stadium"], 1, 1),
    ("Levi s Stadium", ["Levi's Stadium"], 0, 2 / 5),
    ("Stadium", ["Santa Clara", "Levi's Stadium", "Stadium in Santa Clara"], 0, 2 / 3),
    ("gold", ["gold", "gold", "gold"], 1, 1),
    ("golden", ["gold"], 0, 0),
    ("gold anniversary", ["gold", "golden anniversary"], 0, 2 / 3),
    ("February 7, 2016", ["February 7, 2016", "February 7"], 1, 1),
    ("February 7 2016", ["February 7, 2016"], 1, 1),
    ("7 February 2016", ["February 7, 2016"], 0, 1),
    ("Feb 7 2016", ["February 7, 2016"], 0, 2 / 3),
    ("2016", ["February 7, 2016"], 0, 1 / 2),
    ("1,000", ["1000"], 1, 1),
    ("1.000", ["1000"], 1, 1),
    ("1 000", ["1000"], 0, 0),
    ("$5", ["5"], 1, 1),
    ("5%", ["5"], 1, 1),
    ("five", ["5"], 0, 0),
    ("well-known", ["well known"], 0, 0),
    ("well-known", ["wellknown"], 1, 1),
    ("U.S.", ["US"], 1, 1),
    ("U. S.", ["US"], 0, 0),
    ("United States", ["the United States of America"], 0, 2 / 3),
    ("an apple", ["Apple"], 1, 1),
    ("anapple", ["apple"], 0, 0),
    ("theatre", ["the atre"], 0, 0),
    ("a b c d", ["b c d e"], 0, 2 * 3 / 7),
    ("b b c", ["b c c"], 0, 2 / 3),
    ("caf\u00e9", ["CAF\u00c9"], 1, 1),
    ("x\u2013y", ["xy"], 0, 0),
]
PIECES = st.sampled_from(["the", "a", "An", "b", "c", "B.", ",", "d-e", " ", "f"])
TEXT = st.lists(PIECES, max_size=6).map(" ".join)
CLASSES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=30)
TAGS = st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"])


@pytest.mark.parametrize(("found", "answers", "exact", "f1"), SQUAD)
def test_answers_of_squad_by_hand(found: str, answers: list[str], exact: float, f1: float) -> None:
    assert squad_exact(answers, found) == exact
    assert squad_f1(answers, found) == pytest.approx(f1, abs=1e-12)


def script(answer: str, prediction: str) -> tuple[float, float]:
    """Computes exact match and F1 step by step as the script of SQuAD 2.0 does."""
    words = []
    for text in (answer.lower(), prediction.lower()):
        text = "".join(c for c in text if c not in set(string.punctuation))
        text = re.compile(r"\b(a|an|the)\b", re.UNICODE).sub(" ", text)
        words.append(text.split())
    gold, predicted = words
    exact = float(" ".join(gold) == " ".join(predicted))
    if len(gold) == 0 or len(predicted) == 0:
        return exact, float(gold == predicted)
    same = sum((collections.Counter(gold) & collections.Counter(predicted)).values())
    if same == 0:
        return exact, 0.0
    precision, recall = same / len(predicted), same / len(gold)
    return exact, 2 * precision * recall / (precision + recall)


@given(TEXT, st.lists(TEXT, min_size=1, max_size=3))
def test_answers_of_squad_are_scored_as_by_its_script(found: str, answers: list[str]) -> None:
    theirs = [script(answer, found) for answer in answers]
    assert squad_exact(answers, found) == max(exact for exact, _ in theirs)
    assert squad_f1(answers, found) == pytest.approx(max(f1 for _, f1 in theirs), abs=1e-12)


@pytest.mark.parametrize(
    ("found", "answers", "exact", "f1"),
    [
        ("光荣和ω-force", ["光荣和ω-force"], 1, 1),
        ("光荣和ω-Force。", ["光荣和ωforce"], 1, 1),
        ("光荣", ["光荣和ω-force"], 0, 2 * 2 / (2 + 4)),  # 光 荣 和 ωforce
        ("武田信玄", ["织田信长", "武田"], 0, 2 * 2 / 6),
        ("信玄武田", ["武田信玄"], 0, 2 * 2 / 8),  # the longest common run counts, not the bag of characters
        ("2011年", ["2012年"], 0, 2 * 1 / 4),
        ("《战国无双3》", ["战国无双3"], 1, 1),
        ("村雨城", ["三国"], 0, 0),
        ("", ["三国"], 0, 0),
    ],
)
def test_answers_of_cmrc_by_hand(found: str, answers: list[str], exact: float, f1: float) -> None:
    assert (cmrc_exact(answers, found), cmrc_f1(answers, found)) == (exact, pytest.approx(f1, abs=1e-12))
    assert answer_measures(["a", *answers]) == (cmrc_exact, cmrc_f1)
    assert answer_measures(["a", "b"]) == (squad_exact, squad_f1)


def chunks(tags: list[str]) -> set[tuple[str, int, int]]:
    """Finds chunks as conlleval does, by asking after each pair of tags whether a chunk ends and whether one begins."""
    spans, start, previous = set(), 0, "O"
    for i, tag in enumerate([*tags, "O"]):
        (p, old), (q, new) = (bio_tag.partition("-")[::2] for bio_tag in (previous, tag))
        if p != "O" and (q in ("B", "O") or old != new):
            spans.add((old, start, i))
        if q == "B" or (q == "I" and (p == "O" or old != new)):
            start = i
        previous = tag
    return spans


@given(st.lists(TAGS, max_size=12))
def test_entities_are_those_of_conlleval(tags: list[str]) -> None:
    spans = entities(tags)
    assert set(spans) == chunks(tags)
    assert len(set(spans)) == len(spans)


def test_entity_f1_by_hand() -> None:
    expected = [["B-PER", "I-PER", "O", "B-LOC"], ["O", "B-ORG"]]
    assert entity_f1(expected, expected) == 1
    predicted = [["B-PER", "O", "O", "B-LOC"], ["B-LOC", "B-ORG"]]  # 2 of 3 are found, 2 of 4 are right
    assert entity_f1(expected, predicted) == pytest.approx(2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4))
    assert entity_f1([["O"]], [["O"]]) == 1
    assert entity_f1([["O"]], [["B-X"]]) == 0
    assert entity_f1([["O"], ["B-X"]], [["B-X"], ["O"]]) == 0  # the right entity, but in another text


def test_classes_by_hand() -> None:
    expected, predicted = ["a", "a", "a", "b", "b", "c"], ["a", "a", "b", "b", "a", "a"]
    assert accuracy(expected, predicted) == 1 / 2
    assert macro_f1(expected, predicted) == pytest.approx((2 * 2 / 7 + 2 * 1 / 4 + 0) / 3)
    assert matthews(expected, predicted) == pytest.approx((3 * 6 - 16) / math.sqrt((36 - 20) * (36 - 14)))
    assert matthews([0, 1], [1, 0]) == -1
    assert matthews([0, 1], [1, 1]) == 0


@pytest.mark.parametrize(
    ("a", "b", "rho"),
    [
        ([1, 2, 3], [1, 8, 9], 1),
        ([1, 2, 3], [3, 2, 1], -1),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        ([1, 1, 2], [1, 2, 3], 0.75**0.5),
    ],
)
def test_rank_correlation_by_hand(a: list[float], b: list[float], rho: float) -> None:
    assert spearman(a, b) == pytest.approx(rho)
    assert math.isnan(spearman(a, [5.0] * len(a)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of one class only
@given(CLASSES)
def test_classes_as_in_scikit_learn(both: list[tuple[int, int]]) -> None:
    from sklearn import metrics

    expected, predicted = ([pair[i] for pair in both] for i in (0, 1))
    assert accuracy(expected, predicted) == pytest.approx(metrics.accuracy_score(expected, predicted))
    theirs = metrics.f1_score(expected, predicted, average="macro", zero_division=0)
    assert macro_f1(expected, predicted) == pytest.approx(theirs)
    assert matthews(expected, predicted) == pytest.approx(
        metrics.matthews_corrcoef(expected, predicted), abs=1e-9
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of one class only
@given(CLASSES)
def test_each_class_and_what_it_is_taken_for_as_in_scikit_learn(both: list[tuple[int, int]]) -> None:
    from sklearn import metrics

    expected, predicted = ([pair[i] for pair in both] for i in (0, 1))
    labels = list(range(max(map(max, both)) + 2))  # with one that does not occur
    confusion = Confusion.of([*map(str, labels)], expected, predicted)
    assert [list(row) for row in confusion.counts] == metrics.confusion_matrix(
        expected, predicted, labels=labels
    ).tolist()
    theirs = metrics.precision_recall_fscore_support(expected, predicted, labels=labels, zero_division=0)
    for score, *scores in zip(confusion.classes, *theirs, strict=True):
        assert [score.precision, score.recall, score.f1, score.count] == pytest.approx(scores)


def test_the_scores_of_a_class_are_their_fractions() -> None:
    """Of three "a", one is taken for "b"; of two "b", one is taken for "a"; "c" does not occur."""
    confusion = Confusion.of("abc", [0, 0, 0, 1, 1], [0, 0, 1, 1, 0])
    assert confusion.counts == ((2, 1, 0), (1, 1, 0), (0, 0, 0))
    a, b, c = confusion.classes
    assert (a.label, a.precision, a.recall, a.f1, a.count) == ("a", 2 / 3, 2 / 3, 4 / 6, 3)
    assert (b.precision, b.recall, b.f1, b.count) == (1 / 2, 1 / 2, 2 / 4, 2)
    assert (c.precision, c.recall, c.f1, c.count) == (0, 0, 0, 0)
    small = Confusion.of("ab", [0, 0, 1], [0, 1, 1])
    assert [(score.precision, score.recall) for score in small.classes] == [(1.0, 0.5), (0.5, 1.0)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # scipy warns of constant inputs
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1, 1)), min_size=2, max_size=20))
def test_ranks_as_in_scipy(both: list[tuple[int, float]]) -> None:
    from scipy import stats

    a, b = ([float(pair[i]) for pair in both] for i in (0, 1))
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-9, nan_ok=True)
