"""Heads of encoders: the trained loss is the one that `transformers` minimises."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.data.encoded import encoder_inputs
from headway.data.record_kinds import Answer, Labelled, Question, Tagged, Triplet
from headway.models import Head, ModelSpec, build
from headway.text import Tokenizer, train_words
from headway.train.tasks.answer import Answer as AnswerTask
from headway.train.tasks.answer import AnswerConfig, QuestionRows, Window, occurrences
from headway.train.tasks.embed import Embed, EmbedConfig
from headway.train.tasks.heads import outputs
from headway.train.tasks.labels import Classify, ClassifyConfig, Tag, TagConfig
from headway.train.tasks.records import Reading
from tests.checkpoints.shares import share
from tests.small_bert import LABELS, TEXTS, bert
from tests.train.heads import DATA, made

TASKS = list(DATA)
pytestmark = pytest.mark.filterwarnings("ignore:train_words")  # the corpora have few words


# --- losses


def theirs(folder: Path, kind: str, **config: Any) -> tuple[Any, Any, Tokenizer]:
    """Returns a random model of transformers, our model of the same folder, and its tokenizer."""
    path, model = bert(folder, kind, **config)
    return model, build_model(load_folder(path)), Tokenizer.load(path)


def asked(inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs under the names of transformers."""
    mask = inputs["tokens"].valid.long()
    return {"input_ids": inputs["ids"], "token_type_ids": inputs["types"], "attention_mask": mask}


def test_the_loss_of_classes_is_that_of_transformers(tmp_path: Path) -> None:
    names = {0: "x", 1: "y", 2: "z"}
    model, ours, tokenizer = theirs(tmp_path, "ForSequenceClassification", id2label=names, num_labels=3)
    records = [Labelled(t, None if i else "a mat", "xyz"[i % 3]) for i, t in enumerate([*TEXTS, *TEXTS])]
    config = ClassifyConfig(data="", context=24)
    rows = Classify.rows(records, config, Reading(tokenizer, ours.spec))
    batch = rows.batch(range(len(rows)))
    expected = model(**asked(dict(batch.inputs)), labels=batch.targets).loss
    actual = rows.loss(outputs(ours, batch), batch)
    assert batch.targets.tolist() == [0, 1, 2, 0, 1, 2]
    assert float(actual.loss) / rows.count(batch) == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_tags_is_that_of_transformers(tmp_path: Path) -> None:
    model, ours, tokenizer = theirs(tmp_path, "ForTokenClassification", id2label=LABELS, num_labels=4)
    records = [
        Tagged(["the", "cats", "ran"], ["O", "B-PER", "I-PER"]),
        Tagged(["ons", "home", ",", "where", "is", "a", "cat"], ["B-LOC", "O", "O", "O", "O", "O", "B-PER"]),
    ]
    rows = Tag.rows(records, TagConfig(data="", context=24), Reading(tokenizer, ours.spec))
    batch = rows.batch([0, 1])
    assert batch.targets[0, :6].tolist() == [-100, 0, 1, 2, 2, -100]  # cat ##s: B-PER, then I-PER
    assert batch.targets[1, :3].tolist() == [-100, 3, 3]  # on ##s: B-LOC twice, as the labels have no I-LOC
    expected = model(**asked(dict(batch.inputs)), labels=batch.targets).loss
    actual = rows.loss(outputs(ours, batch), batch)
    assert float(actual.loss) / rows.count(batch) == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_answers_is_that_of_transformers(tmp_path: Path) -> None:
    model, ours, tokenizer = theirs(tmp_path, "ForQuestionAnswering")
    records = [
        Question("who ran", "the cat sat on a mat", (Answer("cat", 4),)),
        Question("who sat", "the dog ran on a mat", (Answer("ran on", 8),)),
        Question("is it", "the cat sat on a mat", ()),  # no answer: [CLS]
    ]
    rows = AnswerTask.rows(records, AnswerConfig(data="", context=24), Reading(tokenizer, ours.spec))
    batch = rows.batch([0, 1, 2])
    starts, ends = torch.tensor([5, 6, 0]), torch.tensor([5, 7, 0])
    assert batch.targets.long().argmax(1).tolist() == torch.stack([starts, ends], 1).tolist()
    expected = model(**asked(dict(batch.inputs)), start_positions=starts, end_positions=ends).loss
    actual = rows.loss(outputs(ours, batch), batch)
    assert float(actual.loss) / rows.count(batch) == pytest.approx(expected.item(), rel=1e-5)


