"""The folder of a trained translation model translates in headway and in `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headway
from headway.api import Translator
from headway.checkpoints.folder import load_folder
from headway.checkpoints.saving import save_folder
from headway.data.pairs import START
from headway.errors import ConfigError
from headway.models import EncoderDecoder, ModelSpec, build
from headway.train import train
from headway.train.metrics import read_metrics
from headway.train.tasks.translation import TranslationConfig, translation_spec
from tests.train.translation import TINY, corpus


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, str]]:
    folder = tmp_path_factory.mktemp("translation")
    files = corpus(folder)
    held = {"validation_source": files["source"], "validation_target": files["target"]}
    result = train(TranslationConfig.of({**TINY, **files, **held, "out": str(folder / "run")}), quiet=True)
    return result, files


def test_the_loss_falls_and_the_folder_translates(run: tuple[Any, dict[str, str]]) -> None:
    result, files = run
    losses = [record["loss"] for record in read_metrics(result.metrics) if "loss" in record]
    assert len(losses) == result.steps == 40
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    assert result.validation.loss < losses[0]
    translator = headway.load(result.model)
    assert isinstance(translator, Translator)
    texts = Path(files["source"]).read_text("utf-8").splitlines()[:12]
    translations = translator.translate(texts, max_new_tokens=16)
    assert [beam.text for beam in translator.translate(texts, max_new_tokens=16, batch_size=5)] == [
        beam.text for beam in translations
    ]
    assert translator.translate(texts[3], max_new_tokens=16).text == translations[3].text
    greedy = translator.translate(texts, beams=1, max_new_tokens=16)
    for beam, single in zip(translations, greedy, strict=True):  # row 26: no worse than greedy
        assert beam.score is not None
        assert single.score is not None
        assert beam.score >= single.score - 1e-5
    best = translator.translate(texts[0], n_best=3, length_penalty=0.0, max_new_tokens=16).hypotheses
    assert len(best) == 3
    assert [hypothesis.score for hypothesis in best] == sorted(
        (hypothesis.score for hypothesis in best), reverse=True
    )
    assert best[0].score == pytest.approx(sum(best[0].log_probs))


def test_a_translator_is_saved_and_loaded(run: tuple[Any, dict[str, str]], tmp_path: Path) -> None:
    translator = headway.load(run[0].model, task="translation")
    translator.save(tmp_path / "again")
    again = headway.load(tmp_path / "again")
    assert again.generation["decoder_start_token_id"] == START
    assert (
        again.translate("red cat", max_new_tokens=8).ids
        == translator.translate("red cat", max_new_tokens=8).ids
    )
    with pytest.raises(ConfigError, match=r"no option 'beam' \(did you mean \"beams\"\?\)"):
        translator.translate("red", beam=3)
    with pytest.raises(ConfigError, match="'causal-lm' needs a decoder; use it with headway translate"):
        headway.load(run[0].model, task="causal-lm")


def test_transformers_translates_as_the_trained_folder_does(run: tuple[Any, dict[str, str]]) -> None:
    """transformers loads a Marian model and its tokenizer; texts are padded, and translated greedily and by beams."""
    result, files = run
    assert result.transformers == "loads it"
    tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(result.model)
    assert type(model) is transformers.MarianMTModel
    ours, texts = headway.load(result.model), Path(files["source"]).read_text("utf-8").splitlines()[:6]
    inputs = tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
    assert inputs["attention_mask"].min() == 0
    for beams in (1, 3):
        generated = model.generate(**inputs, num_beams=beams, do_sample=False, max_new_tokens=16)
        expected = ours.translate(texts, beams=beams, max_new_tokens=16, length_penalty=1.0)
        assert tokenizer.batch_decode(generated, skip_special_tokens=True) == [text.text for text in expected]


def changed(**change: Any) -> ModelSpec:
    return translation_spec(TranslationConfig.of({**TINY, "source": "a", "target": "b", **change}), 300)


def test_a_translator_is_written_as_a_marian_model_with_the_same_logits(tmp_path: Path) -> None:
    model = build(changed(), seed=0).eval()
    assert isinstance(model, EncoderDecoder)
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter, float(name.endswith("norm.weight")), 0.2)
    save_folder(tmp_path / "m", model, generation={"decoder_start_token_id": START, "pad_token_id": START})
    theirs, report = transformers.AutoModelForSeq2SeqLM.from_pretrained(
        tmp_path / "m", output_loading_info=True
    )
    assert not any(report.values()), report
    again = headway.load(tmp_path / "m").model
    source, target = torch.randint(2, 300, (2, 11)), torch.randint(2, 300, (2, 7))
    with torch.no_grad():
        expected = model(source, target)
        for actual in (theirs(input_ids=source, decoder_input_ids=target).logits, again(source, target)):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    save_folder(tmp_path / "own", model, keep_pairing=True)  # as in checkpoints, which resume bit for bit
    assert load_folder(tmp_path / "own").spec == model.spec


@pytest.mark.parametrize(("change", "why"), [({"order": "pre"}, "order"), ({"hidden": 0}, "decoder_ffn_dim")])
def test_what_no_marian_model_computes_is_named(change: dict[str, Any], why: str, tmp_path: Path) -> None:
    settings = {**TINY, **change, **corpus(tmp_path), "steps": 1, "out": str(tmp_path / "run")}
    result = train(TranslationConfig.of(settings), quiet=True)
    assert result.transformers is not None
    assert result.transformers.startswith("refuses it: it cannot express its ")
    assert why in result.transformers
    assert load_folder(result.model).config["model_type"] == "headway"
