"""Multilingual translators: their tokenizers against those of transformers, and the choice of source and target
language."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headway
from headway.api import Translator
from headway.cli import run as cli
from headway.data.pairs import encode_pairs
from headway.errors import DataError
from headway.models import EncoderDecoder, ModelSpec, build
from headway.text import Tokenizer
from headway.text.languages import MBART50
from tests.text.folders import FAIRSEQ, TEXTS, pieces, put
from tests.text.nllb import vocabulary, write_nllb

PLAIN = [text for text in TEXTS if text.isprintable() and text.strip()]


@pytest.fixture
def m2m100(tmp_path: Path) -> Path:
    (tmp_path / FAIRSEQ).write_bytes(pieces("bpe"))
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary()))
    config = {"tokenizer_class": "M2M100Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def nllb(tmp_path: Path) -> Path:
    write_nllb(tmp_path, tmp_path / "m")
    return tmp_path


def test_m2m100_has_the_ids_of_its_vocabulary_and_a_token_for_each_language(m2m100: Path) -> None:
    ours = Tokenizer.load(m2m100)
    theirs = transformers.M2M100Tokenizer(str(m2m100 / "vocab.json"), str(m2m100 / FAIRSEQ), src_lang="en")
    assert ours.languages == theirs.lang_code_to_id
    for source, target in (("en", "fr"), ("zh", "en")):
        theirs.src_lang, chosen = source, ours.between(source, target)
        for text in PLAIN:
            assert chosen.encode(text) == theirs(text)["input_ids"], text
            assert chosen.decode(chosen.encode(text)) == theirs.decode(theirs(text)["input_ids"][1:-1]), text
    chosen.save(m2m100 / "saved")
    again = Tokenizer.load(m2m100 / "saved")
    assert [again.between().encode(text) for text in PLAIN] == [chosen.encode(text) for text in PLAIN]


@pytest.mark.parametrize("change", ["absent", "lacks", "gaps", "codes"])
def test_a_damaged_m2m100_is_refused(m2m100: Path, change: str) -> None:
    file, ids = m2m100 / "vocab.json", vocabulary()
    last = [*ids][-2]
    if change == "absent":
        file.unlink()
    elif change == "lacks":
        file.write_text(json.dumps({name: i for name, i in ids.items() if name != last}))
    elif change == "gaps":
        file.write_text(json.dumps({**ids, "never": 9999}))
    else:
        config = json.loads((m2m100 / "tokenizer_config.json").read_text())
        (m2m100 / "tokenizer_config.json").write_text(json.dumps({**config, "language_codes": "wmt12"}))
    message = {
        "absent": "vocab.json, .* is missing from the folder",
        "lacks": "vocab.json lacks 1 of its pieces",
        "gaps": "vocab.json has gaps",
        "codes": "unknown language_codes.*wmt21",
    }
    with pytest.raises(DataError, match=message[change]):
        Tokenizer.load(m2m100)


@pytest.mark.parametrize("legacy", [False, True])
def test_nllb_s_source_language_stands_where_transformers_puts_it(nllb: Path, legacy: bool) -> None:
    if legacy:
        config = json.loads((nllb / "tokenizer_config.json").read_text())
        (nllb / "tokenizer_config.json").write_text(json.dumps({**config, "legacy_behaviour": True}))
    theirs = transformers.AutoTokenizer.from_pretrained(nllb)
    ours = Tokenizer.load(nllb)
    assert len(ours.languages) == 202
    for source in ("eng_Latn", "zho_Hans"):
        theirs.src_lang = source
        chosen = ours.between(source, "fra_Latn")
        for text in PLAIN:
            assert chosen.encode(text) == theirs(text)["input_ids"], text


def test_a_translator_is_told_both_languages(nllb: Path) -> None:
    translator = headway.load(nllb / "m", task="translation")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(nllb / "m").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(nllb, src_lang="deu_Latn")
    pair = {"source_language": "deu_Latn", "target_language": "fra_Latn"}
    translations = translator.translate(PLAIN, beams=3, max_new_tokens=9, **pair)
    for text, translation in zip(PLAIN, translations, strict=True):
        inputs = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            expected = theirs.generate(
                **inputs, num_beams=3, max_new_tokens=9, do_sample=False, bad_words_ids=[[1]],
                forced_bos_token_id=tokenizer.convert_tokens_to_ids("fra_Latn"),
            )[0, 1:].tolist()  # fmt: skip
        assert expected[0] == translator.tokenizer.languages["fra_Latn"]
        kept = expected.index(2) + 1 if 2 in expected else 9
        assert translation.ids == expected[:kept]
        assert "fra_Latn" not in translation.text
    bound = translator.between("deu_Latn", "fra_Latn")
    assert [translation.text for translation in bound.translate(PLAIN, beams=3, max_new_tokens=9)] == [
        translation.text for translation in translations
    ]
    assert bound._rows(PLAIN[0], None)[1][:2] == [2, translator.tokenizer.languages["fra_Latn"]]
    other = translator.translate(PLAIN[0], max_new_tokens=9, **{**pair, "target_language": "eng_Latn"})
    assert other.ids[0] == translator.tokenizer.languages["eng_Latn"]


def test_languages_that_are_not_said_or_not_known_are_asked_for(
    nllb: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    translator = headway.load(nllb / "m", task="translation")
    with pytest.raises(
        DataError, match=r"between 202 languages \(ace_Arab, .*source language is not.*--source-language"
    ):
        translator.translate("Hello")
    with pytest.raises(DataError, match="target language is not set: pass target_language"):
        translator.translate("Hello", source_language="eng_Latn")
    with pytest.raises(DataError, match=r'no target language.*fra_Latin.*did you mean "fra_Latn"'):
        translator.translate("Hello", source_language="eng_Latn", target_language="fra_Latin")
    with pytest.raises(DataError, match="source language is not set"):
        translator.attention("Hello")
    model = str(nllb / "m")
    assert cli(["translate", model, "Hello", "--source-language", "eng_Latn"]) != 0
    assert "--target-language" in capsys.readouterr().err
    both = ["--source-language", "eng_Latn", "--target-language", "fra_Latn", "-n", "4"]
    assert cli(["translate", model, "Hello", *both]) == 0
    translator.between("eng_Latn", "fra_Latn").save(nllb / "bound")
    assert cli(["translate", str(nllb / "bound"), "Hello", "-n", "4"]) == 0


def test_a_model_of_one_language_has_none_to_choose(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(put(tmp_path, "pegasus"))
    size = {"vocab": tokenizer.vocab_size, "width": 16, "layers": 1, "heads": 2, "hidden": 16}
    model = build(ModelSpec.of_pair("pegasus", **size), seed=0)
    assert isinstance(model, EncoderDecoder)
    with pytest.raises(DataError, match=r"no languages to choose from.*>>fra<<"):
        Translator(model, tokenizer).translate("Hello", target_language="fr")


def test_mbart_begins_with_the_target_language_and_pairs_have_their_own(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(put(tmp_path, "mbart"))
    ids: dict[str, Any] = {
        "eos_token_id": 2,
        "pad_token_id": 1,
        "decoder_start_token_id": tokenizer.languages["de_DE"],
    }
    size = {"vocab": tokenizer.vocab_size, "width": 16, "layers": 1, "heads": 2, "hidden": 16}
    model = build(ModelSpec.of_pair("mbart", **size), seed=0).eval()
    assert isinstance(model, EncoderDecoder)
    translator = Translator(model, tokenizer, generation=ids).between("en_XX", "ro_RO")
    _, written = translator._rows("test", "test")
    english, romanian = (tokenizer.languages[name] for name in ("en_XX", "ro_RO"))
    assert written[0] == romanian
    pairs = encode_pairs(translator.tokenizer, ["test"], ["test"], 99)
    assert (pairs.sources[0][-2:], pairs.targets[0][-2:]) == ([2, english], [2, romanian])
    with pytest.raises(DataError, match="target language is not set"):
        encode_pairs(tokenizer, ["test"], ["test"], 99)
    assert [*Tokenizer.load(put(tmp_path / "50", "mbart50")).languages] == MBART50
