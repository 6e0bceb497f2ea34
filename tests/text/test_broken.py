"""Broken tokenizer files: the error names the file, the place and what to do."""

import json
from pathlib import Path

import pytest

from headway.errors import CheckpointError, DataError
from headway.text import Tokenizer
from headway.text.sentencepiece import read_model
from tests.checkpoints.broken_tokenizers import message
from tests.text.conftest import byte_level
from tests.text.folders import put

BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "猫"]
BYTES = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}


def vocab_txt(folder: Path, *lines: str, config: dict[str, object] | None = None) -> Path:
    (folder / "vocab.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return folder


def test_vocab_txt(tmp_path: Path) -> None:
    assert Tokenizer.load(vocab_txt(tmp_path, *BERT)).encode("The cats猫") == [2, 5, 6, 7, 8, 3]
    for lines, match in (
        (["", ""], "vocab.txt: no pieces; one is expected on each line"),
        ([*BERT, "the"], "lines 6 and 10 are the same piece 'the'"),
        (BERT[:2] + BERT[3:], r"the cls token '\[CLS\]' is not among its 8 pieces"),
        ([*BERT, "喜欢", "今天"], "2 pieces are Chinese words, such as '喜欢': .*train_words"),
    ):
        with pytest.raises(DataError, match=match):
            Tokenizer.load(vocab_txt(tmp_path, *lines))
    (tmp_path / "vocab.txt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"vocab.txt is not a tokenizer: it is empty"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.txt").write_bytes("猫\n".encode()[:2])
    with pytest.raises(DataError, match=r"vocab\.txt: not UTF-8"):
        Tokenizer.load(tmp_path)


def test_case_is_what_the_folder_says_or_what_the_pieces_are(tmp_path: Path) -> None:
    capital = [*BERT, "The"]
    for lines, config, expected in (
        (BERT, {}, 5), (capital, {}, 9), (capital, {"do_lower_case": True}, 5), (BERT, {"do_lower_case": False}, 1),
    ):  # fmt: skip
        assert Tokenizer.load(vocab_txt(tmp_path, *lines, config=config)).encode("The", bos=False) == [
            expected
        ]


def test_rules_that_are_not_bert_s_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"vocab.txt of kind 'mpnet' is not supported, because its rules are not BERT's"
    ):
        Tokenizer.load(vocab_txt(tmp_path, *BERT, config={"tokenizer_class": "MPNetTokenizerFast"}))
    with pytest.raises(DataError, match="do_basic_tokenize=false"):
        Tokenizer.load(vocab_txt(tmp_path, *BERT, config={"do_basic_tokenize": False}))


def test_vocab_json_and_merges_txt(tmp_path: Path) -> None:
    vocabulary, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"

    def load(text: str, lines: str, kind: str = "GPT2Tokenizer") -> Tokenizer:
        vocabulary.write_text(text)
        merges.write_text(lines)
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind}))
        return Tokenizer.load(tmp_path)

    good = json.dumps(BYTES)
    assert load(good, "#version: 0.2\na b\n").encode("aab") == [0, 2]
    for text, lines, match in (
        (
            good,
            "a b\nb c\n",
            "line 2 merges 'b' and 'c', but 'c' is not in the vocabulary: the two files belong to different",
        ),
        (good, "a b\nb a\n", "line 2 merges 'b' and 'a', but 'ba' is not in the vocabulary"),
        (good, "a b c\n", "line 1: expected two pieces separated by a space, got 'a b c'"),
        (good[:20], "a b\n", "vocab.json is not valid JSON"),
        ("[1, 2]", "a b\n", "vocab.json must hold a JSON object, but holds a list"),
        ("{}", "a b\n", "an object from pieces to ids is expected"),
        ('{"a": "0"}', "a b\n", "an object from pieces to ids is expected"),
        ('{"a": 0, "b": 1, "a": 2}', "", "vocab.json is not valid JSON: the key 'a' occurs twice"),
        ('{"a": 0, "b": 0}', "", "two pieces have the id 0, 'a' and 'b'"),
    ):
        with pytest.raises((DataError, CheckpointError), match=match):
            load(text, lines)
    with pytest.raises(DataError, match="of kind 'clip' is not supported"):
        load(good, "a b\n", "CLIPTokenizer")
    with pytest.raises(DataError, match=r"vocab.json: the cls token '<s>' is not among its"):
        load(good, "a b\n", "RobertaTokenizer")
    merges.unlink()
    with pytest.raises(DataError, match=r"merges.txt, with the BPE merges, is missing from the folder"):
        Tokenizer.load(vocabulary)


