"""Inputs of head training: labels, texts beyond the context, broken records, folders with another head."""

import re
import string
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from headway.checkpoints.folder import load_folder
from headway.checkpoints.saving import save_folder
from headway.data.encoded import pieces
from headway.data.record_kinds import Answer, Question, Tagged
from headway.errors import ConfigError, DataError
from headway.models import Head, ModelSpec, build
from headway.text import Tokenizer
from headway.train import ending, train
from headway.train.metrics import draw_curve
from headway.train.tasks.answer import Answer as AnswerTask
from headway.train.tasks.answer import AnswerConfig
from headway.train.tasks.embed import Embed, EmbedConfig
from headway.train.tasks.labels import Tag, TagConfig, joined
from headway.train.tasks.records import Reading, read_all
from tests.train.heads import DATA, labelled, made, settings, write

pytestmark = pytest.mark.filterwarnings("ignore:train_words")  # the corpora have few words
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = {
    word for task in DATA.values() for record in task(0, 30) for word in re.findall(r"\w+|[.?]", str(record))
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Returns a BERT tokenizer with a token for each word and letter."""
    file = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    file.write_text("\n".join([*SPECIALS, *sorted(WORDS | {*string.ascii_lowercase})]))
    return Tokenizer.load(file)


def spec_of(tokenizer: Tokenizer, head: Head, family: str = "roformer") -> ModelSpec:
    extra = {"patterns": None} if family == "longformer" else {}
    spec = ModelSpec.of(
        family, vocab=tokenizer.vocab_size, width=16, layers=1, heads=2, hidden=24, dropout=0.0, attention_dropout=0.0,
        **extra,
    )  # fmt: skip
    return spec.with_head(head)


@pytest.fixture
def pretrained(tokenizer: Tokenizer, tmp_path: Path) -> Path:
    """Saves an encoder with a masked-lm head and returns its folder."""
    spec = spec_of(tokenizer, Head("masked-lm", dense="gelu"))
    save_folder(tmp_path / "pretrained", build(spec, seed=3), tokenizer=tokenizer)
    return tmp_path / "pretrained"


FOLDER: dict[str, Any] = dict.fromkeys(
    ("family", "depth", "width", "heads", "hidden", "dropout", "vocab", "units")
)


@pytest.mark.parametrize("task", DATA)
def test_a_folder_with_another_head_keeps_what_stands_below(
    task: str, pretrained: Path, tmp_path: Path
) -> None:
    head_task = made(task, tmp_path, **FOLDER, model=str(pretrained))
    assert head_task.remarks[0].endswith(
        f"has the head 'masked-lm'; '{task}' is a new one, with fresh weights"
    )
    stored = load_folder(pretrained).tensors
    state = head_task.model.state_dict()
    below = [name for name in state if name.startswith("model.")]
    assert len(below) > 10
    assert all(torch.equal(state[name], stored[name]) for name in below)
    again = made(task, tmp_path, **FOLDER, model=str(pretrained))
    assert all(
        torch.equal(a, b) for a, b in zip(again.model.parameters(), head_task.model.parameters(), strict=True)
    )


def test_a_folder_with_the_same_head_goes_on_with_it(pretrained: Path, tmp_path: Path) -> None:
    first = train(settings("classify", tmp_path / "a", **FOLDER, model=str(pretrained), steps=1), quiet=True)
    fewer = write(tmp_path / "fewer.jsonl", [r for r in labelled(2, 40) if r["label"] != "oslo"])
    resumed = made("classify", tmp_path / "b", **FOLDER, model=str(first.model), data=fewer)
    assert not resumed.remarks
    assert resumed.model.spec.head.labels == ("new york", "oslo", "rome")  # the model's, in its order
    stored = load_folder(first.model).tensors
    assert all(torch.equal(value, stored[name]) for name, value in resumed.model.state_dict().items())
    other = write(tmp_path / "other.jsonl", [{"text": "a", "label": "x"}, {"text": "b", "label": "rome"}])
    fresh = made("classify", tmp_path / "c", **FOLDER, model=str(first.model), data=other, validation=other)
    assert fresh.model.spec.head.labels == ("rome", "x")
    assert "has the head 'classify'; 'classify' is a new one" in fresh.remarks[0]


def test_labels_are_those_of_the_data_or_those_that_are_given(tmp_path: Path) -> None:
    numbers = [{"text": "a", "label": n} for n in (10, 2, -1)]
    path = write(tmp_path / "n.jsonl", numbers)
    assert made("classify", tmp_path, data=path, validation=path).model.spec.head.labels == ("-1", "2", "10")
    with_labels = made("classify", tmp_path / "given", labels=("rome", "new york", "oslo", "paris"))
    assert with_labels.model.spec.head.labels == ("rome", "new york", "oslo", "paris")
    single = write(tmp_path / "one.jsonl", numbers[:1])
    with pytest.raises(DataError, match="only the label '10'"):
        made("classify", tmp_path, data=single, validation=None, context=64)
    with pytest.raises(DataError, match=r"n\.jsonl:1: the model has no label '10'; it has new york, oslo"):
        made("classify", tmp_path, validation=path, context=64)
    with pytest.raises(DataError, match=r"train\.jsonl:1: the model has no label '.*'; it has x, y"):
        made("classify", tmp_path / "other", labels=("x", "y"))
    with pytest.raises(ConfigError, match="labels must be different from each other"):
        made("classify", tmp_path, labels=("x", "x"))


def test_a_class_may_be_read_from_the_mean(pretrained: Path, tmp_path: Path) -> None:
    changes = {**FOLDER, "model": str(pretrained), "steps": 1}
    first = train(settings("classify", tmp_path / "a", **changes, pool="mean"), quiet=True)
    assert load_folder(first.model).spec.head.pool == "mean"
    again = made("classify", tmp_path / "b", **{**changes, "model": str(first.model)}, pool="mean")
    assert not again.remarks
    other = made("classify", tmp_path / "c", **{**changes, "model": str(first.model)})
    assert other.model.spec.head.pool == "first"
    assert "a new one, with fresh weights" in other.remarks[0]


def test_the_curve_of_a_classifier_is_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr(ending, "draw_curve", draw_curve)
    monkeypatch.setattr(Figure, "savefig", lambda self, path: drawn.append(self))
    result = train(settings("classify", tmp_path, steps=1, width=16), quiet=True)
    (axes,) = drawn[0].axes
    assert axes.get_ylabel() == "loss, nats per record"
    assert axes.get_title().endswith(f"{result.trained_tokens} trained records")


@pytest.mark.parametrize("task", DATA)
def test_texts_beyond_the_context_are_said(task: str, tmp_path: Path) -> None:
    """The longest texts have about 14 tokens, the longest questions about 24."""
    short: dict[str, Any] = {"context": 20, "stride": 4} if task == "answer" else {"context": 10}
    with pytest.raises(
        DataError, match=r"train\.jsonl:\d+: \d\d tokens do not fit context \d\d; raise context"
    ):
        made(task, tmp_path, **short, too_long="error")
    cut = made(task, tmp_path, **short, too_long="cut")
    assert max(cut.train_rows.lengths) == short["context"]
    remarks = "; ".join(cut.remarks)
    messages = {"answer": "texts of more than 20 tokens: cut", "tag": "texts have more than 10 tokens: cut"}
    assert messages.get(task, "texts are cut to 10 tokens") in remarks
    assert "held out: " in remarks
    if task in ("answer", "tag"):
        windowed = made(task, tmp_path, **short, too_long="windows")
        assert max(windowed.train_rows.lengths) <= short["context"]
        assert len(windowed.train_rows) > len(cut.train_rows) == 96
        assert ": windows" in windowed.remarks[0]
    else:
        with pytest.raises(ConfigError, match="too_long"):
            settings(task, tmp_path, too_long="windows")


def test_words_that_are_cut_off_are_outside_and_counted(tokenizer: Tokenizer) -> None:
    spec = spec_of(tokenizer, Head("tag", labels=("B-X", "O")))
    records = [Tagged(list("abcdefgh"), ["B-X"] * 8)]
    rows = Tag.rows(records, TagConfig(data="", context=6, too_long="cut"), Reading(tokenizer, spec))
    assert rows.remarks == ["1 of 1 texts have more than 6 tokens: cut", "4 words are not read"]
    assert rows.scores([[0] * 6])["accuracy"] == 1 / 2
    whole = Tag.rows(records, TagConfig(data="", context=6), Reading(tokenizer, spec))
    assert whole.scores([[0] * 6] * 2) == {"accuracy": 1, "f1": 1}
    assert len(whole) == 2


def test_pieces_hold_each_token_once_within_the_template(tokenizer: Tokenizer) -> None:
    text = tokenizer.inputs(["a b c d e f g h i"])[0]
    parts = pieces(text, 6)
    assert [[text.texts[i] for i in part] for part in parts] == [[None, 0, 0, 0, 0, None]] * 2 + [
        [None, 0, None]
    ]
    assert sorted(i for part in parts for i in part[1:-1]) == list(range(1, 10))
    with pytest.raises(ConfigError, match=r"2 tokens .* are repeated in every row of 2 .* no room for text"):
        pieces(text, 2)


def test_a_long_context_is_read_in_windows_and_answered_over_all(tokenizer: Tokenizer) -> None:
    spec = spec_of(tokenizer, Head("answer"))
    context = "a b c d e f g h i j k l m n o p"
    record = Question("a", context, (Answer("k l", 20),))
    rows = AnswerTask.rows([record], AnswerConfig(data="", context=11, stride=4), Reading(tokenizer, spec))
    # windows of 7 tokens: a.., e.., i.., m.., of which the third has "k l"
    spans = [part.spans for part in rows.parts]
    assert [len(part.text.ids) for part in rows.parts] == [11, 11, 11, 8]
    assert spans == [[(0, 0)], [(0, 0)], [(5, 6)], [(0, 0)]]
    scores = [torch.zeros(n, 2) for n in rows.lengths]
    scores[2][5, 0] = scores[2][6, 1] = 9.0
    assert rows.scores(scores) == {"exact": 1, "f1": 1, "hit": 1, "guess": 3 / 31}
    scores[1][4, 0] = scores[1][4, 1] = 12.0  # f
    assert rows.scores(scores) == {"exact": 0, "f1": 0, "hit": 0, "guess": 3 / 31}
    cut = AnswerTask.rows(
        [record], AnswerConfig(data="", context=11, stride=4, too_long="cut"), Reading(tokenizer, spec)
    )
    assert cut.remarks[1] == "1 of 1 questions have no answer in what is read"


def test_an_answer_that_a_window_holds_in_part_is_none_of_its(tokenizer: Tokenizer) -> None:
    spec = spec_of(tokenizer, Head("answer"))
    record = Question("a", "b c d e f g h", (Answer("d e", 4),))
    # windows: b c d, e f g, h
    rows = AnswerTask.rows([record], AnswerConfig(data="", context=7, stride=3), Reading(tokenizer, spec))
    assert [part.spans for part in rows.parts] == [[(0, 0)]] * 3
    assert rows.remarks[1] == "1 of 1 questions have no answer in what is read"


def test_a_question_without_an_answer_may_be_left_open(tokenizer: Tokenizer) -> None:
    spec = spec_of(tokenizer, Head("answer"))
    records = [Question("a", "b c", ()), Question("a", "b c", (Answer("c", 2),))]
    rows = AnswerTask.rows(records, AnswerConfig(data="", context=16), Reading(tokenizer, spec))
    on_cls, on_answer = torch.zeros(6, 2), torch.zeros(6, 2)
    on_cls[0], on_answer[4] = 5.0, 5.0
    assert rows.scores([on_cls, on_answer]) == {"exact": 1, "f1": 1, "hit": 1, "guess": 1 / 6}
    assert rows.scores([on_answer, on_cls]) == {"exact": 0, "f1": 0, "hit": 0, "guess": 1 / 6}


def test_an_answer_in_other_words_is_measured_and_not_trained(tokenizer: Tokenizer) -> None:
    spec = spec_of(tokenizer, Head("answer"))
    record = Question("a", "b c", (Answer("d", -1), Answer("c", 2)))
    rows = AnswerTask.rows([record], AnswerConfig(data="", context=16), Reading(tokenizer, spec))
    assert rows.parts[0].spans == [(4, 4)]


@pytest.mark.parametrize("task", ["classify", "embed", "answer", "tag"])
def test_a_longformer_has_the_global_tokens_of_its_task(task: str, tmp_path: Path) -> None:
    head_task = made(task, tmp_path, family="longformer")
    batch = head_task.train_rows.batch(range(8))
    marked = batch.inputs["tokens"].globals
    expected = torch.zeros_like(marked)
    if task in ("classify", "embed"):
        expected[:, 0] = True
    if task == "answer":  # [CLS] where is anna ?
        expected = torch.arange(marked.shape[1]).expand_as(marked) < 5
    assert torch.equal(marked, expected)


def test_words_are_joined_by_spaces_but_in_chinese() -> None:
    text, owner = joined(["in", "\u5317\u4eac", "\u7684", "x", "y"])
    assert text == "in \u5317\u4eac\u7684 x y"
    assert owner == [0, 0, 1, 1, 1, 2, 3, 3, 4, 4]


def test_pairs_with_a_number_are_measured_by_rank(tokenizer: Tokenizer, tmp_path: Path) -> None:
    pairs = [
        {"text": "a b", "text_pair": second, "label": label}
        for second, label in (("a b", "5.0"), ("a c", 3), ("d e", 0))
    ]
    records, _ = read_all(write(tmp_path / "pairs.jsonl", pairs), Embed.measured)
    spec = spec_of(tokenizer, Head("embed", pool="mean", unit=True))
    rows = Embed.rows(records, EmbedConfig(data=""), Reading(tokenizer, spec))
    assert rows.evaluate(build(spec, seed=0)).metrics == {"spearman": pytest.approx(1)}
    wrong, _ = read_all(write(tmp_path / "x.jsonl", [{**pairs[0], "label": "alike"}]), Embed.measured)
    with pytest.raises(
        DataError, match=r"x\.jsonl:1: the similarity of two texts must be a number, got 'alike'"
    ):
        Embed.rows(wrong, EmbedConfig(data=""), Reading(tokenizer, spec))


def test_up_to_a_hundredth_of_the_records_may_be_broken(tmp_path: Path) -> None:
    def file(good: int) -> str:
        return write(tmp_path / "b.jsonl", [*labelled(0, good), {"text": 3, "label": "rome"}])

    head_task = made("classify", tmp_path, data=file(99))
    assert "b.jsonl: 1 records are left out, as " in head_task.remarks[0]
    with pytest.raises(DataError, match=r"b\.jsonl:99: .*\(1 of 99 records cannot be read\)"):
        made("classify", tmp_path, data=file(98))


def test_other_records_that_are_held_out_are_other_data(tmp_path: Path) -> None:
    first, other = (
        made("answer", tmp_path, validation=None, validation_share=0.25, seed=seed) for seed in (0, 1)
    )
    assert other.data["digest"] != first.data["digest"]
