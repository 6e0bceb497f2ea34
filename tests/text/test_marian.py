"""Marian's tokenizer with two sides, against `transformers` and SentencePiece."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.errors import CheckpointError, DataError
from headway.text import MarianTokenizer, Tokenizer

spm = pytest.importorskip("sentencepiece")

ENGLISH = [
    "a man is sitting on the bench .",
    "two dogs run over the green grass",
    "children play in the water",
]
GERMAN = [
    "ein mann sitzt auf der bank .",
    "zwei hunde laufen über das grüne gras",
    "kinder spielen im wasser",
]
TEXTS = [
    "two dogs sit",
    " a  man ",
    "",
    "ж жж 猫猫",
    "über grüne",
    "two\tдогs\n",
    ">>fra<< two",
    ">>xyz<< two",
    ">> a",
]


def sides(folder: Path, kind: str, *, separate: bool = False) -> Path:
    """Writes a folder like OPUS-MT's: two small models and a vocabulary in another order, which lacks some of their
    pieces."""
    pieces: dict[str, list[str]] = {}
    for side, texts in (("source", ENGLISH), ("target", GERMAN)):
        data = io.BytesIO()
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(texts * 5), model_writer=data, vocab_size=80 if kind == "unigram" else 50,
            hard_vocab_limit=False, model_type=kind, minloglevel=2,
        )  # fmt: skip
        (folder / f"{side}.spm").write_bytes(data.getvalue())
        processor = spm.SentencePieceProcessor(model_proto=data.getvalue())
        pieces[side] = [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]

    def vocabulary(names: list[str]) -> dict[str, int]:
        ordered = ["</s>", "<unk>", ">>fra<<", "ж", *sorted(set(names), reverse=True)[:-3], "<pad>"]
        return {name: i for i, name in enumerate(ordered)}

    joint = pieces["source"] + pieces["target"]
    (folder / "vocab.json").write_text(json.dumps(vocabulary(pieces["source"] if separate else joint)))
    if separate:
        (folder / "target_vocab.json").write_text(json.dumps(vocabulary(pieces["target"])))
    config = {"tokenizer_class": "MarianTokenizer", "separate_vocabs": separate}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def both(folder: Path) -> tuple[MarianTokenizer, Any]:
    from transformers import MarianTokenizer as Theirs

    with warnings.catch_warnings():  # it recommends a package that its ids do not need
        warnings.filterwarnings("ignore", "Recommended: pip install sacremoses")
        return MarianTokenizer.load(folder), Theirs.from_pretrained(folder)


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_ids_and_texts_are_those_of_transformers(kind: str, separate: bool, tmp_path: Path) -> None:
    ours, theirs = both(sides(tmp_path, kind, separate=separate))

    @given(st.sampled_from(TEXTS) | st.text(st.sampled_from("two dogs над grünes  .猫>"), max_size=30))
    def same(text: str) -> None:
        source, target = theirs(text)["input_ids"], theirs(text_target=text)["input_ids"]
        assert ours.encode(text) == source
        assert ours.encode(text, side="target") == target
        assert ours.decode(target) == theirs.decode(target, skip_special_tokens=True)
        # in transformers spaces after <unk> depend on what the other side knows
        shown = ours.decode(target, special=True)
        assert shown.split() == theirs.decode(target).split()

    same()
    names = json.loads((tmp_path / ("target_vocab.json" if separate else "vocab.json")).read_text())
    assert (ours.eos, ours.pad) == (theirs.eos_token_id, names["<pad>"])


def test_texts_of_known_pieces_come_back(tmp_path: Path) -> None:
    folder = sides(tmp_path, "unigram")
    names = [p for s in ("source", "target") for p in pieces_of(folder / f"{s}.spm")]
    (folder / "vocab.json").write_text(
        json.dumps({n: i for i, n in enumerate(dict.fromkeys(["</s>", "<unk>", *names, "<pad>"]))})
    )
    ours = MarianTokenizer.load(folder)
    for side, texts in (("source", ENGLISH), ("target", GERMAN)):
        for text in texts:
            ids = ours.encode(text, side=side)
            assert ids[-1] == ours.eos == 0
            assert ours.decode(ids) == text


def pieces_of(file: Path) -> list[str]:
    processor = spm.SentencePieceProcessor(model_file=str(file))
    return [processor.id_to_piece(i) for i in range(3, processor.vocab_size())]


def test_what_we_save_both_read(tmp_path: Path) -> None:
    ours = MarianTokenizer.load(sides(tmp_path, "unigram"))
    ours.save(tmp_path / "saved")
    again, theirs = both(tmp_path / "saved")
    for text in TEXTS:
        assert ours.encode(text) == again.encode(text) == theirs(text)["input_ids"]


def test_errors(tmp_path: Path) -> None:
    folder = sides(tmp_path, "unigram")
    ours = MarianTokenizer.load(folder)
    with pytest.raises(DataError, match=r"no side 'sourc'.*there are source, target"):
        ours.encode("a", side="sourc")
    with pytest.raises(DataError, match="text 0 must be a str, got int"):
        ours.encode(1)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="token id 9999 is not in the target vocabulary"):
        ours.decode([9999])
    ours.require_fits(ours.vocab_size)
    with pytest.raises(CheckpointError, match="this is not its tokenizer"):
        ours.require_fits(ours.vocab_size - 1)
    with pytest.raises(
        DataError, match=r"a Marian tokenizer .* load it with headway.text.MarianTokenizer.load"
    ):
        Tokenizer.load(folder)
    (folder / "vocab.json").write_text('{"<unk>": 0, "<pad>": 1}')
    with pytest.raises(DataError, match=r"vocab.json: the eos token '</s>' is not among its"):
        MarianTokenizer.load(folder)
    (folder / "target.spm").unlink()
    with pytest.raises(DataError, match=r"no target.spm, which a Marian tokenizer needs"):
        MarianTokenizer.load(folder)