def test_tokenizer_json_that_is_cut_short(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = file.read_bytes()
    for n in (1, len(content) // 2, len(content) - 3):
        file.write_bytes(content[:n])
        with pytest.raises(
            DataError, match=r"tokenizer.json: not a tokenizer.json of the tokenizers library"
        ):
            Tokenizer.load(tmp_path)


def test_tiktoken_s_ranks(tmp_path: Path) -> None:
    file = put(tmp_path, "tiktoken") / "tokenizer.model"
    lines = file.read_bytes().splitlines(keepends=True)
    for content, match in (
        (lines[:100], "156 of the 256 bytes have no rank; the file is truncated"),
        (lines[:5] + lines[6:], "line 6: not tiktoken's format .*: expected rank 5"),
        ([*lines[:300], b"!! 300\n"], "line 301: not tiktoken's form"),
        ([*lines[:300], lines[299].split()[0] + b" 300\n"], "the same token has two ranks"),
    ):
        file.write_bytes(b"".join(content))
        with pytest.raises(DataError, match=match):
            Tokenizer.load(tmp_path)


def test_sentencepiece_models_that_are_cut_short(tmp_path: Path) -> None:
    file = put(tmp_path, "unigram") / "tokenizer.model"
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2 + 3])
    with pytest.raises(DataError, match="not a SentencePiece model"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("unk", "bos", "eos", "wrong"),
    [
        (0, 1, 2, None),
        (0, 1, 4, None),
        (0, -1, -1, None),
        (4, 0, 0, None),
        (5, 1, 2, "unk at id 5"),
        (-1, 1, 2, "unk at id -1"),
        (0, 5, 2, "bos at id 5"),
        (0, 1, 1234, "eos at id 1,234"),
    ],
)
def test_roles_of_a_sentencepiece_model_are_among_its_pieces(
    tmp_path: Path, unk: int, bos: int, eos: int, wrong: str | None
) -> None:
    rows = [message((1, piece.encode()), (2, -1.5), (3, 1)) for piece in ("a", "b", "c", "d", "e")]
    numbers = zip((3, 40, 41, 42), (2, *(n % 2**64 for n in (unk, bos, eos))), strict=True)
    data = message(*((1, row) for row in rows), (2, message(*numbers)))
    if wrong is None:
        model = read_model(tmp_path / "x", data)
        assert (model.unk, model.bos, model.eos) == (unk, *(None if n < 0 else n for n in (bos, eos)))
        assert (model.pieces, model.scores, model.kinds) == ([*"abcde"], [-1.5] * 5, [1] * 5)
        assert (model.model, model.byte_fallback, model.dummy_prefix, model.squeeze_spaces) == (
            2,
            False,
            True,
            True,
        )
        return
    with pytest.raises(DataError) as caught:
        read_model(tmp_path / "x", data)
    assert str(caught.value) == (
        f"{tmp_path / 'x'}: the SentencePiece model has {wrong}, but it has 5 pieces: it is damaged, or cut short"
    )


def test_sentencepiece_models_of_another_kind_or_without_pieces(tmp_path: Path) -> None:
    row = message((1, b"a"), (2, -1.0), (3, 1))
    for data, detail in (
        (message((1, row), (2, message((3, 3)))), "1 pieces, kind 3"),
        (message((2, message((3, 2)))), "0 pieces, kind 2"),
    ):
        with pytest.raises(DataError) as caught:
            read_model(tmp_path / "x", data)
        assert (
            str(caught.value)
            == f"{tmp_path / 'x'}: not a SentencePiece model of kind BPE or unigram ({detail})"
        )
    single = read_model(
        tmp_path / "x", message((1, row), (2, message((3, 1), (41, 2**64 - 1), (42, 2**64 - 1))))
    )
    assert (single.bos, single.eos, single.unk, single.model) == (None, None, 0, 1), (
        "no role but <unk> is there"
    )
    for score in (float("nan"), float("inf")):
        broken = message(
            (1, message((1, b"a"), (2, score), (3, 1))), (1, row), (1, row), (2, message((3, 2)))
        )
        with pytest.raises(DataError, match=r"a score that is not finite: it is damaged$"):
            read_model(tmp_path / "x", broken)


def test_sentencepiece_models_with_ids_of_another_kind(tmp_path: Path) -> None:
    folder = put(tmp_path, "t5")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "AlbertTokenizer"}')
    with pytest.raises(
        DataError, match="of kind 'albert' is not supported, because its ids differ from those of the file"
    ):
        Tokenizer.load(folder)


def test_added_tokens_that_fall_elsewhere(tmp_path: Path) -> None:
    folder = vocab_txt(tmp_path, *BERT)
    (folder / "added_tokens.json").write_text('{"<x>": 12}')
    with pytest.raises(DataError, match="the added token '<x>' must have id 12, but gets 9"):
        Tokenizer.load(folder)


def test_special_tokens_that_are_not_there() -> None:
    tokenizer = byte_level()
    assert tokenizer.need("bos") == 0
    with pytest.raises(DataError, match=r"no mask token \(it has bos, eos\)"):
        tokenizer.need("mask")
    with pytest.raises(DataError, match="no special token is called 'msk'"):
        tokenizer.need("msk")
    with pytest.raises(DataError, match="no special token is called 'msk'"):
        Tokenizer(tokenizer.backend, special={"msk": 1})


def test_what_a_config_says_about_bos_and_eos(tmp_path: Path) -> None:
    byte_level().save(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    text = byte_level().encode("the", bos=False)
    for begins, ends in ((True, True), (True, False), (False, True), (False, False)):
        file.write_text(json.dumps(config | {"add_bos_token": begins, "add_eos_token": ends}))
        tokenizer = Tokenizer.load(tmp_path)
        a, b = [0] * begins, [1] * ends
        assert tokenizer.encode("the") == [*a, *text, *b]
        assert tokenizer.encode("the", "the") == [*a, *text, *b, *a, *text, *b]
        assert tokenizer.encode("the", eos=False) == [*a, *text]
        from transformers import AutoTokenizer

        tokenizer.save(tmp_path / "again")  # with tokenizer.json, transformers uses its post-processor alone
        theirs = AutoTokenizer.from_pretrained(tmp_path / "again")
        assert theirs("the", "the")["input_ids"] == tokenizer.encode("the", "the")
