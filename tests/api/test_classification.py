"""Classifiers and taggers: labels of texts and of spans are those of transformers with the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headway
from headway.api import Tagger
from headway.data.encoded import shortened, spans
from headway.errors import ConfigError
from tests.small_bert import LABELS, TEXTS, bert, theirs


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    labels = {0: "no", 1: "yes", 2: "perhaps"}
    path, model = bert(tmp_path_factory.mktemp("c"), "ForSequenceClassification", id2label=labels)
    model.name_or_path = str(path)
    return path, model


def test_labels_of_texts_and_pairs(classifier: tuple[Path, Any]) -> None:
    path, model = classifier
    ours = headway.load(path, task="classify")
    texts = [*TEXTS, ("who sat", "the cat sat on a mat"), ("the dog", "猫")]
    _, outputs = theirs(model, texts)
    results = ours.classify(texts, batch_size=3)
    for labels, logits in zip(results, outputs, strict=True):
        expected = logits.softmax(-1)
        assert [candidate.probability for candidate in labels] == sorted(
            (candidate.probability for candidate in labels), reverse=True
        )
        named = {candidate.label: candidate.probability for candidate in labels}
        for name, p in zip(("no", "yes", "perhaps"), expected.tolist(), strict=True):
            assert named[name] == pytest.approx(p, abs=1e-5)
    assert [candidate.label for candidate in ours.classify(texts[3], top_k=1)] == [results[3][0].label]


def test_independent_labels_and_single_ones(tmp_path: Path) -> None:
    path, model = bert(
        tmp_path / "many",
        "ForSequenceClassification",
        problem_type="multi_label_classification",
        num_labels=3,
    )
    model.name_or_path = str(path)
    multi_label = headway.load(path, task="classify")
    (logits,) = theirs(model, [TEXTS[0]])[1]
    assert sum(candidate.probability for candidate in multi_label.classify(TEXTS[0])) == pytest.approx(
        float(logits.sigmoid().sum()), abs=1e-5
    )
    multi_label.save(tmp_path / "again")
    reloaded = headway.load(tmp_path / "again", task="classify")
    assert reloaded.independent
    assert reloaded.classify(TEXTS[0]) == multi_label.classify(TEXTS[0])
    path, model = bert(tmp_path / "one", "ForSequenceClassification", num_labels=1)
    model.name_or_path = str(path)
    single_label = headway.load(path, task="classify")
    with pytest.raises(ConfigError, match=r"one label, 'LABEL_0', .* logits\(texts\)"):
        single_label.classify(TEXTS)
    assert torch.allclose(single_label.logits(TEXTS), torch.stack(theirs(model, TEXTS)[1]), atol=1e-5)


def test_a_long_text_is_an_error_or_cut(classifier: tuple[Path, Any]) -> None:
    ours = headway.load(classifier[0], task="classify")
    long = "the cat " * 20
    with pytest.raises(
        ConfigError, match=r"text 1 has 42 tokens, but this model reads at most 24; .* cut=True"
    ):
        ours.classify(["the", long])
    assert ours.logits([long], cut=True).equal(ours.logits(["the cat " * 11]))
    both = ours.need_tokenizer().inputs([("the cat", long)])[0]
    part = shortened(both, 24)
    assert (len(part.ids), part.texts.count(0), part.texts.count(1)) == (24, 2, 19)
    equal = shortened(ours.need_tokenizer().inputs([(long, long)])[0], 24)
    assert (equal.texts.count(0), equal.texts.count(1)) == (11, 10)


def test_spans_are_those_of_the_pipeline_of_transformers(tmp_path: Path) -> None:
    path, model = bert(tmp_path / "m", "ForTokenClassification", id2label=LABELS)
    tokenizer = transformers.BertTokenizer.from_pretrained(path)
    pipeline = transformers.pipeline(
        "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple"
    )
    ours = headway.load(path)
    assert isinstance(ours, Tagger)
    texts = [*TEXTS, "cats , dogs , the mat", "who is not home . where is the 猫 dog"]
    count = 0
    for text, tagged in zip(texts, ours.tag(texts), strict=True):
        expected = pipeline(text)
        assert [(s.label, s.start, s.end) for s in tagged] == [
            (w["entity_group"], w["start"], w["end"]) for w in expected
        ]
        assert [s.probability for s in tagged] == pytest.approx(
            [float(w["score"]) for w in expected], abs=1e-5
        )
        assert all(text[s.start : s.end] == s.text for s in tagged)
        count += len(tagged)
    assert count > 3


def test_b_begins_a_span_and_i_goes_on() -> None:
    offsets = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    names = ["B-X", "I-X", "B-X", "O", "I-Y"]
    merged = spans("a b c d e", [(n, 0.5, p) for n, p in zip(names, offsets, strict=True)])
    assert [(s.label, s.text) for s in merged] == [("X", "a b"), ("X", "c"), ("Y", "e")]
