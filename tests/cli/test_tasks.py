"""The commands that read texts: results on stdout, the rest on stderr, and errors that say what to do."""

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import headway
from headway.checkpoints import save_folder
from headway.cli import run
from headway.data.pairs import END, START, joint_tokenizer
from headway.models import Head, ModelSpec, build
from headway.text import Tokenizer
from headway.train.tasks.translation import TranslationConfig, translation_spec
from tests.generate.conftest import small
from tests.text.conftest import CORPUS, byte_level

PIECES = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "sat", "who", ".", "猫"]
TEXTS = ["the cats", "who sat ."]
HEADS = {
    "fill-mask": Head("masked-lm", dense="gelu"),
    "classify": Head("classify", labels=("no", "yes", "perhaps"), dense="tanh"),
    "tag": Head("tag", labels=("O", "B-X", "I-X")),
    "answer": Head("answer"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The folders of a small model for every task, and of a decoder."""
    root = tmp_path_factory.mktemp("models")
    (root / "vocab.txt").write_text("\n".join(PIECES), encoding="utf-8")
    tokenizer = Tokenizer.load(root / "vocab.txt")
    size: dict[str, Any] = {
        "vocab": len(PIECES),
        "width": 32,
        "layers": 1,
        "heads": 2,
        "hidden": 48,
        "init_std": 0.3,
    }
    bert = ModelSpec.of("bert", **size)
    for name, head in HEADS.items():
        save_folder(root / name, build(bert.with_head(head), seed=1), tokenizer=tokenizer)
    save_folder(root / "decoder", small(), tokenizer=byte_level())
    joint = joint_tokenizer(iter(CORPUS), 320)
    config = TranslationConfig.of(
        {"source": "a", "target": "b", "layers": 1, "width": 32, "heads": 2, "hidden": 48, "context": 64}
    )
    generation = {"decoder_start_token_id": START, "eos_token_id": END}
    model = build(translation_spec(config, joint.vocab_size), seed=2)
    save_folder(root / "translate", model, tokenizer=joint, generation=generation)
    return {path.name: str(path) for path in root.iterdir() if path.is_dir()}


def report(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    assert run([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_fill_mask(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model, text = folders["fill-mask"], "the [MASK] sat [MASK]"
    expected = headway.load(model, task="masked-lm").fill_mask(text, top_k=3)
    (printed,) = report(["fill-mask", model, text, "--top-k", "3"], capsys)
    assert [[candidate["token"] for candidate in mask] for mask in printed["masks"]] == [
        [candidate.token for candidate in mask] for mask in expected
    ]
    assert run(["fill-mask", model, text, "--top-k", "3"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(text)
    assert f"{expected[1][2].probability:.4f}" in out
    assert run(["fill-mask", model, "the cat"]) == 1
    assert "text 0 has no [MASK]" in capsys.readouterr().err


def test_classify(
    folders: dict[str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    model = folders["classify"]
    expected = headway.load(model, task="classify").classify(TEXTS)
    labels = [[candidate.label for candidate in row] for row in expected]
    (tmp_path / "texts").write_text("\n".join(TEXTS))
    for arguments, stdin in (
        (TEXTS, ""),
        ([], "\n".join(TEXTS) + "\n"),
        (["--file", str(tmp_path / "texts")], ""),
    ):
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
        printed = report(["classify", model, *arguments, "--batch-size", "1"], capsys)
        assert [[candidate["label"] for candidate in row["labels"]] for row in printed] == labels
    (record,) = report(["classify", model, "the cat\twho sat", "--pairs", "--top-k", "1"], capsys)
    pair = headway.load(model, task="classify").classify(("the cat", "who sat"), top_k=1)
    assert record["labels"][0]["probability"] == pytest.approx(pair[0].probability)
    assert run(["classify", model, *TEXTS, "--top-k", "1"]) == 0
    assert labels[0][0] in capsys.readouterr().out


@pytest.mark.parametrize("pairs", [False, True])
def test_labels_go_into_a_table_of_their_own(pairs: bool, folders: dict[str, str], tmp_path: Path) -> None:
    """The table has a row for each text, as scikit-learn's predict and predict_proba give them."""
    lm, path = headway.load(folders["classify"], task="classify"), tmp_path / "labels.csv"
    texts = [f"{text}\t{text}, who" for text in TEXTS] if pairs else [*TEXTS, 'the "cat", sat']
    assert run(["classify", folders["classify"], *texts, *["--pairs"] * pairs, "--csv", str(path)]) == 0
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    inputs = [tuple(text.split("\t")) for text in texts] if pairs else texts
    for text, row, candidates in zip(inputs, rows, lm.classify(inputs), strict=True):
        assert (row["text_a"], row["text_b"]) == text if pairs else row["text"] == text
        assert row["label"] == candidates[0].label
        assert [float(row[f"P({candidate.label})"]) for candidate in candidates] == pytest.approx(
            [candidate.probability for candidate in candidates], rel=1e-5
        )
    assert [*rows[0]][-3:] == ["P(no)", "P(yes)", "P(perhaps)"]


def test_tags_and_answers(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    tags = headway.load(folders["tag"], task="tag").tag(TEXTS)
    rows = report(["classify", folders["tag"], *TEXTS], capsys)
    assert [[s["start"] for s in row["spans"]] for row in rows] == [[s.start for s in row] for row in tags]
    assert run(["classify", folders["tag"], *TEXTS]) == 0
    assert "covers" in capsys.readouterr().out
    best = headway.load(folders["answer"], task="answer").answer("who sat", "the cats sat .", top_k=2)
    printed = report(["answer", folders["answer"], "who sat", "the cats sat .", "--top-k", "2"], capsys)
    assert [(a["start"], a["end"]) for a in printed["answers"]] == [(a.start, a.end) for a in best]
    assert run(["answer", folders["answer"], "who sat", "the cats sat ."]) == 0
    assert best[0].text in capsys.readouterr().out
    for threshold, first in (("1e9", ""), ("-1e9", best[0].text)):
        flags = ["who sat", "the cats sat .", "--top-k", "2", "--no-answer", threshold]
        assert report(["answer", folders["answer"], *flags], capsys)["answers"][0]["text"] == first
    assert run(["answer", folders["answer"], "who sat", "the cats sat .", "--no-answer", "1e9"]) == 0
    assert "no answer" in capsys.readouterr().out


def test_embed(folders: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    model = folders["fill-mask"]
    vectors = headway.load(model, task="embed", pool="first", unit=True).embed(TEXTS)
    printed = report(["embed", model, *TEXTS, "--pool", "first", "--unit"], capsys)
    assert torch.allclose(torch.tensor(printed["vectors"]), vectors, atol=1e-6)
    assert printed["head"]["pool"] == "first"
    printed = report(["embed", model, *TEXTS, "--pool", "first", "--similarity"], capsys)
    assert torch.allclose(torch.tensor(printed["cosines"]), vectors @ vectors.T, atol=1e-5)
    assert run(["embed", model, *TEXTS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [len(line.split()) for line in lines] == [32, 32]
    assert run(["embed", model, *TEXTS, "--similarity"]) == 0
    assert "1.0000" in capsys.readouterr().out


def test_translate(folders: dict[str, str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model, texts = folders["translate"], ["the cat", "the dog sat on the log", "def attend"]
    flags = ["--beams", "3", "--length-penalty", "0.6", "-n", "9"]
    expected = headway.load(model, task="translation").translate(
        texts, beams=3, length_penalty=0.6, max_new_tokens=9
    )
    assert run(["translate", model, *texts, *flags, "--batch-size", "2"]) == 0
    out, err = capsys.readouterr()
    assert out == "".join(translation.text + "\n" for translation in expected)
    assert "3 texts, 3 beams, mean score" in err
    printed = report(["translate", model, *texts, *flags, "--n-best", "2"], capsys)
    assert [len(row["hypotheses"]) for row in printed["translations"]] == [2, 2, 2]
    assert [row["translation"] for row in printed["translations"]] == [text.text for text in expected]
    assert run(["translate", model, texts[0], *flags, "--n-best", "2"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"{expected[0].score:.4f}\t")
    (tmp_path / "right").write_text("a cat\nthe dog\nattend\n")
    options = ["--reference", str(tmp_path / "right"), "--out", str(tmp_path / "out")]
    assert run(["translate", model, *texts, *flags, *options]) == 0
    out = capsys.readouterr().out
    assert out.startswith("BLEU ")
    assert "nrefs:1|case:mixed" in out
    assert len((tmp_path / "out").read_text("utf-8").splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["fill-mask", "decoder", "a"], 1, "needs an encoder that fills masks; use it with headway generate"),
        (["generate", "fill-mask", "a"], 1, "'causal-lm' needs a decoder; use it with headway fill-mask"),
        (["classify", "translate", "a"], 1, "an encoder-decoder (marian), and 'classify' needs"),
        (["translate", "classify", "a"], 1, "'translation' needs an encoder-decoder; use it with headway classify"),
        (["answer", "tag", "a", "b"], 1, "'answer' needs an encoder that marks answers"),
        (["embed", "decoder", "a"], 1, "'embed' needs an encoder"),
        (["embed", "classify", "a", "--pool", "max"], 2, "'max' is not one of 'first', 'last', 'mean'"),
        (["translate", "translate", "a", "--n-best", "5"], 2, "--n-best 5 is more than --beams 4"),
        (["classify", "classify", "a", "--pairs"], 1, "text 1 has no tab"),
        (["classify", "tag", "a", "--cut"], 2, "this model labels tokens"),
        (["classify", "tag", "a", "--csv", "x.csv"], 2, "and --csv are only for models that label texts"),
        (["classify", "classify", "a", "--csv", "x.csv", "--json"], 2, "leave out --json and --top-k"),
        (["classify", "classify", "a", "--file", "x"], 2, "texts are given twice"),
        (["classify", "classify", "--file", "nosuch"], 1, "nosuch: no such file"),
        (["fill-mask", "fill-mask", "[MASK]", "--top-k", "0"], 2, "--top-k"),
        (["train", "task=translation", "source=a"], 1, "target is missing"),
        (["train", "source=a"], 1, "source is a setting of task translation, but the task is text; give task="),
        (["train", "data=a", "--label-smoothing", "0"], 1, "--label-smoothing is an option of task translation"),
        (["train", "data=a", "--layers", "2"], 1, "leave it out; --depth sets the layers of a home-made model"),
        (["train", "--task", "translation", "mask_share=0.2"], 1, "mask_share is a setting of task causal-lm and"),
        (["train", "--task", "translate"], 1, "there is no task 'translate' (did you mean \"translation\"?)"),
        (["train", "--task", "nowhere:Task"], 1, "task nowhere:Task cannot be imported: No module"),
        (["train", "--task", "headway.train:TextConfig"], 1, "is not a subclass of headway.train.Task"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(
    arguments: list[str], code: int, said: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    command, *options = arguments
    options = [folders.get(options[0], options[0]), *options[1:]]
    assert run([command, *options]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert said in " ".join(err.replace("│", " ").split())


def test_no_texts(
    folders: dict[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert run(["classify", folders["classify"]]) == 1
    assert "no texts: give them as arguments" in capsys.readouterr().err


def test_the_settings_of_a_translation(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(Path(__file__).parents[2] / "recipes" / "translation.yaml")
    assert run(["train", "--config", recipe, "steps=3", "--label-smoothing", "0.2", "--print-config"]) == 0
    out = capsys.readouterr().out
    assert "\nsteps: 3 " in out
    assert "\nlabel_smoothing: 0.2 " in out
    assert "task: translation " in out


@pytest.mark.filterwarnings("ignore:train_bpe")
def test_a_translator_is_trained(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("red cat\nblue dog\n")
    (tmp_path / "b").write_text("rote Katze\nblauer Hund\n")
    size = [
        "vocab=300",
        "layers=1",
        "width=16",
        "heads=2",
        "hidden=16",
        "context=32",
        "steps=2",
        "log_every=1",
    ]
    files = [f"source={tmp_path / 'a'}", f"target={tmp_path / 'b'}", f"out={tmp_path / 'run'}"]
    assert run(["train", "--task", "translation", *files, *size]) == 0
    out, err = capsys.readouterr()
    assert "headway translate" in out
    assert "step 2/2  loss" in err
    assert run(["translate", str(tmp_path / "run" / "final"), "red cat", "-n", "4", "--beams", "2"]) == 0
    assert run(["train", "--task", "translation", *files, *size]) == 1
    assert "already holds a run" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("command", "more", "said"),
    [
        ("translate", ["--beams", "1", "-n", "2", *TEXTS], "translating 2 texts"),
        ("fill-mask", ["the [MASK] sat", *TEXTS], "reading 3 texts"),
        ("classify", TEXTS, "reading 2 texts"),
        ("answer", ["who", "the cat sat ."], "reading 1 text"),
        ("embed", TEXTS, "reading 2 texts"),
    ],
)
def test_work_that_may_take_long_is_said_on_a_terminal(
    command: str, more: list[str], said: str, folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    folder = folders["classify" if command == "embed" else command]
    for stream in (Terminal(), io.StringIO()):
        monkeypatch.setattr(sys, "stderr", stream)
        run([command, folder, *more])
        assert (said in stream.getvalue()) == stream.isatty()


@pytest.mark.parametrize("command", ["translate", "classify", "tag"])
@pytest.mark.parametrize("text", ["", " \n"])
def test_nothing_is_made_of_nothing(
    command: str, text: str, folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Empty texts are refused, as `generate` refuses an empty prompt."""
    name = {"tag": "classify"}.get(command, command)
    assert run([name, folders[command], "the cat", text]) == 1
    printed = capsys.readouterr()
    assert "headway: error: text 1 is empty: there is nothing to read; leave it out\n" in printed.err
    assert not printed.out