def test_the_loss_of_several_answers_is_minus_log_of_the_sum_of_their_probabilities(tmp_path: Path) -> None:
    _, ours, tokenizer = theirs(tmp_path, "ForQuestionAnswering")
    record = Question("who ran", "a cat , the cat , cats", (Answer("cat", 2),))
    assert occurrences(record) == [(2, 5), (12, 15)]  # not the beginning of "cats"
    rows = AnswerTask.rows(
        [record], AnswerConfig(data="", context=24, occurrences="all"), Reading(tokenizer, ours.spec)
    )
    batch = rows.batch([0])
    out = outputs(ours, batch)
    p = out[0].softmax(0)
    slots = batch.targets[0, :, 0].nonzero().flatten().tolist()
    assert [rows.parts[0].text.ids[i] for i in slots] == [tokenizer.encode("cat", bos=False)[0]] * 2
    expected = -(p[slots, 0].sum().log() + p[slots, 1].sum().log()) / 2
    assert float(rows.loss(out, batch).loss) == pytest.approx(expected.item(), rel=1e-5)
    # a longer row in the batch, whose additional slots are empty here, changes nothing
    longer = Window(1, tokenizer.inputs([("who ran", "a cat " * 7)])[0], [(0, 0)])
    both = copy.copy(rows)
    both.texts = [*rows.texts, longer.text]
    both.parts = [*rows.parts, longer]
    first = both.loss(out_of(both, ours)[:1], slice_of(both.batch([0, 1]), 1))
    assert float(first.loss) == pytest.approx(expected.item(), rel=1e-5)


def out_of(rows: QuestionRows, model: Any) -> Tensor:
    return outputs(model, rows.batch(range(len(rows))))


def slice_of(batch: Any, count: int) -> Any:
    tokens = batch.inputs["tokens"]
    first = dataclasses.replace(tokens, index=tokens.index[:count])
    return batch._replace(inputs={**batch.inputs, "tokens": first}, targets=batch.targets[:count])


@pytest.mark.parametrize("context", ["a cat", "\u5317\u4eac\u548c\u5317\u4eac"])
def test_occurrences_stand_between_borders_of_words_but_in_chinese(context: str) -> None:
    record = Question("", context + " concat cat", (Answer(context[:2].strip(), 0),))
    assert occurrences(record) == ([(0, 2), (3, 5)] if context[0] != "a" else [(0, 1)])
    other = Question("", "cat\u732bcat cat2", (Answer("cat", 0),))
    assert occurrences(other) == [(0, 3), (4, 7)]


def test_the_losses_of_triplets_are_their_formulas() -> None:
    tokenizer = train_words(["a b c d e f g h"] * 9, 300)
    spec = small(tokenizer, Head("embed", pool="mean", unit=True))
    records = [Triplet("a", "b", "c"), Triplet("d e", "f", "a"), Triplet("g", "h c", "b")]
    model = build(spec, seed=1).eval()
    vectors = {
        text: model(**encoder_inputs(tokenizer.inputs([text]), spec))[0]
        for r in records
        for text in (r.anchor, r.positive, str(r.negative))
    }

    def cos(a: str, b: str) -> float:
        return (vectors[a] @ vectors[b]).item()

    margin = sum(max(0.0, 0.2 - cos(r.anchor, r.positive) + cos(r.anchor, str(r.negative))) for r in records)
    candidates = [r.positive for r in records] + [str(r.negative) for r in records]
    temperature, info = 0.05, 0.0
    for r in records:
        scores = torch.tensor([cos(r.anchor, candidate) / temperature for candidate in candidates])
        info -= cos(r.anchor, r.positive) / temperature - float(scores.logsumexp(0))
    for loss, expected in (("margin", margin), ("infonce", info)):
        rows = Embed.rows(records, EmbedConfig(data="", loss=loss), Reading(tokenizer, spec))
        batch = rows.batch([0, 1, 2])
        assert float(rows.loss(outputs(model, batch), batch).loss) == pytest.approx(expected, rel=1e-4)
        correct = [cos(r.anchor, r.positive) > cos(r.anchor, str(r.negative)) for r in records]
        assert rows.evaluate(model).metrics == {"accuracy": pytest.approx(sum(correct) / 3)}


def small(tokenizer: Tokenizer, head: Head, family: str = "roformer", **fields: Any) -> ModelSpec:
    spec = ModelSpec.of(
        family, vocab=tokenizer.vocab_size, width=32, layers=2, heads=2, hidden=48, dropout=0.0, attention_dropout=0.0,
        **fields,
    )  # fmt: skip
    return spec.with_head(head)


# --- micro-batches


@share("task", TASKS, 1, 2)
def test_micro_batches_are_the_whole_batch(task: str, tmp_path: Path) -> None:
    """Gradients in float64 are equal up to the order of summation; margin is used, as infonce has no micro-batches."""
    changes = {"loss": "margin"} if task == "embed" else {}
    gradients = []
    for i, micro_batch in enumerate((16, 5, 1)):
        head_task = made(task, tmp_path / str(i), micro_batch=micro_batch, **changes)
        model = head_task.model.double()
        batches = head_task.batches(0)
        assert len(batches) == -(-16 // micro_batch)
        count = sum(head_task.count(batch) for batch in batches)
        for batch in batches:
            (head_task.loss(model, batch).total / count).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    for split_gradients in gradients[1:]:
        for a, b in zip(gradients[0], split_gradients, strict=True):
            assert torch.allclose(a, b, rtol=1e-10, atol=1e-13)


def test_infonce_is_one_forward_pass(tmp_path: Path) -> None:
    assert len(made("embed", tmp_path, batch=12).batches(0)) == 1
