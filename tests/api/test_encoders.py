"""Encoders in use: filled masks and embeddings are those of transformers, and so are Marian's translations."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import headway
from headway.api import Classifier, Embedder, MaskedLM, TextEncoder, Translator
from headway.checkpoints import load_folder, save_folder, unsupported_by_transformers
from headway.errors import CheckpointError, ConfigError, DataError
from headway.models import Head, ModelSpec, build
from tests.generate.conftest import small
from tests.small_bert import TEXTS, VOCAB, bert, theirs
from tests.text.conftest import byte_level
from tests.text.test_marian import sides


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path, model = bert(tmp_path_factory.mktemp("masked"), "ForMaskedLM")
    model.name_or_path = str(path)
    return path, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bert(tmp_path_factory.mktemp("c"), "ForSequenceClassification", num_labels=3)[0]


def test_masks_are_filled_as_by_transformers(masked: tuple[Path, Any]) -> None:
    path, model = masked
    filler = headway.load(path)
    assert isinstance(filler, MaskedLM)
    texts = ["the [MASK] sat on a [MASK] .", "[MASK]", "who ran [MASK] , the dog [MASK] , the [MASK]"]
    filled = filler.fill_mask(texts, top_k=4, batch_size=2)
    ids, outputs = theirs(model, texts)
    for row, logits, masks in zip(ids, outputs, filled, strict=True):
        positions = [i for i, token in enumerate(row) if token == VOCAB.index("[MASK]")]
        assert len(masks) == len(positions)
        for i, candidates in zip(positions, masks, strict=True):
            top = logits[i].softmax(-1).topk(4)
            assert [candidate.token for candidate in candidates] == top.indices.tolist()
            assert [candidate.piece for candidate in candidates] == [VOCAB[k] for k in top.indices.tolist()]
            assert torch.allclose(torch.tensor([c.probability for c in candidates]), top.values, atol=1e-5)
    alone = filler.fill_mask(texts[0], top_k=4)
    assert [[candidate.token for candidate in mask] for mask in alone] == [
        [candidate.token for candidate in p] for p in filled[0]
    ]


def test_what_cannot_be_filled(masked: tuple[Path, Any]) -> None:
    filler = headway.load(masked[0], task="masked-lm")
    with pytest.raises(DataError, match=r"text 1 has no \[MASK\]"):
        filler.fill_mask(["a [MASK]", "the cat"])
    with pytest.raises(ConfigError, match=r"top_k must be in 1\.\."):
        filler.fill_mask("a [MASK]", top_k=0)
    with pytest.raises(DataError, match="no texts"):
        filler.fill_mask([])


def sentences(path: Path, pooling: dict[str, bool], unit: bool) -> tuple[Path, Any]:
    """Writes a folder as sentence-transformers does; returns it with its encoder."""
    _, model = bert(path, "Model")
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if unit else [])]
    steps = [
        {"idx": i, "name": str(i), "path": folder, "type": f"sentence_transformers.models.{kind}"}
        for i, (folder, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(steps))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    return path, model


CLS, LAST, MEAN = "pooling_mode_cls_token", "pooling_mode_lasttoken", "pooling_mode_mean_tokens"


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("cls", [True, False])
def test_a_folder_of_sentence_transformers_says_how_texts_are_embedded(
    cls: bool, unit: bool, tmp_path: Path
) -> None:
    path, model = sentences(tmp_path, {CLS: cls, MEAN: not cls, "pooling_mode_max_tokens": False}, unit)
    ours = headway.load(path)
    assert isinstance(ours, Embedder)
    tokenizer = transformers.BertTokenizer.from_pretrained(path)
    inputs = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].unsqueeze(-1)
    expected = states[:, 0] if cls else (states * mask).sum(1) / mask.sum(1)
    expected = torch.nn.functional.normalize(expected, dim=-1) if unit else expected
    embedded = ours.embed(TEXTS)
    assert torch.allclose(embedded, expected, atol=2e-5)
    for i, text in enumerate(TEXTS):  # each text is embedded as without the padding of the batch
        assert torch.allclose(ours.embed(text), embedded[i], atol=2e-5)
    assert torch.allclose(ours.embed(TEXTS, batch_size=1), embedded, atol=2e-5)
    with pytest.raises(ConfigError, match="has 22 tokens, but this model reads at most 12"):
        ours.embed("the cat " * 10)
    assert ours.embed("the cat " * 10, cut=True).equal(ours.embed("the cat " * 5))
    ours.save(tmp_path / "again")
    reloaded = headway.load(tmp_path / "again")
    assert reloaded.spec.trained_context == 12
    assert reloaded.embed(TEXTS).equal(embedded)


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("cls", [True, False])
def test_an_embedder_is_saved_as_a_folder_of_sentence_transformers(
    cls: bool, unit: bool, tmp_path: Path
) -> None:
    """The encoder is saved as transformers saves it, and its pooling in files beside it."""
    path, model = sentences(tmp_path / "theirs", {CLS: cls, LAST: False, MEAN: not cls}, unit)
    headway.load(path).save(tmp_path / "ours")
    for file in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert json.loads((tmp_path / "ours" / file).read_text()) == json.loads((path / file).read_text())
    reloaded = transformers.AutoModel.from_pretrained(tmp_path / "ours").eval()
    assert type(reloaded) is type(model)
    inputs = transformers.BertTokenizer.from_pretrained(path)(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        assert reloaded(**inputs).last_hidden_state.equal(model(**inputs).last_hidden_state)
    head = Head("embed", pool="first" if cls else "mean", unit=unit)
    assert load_folder(tmp_path / "ours").spec.head == head
    assert unsupported_by_transformers(headway.load(path).spec) is None


def test_an_embedder_whose_pooled_token_is_global_is_saved_as_headway_s_own(tmp_path: Path) -> None:
    """The format of sentence-transformers does not say which tokens are global."""
    size = {"vocab": 61, "width": 16, "layers": 1, "heads": 2, "hidden": 16}
    spec = ModelSpec.of("longformer", **size).with_head(Head("embed", pool="mean"))
    save_folder(tmp_path / "m", build(spec, seed=0))
    assert not (tmp_path / "m" / "modules.json").exists()
    assert load_folder(tmp_path / "m").spec == spec
    assert unsupported_by_transformers(spec) == "head"


def test_a_plain_encoder_is_embedded_as_asked(masked: tuple[Path, Any]) -> None:
    mean = headway.load(masked[0], task="embed")
    first = headway.load(masked[0], task="embed", pool="first", unit=True)
    states = headway.load(masked[0], task="states")
    assert type(states) is TextEncoder
    for i, hidden in enumerate(states.states(TEXTS)):
        assert torch.allclose(mean.embed(TEXTS)[i], hidden.mean(0), atol=1e-5)
        assert torch.allclose(first.embed(TEXTS)[i], hidden[0] / hidden[0].norm(), atol=1e-5)
    saved = masked[0].parent / "again"
    mean.save(saved)
    assert headway.load(saved, task="embed").embed(TEXTS).equal(mean.embed(TEXTS))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({CLS: True, MEAN: True}, f"pooling mode {CLS} and {MEAN}"),
        (
            {"pooling_mode_max_tokens": True},
            "pooling mode pooling_mode_max_tokens is unsupported; set exactly one of",
        ),
        ({}, "pooling mode none is unsupported"),
    ],
)
def test_a_pooling_that_is_not_known(change: dict[str, bool], match: str, tmp_path: Path) -> None:
    path, _ = sentences(tmp_path, change, False)
    with pytest.raises(ConfigError, match=match):
        headway.load(path)


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("modules.json", "", r"modules\.json is not a JSON file: it is empty"),
        (
            "modules.json",
            "{}",
            r"modules\.json must hold a JSON array, but holds a dict",
        ),
        ("modules.json", '["Transformer"]', r"modules\.json must be a list of modules, each an object"),
        (
            "1_Pooling/config.json",
            '{"a": 1, "a": 2}',
            r"config\.json is not valid JSON: the key 'a' occurs twice",
        ),
        ("sentence_bert_config.json", '{"max_seq_length": "12"}', r"max_seq_length must be a number .*'12'"),
    ],
)
def test_a_broken_folder_of_sentence_transformers(
    file: str, content: str, match: str, tmp_path: Path
) -> None:
    path, _ = sentences(tmp_path, {CLS: True}, False)
    (path / file).write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=match):
        headway.load(path)


def test_a_task_that_a_model_is_not_made_for(
    masked: tuple[Path, Any], classifier: Path, tmp_path: Path
) -> None:
    save_folder(tmp_path / "d", small(), tokenizer=byte_level())
    for path, task, match in (
        (
            tmp_path / "d",
            "masked-lm",
            r"a decoder \(llama\), and 'masked-lm' needs an encoder .* headway generate",
        ),
        (tmp_path / "d", "embed", "a decoder .* 'embed' needs an encoder"),
        (
            masked[0],
            "classify",
            "fills masks .* 'classify' needs an encoder with a classifier; .*headway fill-mask",
        ),
        (classifier, "causal-lm", "'causal-lm' needs a decoder; .*headway classify"),
        (classifier, "translation", "needs an encoder-decoder"),
    ):
        with pytest.raises(ConfigError, match=match):
            headway.load(path, task=task)
    with pytest.raises(ConfigError, match=r"no task 'embd' \(did you mean \"embed\"\?\)"):
        headway.load(masked[0], task="embd")
    with pytest.raises(ConfigError, match='pool and unit are for task="embed"'):
        headway.load(masked[0], pool="mean")
    assert isinstance(headway.load(classifier), Classifier)


def test_marian_translates_as_in_transformers(tmp_path: Path) -> None:
    sides(tmp_path, "unigram")
    tokenizer = headway.text.MarianTokenizer.load(tmp_path)
    torch.manual_seed(5)
    config = transformers.MarianConfig(
        vocab_size=tokenizer.vocab_size, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, init_std=0.3,
        pad_token_id=tokenizer.pad, eos_token_id=tokenizer.eos, decoder_start_token_id=tokenizer.pad,
        forced_eos_token_id=tokenizer.eos, bad_words_ids=[[tokenizer.pad]],
    )  # fmt: skip
    model = transformers.MarianMTModel(config).eval()
    model.save_pretrained(tmp_path)
    ours = headway.load(tmp_path)
    assert isinstance(ours, Translator)
    texts = ["two dogs run over the green grass", ">>fra<< a man", "children play in the water ."]
    for beams, penalty in ((1, 1.0), (4, 1.0), (4, 0.3)):
        translations = ours.translate(
            texts,
            beams=beams,
            length_penalty=penalty,
            max_new_tokens=12,
            with_greedy=beams == 1,
            n_best=beams,
        )
        for text, translation in zip(texts, translations, strict=True):
            out = model.generate(
                torch.tensor([tokenizer.encode(text)]), num_beams=beams, length_penalty=penalty, do_sample=False,
                max_new_tokens=12, num_return_sequences=beams,
            )  # fmt: skip
            expected = [[i for i in row if i != tokenizer.pad] for row in out[:, 1:].tolist()]
            assert [list(hypothesis.ids) for hypothesis in translation.hypotheses] == expected
            assert translation.text == tokenizer.decode(expected[0])
