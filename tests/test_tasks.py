"""Encoders in use: masks, labels, spans, answers and vectors are what transformers gives for the same weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import headway
from headway.api import Answerer, Classifier, Embedder, MaskedLM, Tagger, TextEncoder, Translator
from headway.api.answers import windows
from headway.api.labels import spans
from headway.api.rows import shortened
from headway.checkpoints import save_folder
from headway.errors import ConfigError, DataError
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_marian import sides

WORDS = """the cat sat on a mat dog ran home . , who where is not ##s ##ting 猫
b c d e f g""".split()  # noqa: SIM905
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
SIZE: dict[str, Any] = {
    "vocab_size": len(VOCAB),
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "initializer_range": 0.3,
}
TEXTS = ["the cat sat on a mat .", "who ran home", "猫"]
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}


def folder_of(path: Path, model: Any) -> Path:
    model.save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(VOCAB), encoding="utf-8")
    return path


def bert(path: Path, kind: str, **config: Any) -> tuple[Path, Any]:
    torch.manual_seed(3)
    model = getattr(transformers, f"Bert{kind}")(transformers.BertConfig(**SIZE, **config)).eval()
    return folder_of(path, model), model


def theirs(model: Any, texts: list[Any]) -> tuple[list[list[int]], list[Tensor]]:
    """Ids and logits (or last states) of each text alone."""
    tokenizer = headway.text.Tokenizer.load(Path(model.name_or_path)) if model.name_or_path else None
    assert tokenizer is not None
    ids, outs = [], []
    for text in texts:
        found = tokenizer.inputs([text], special=True)[0]
        with torch.no_grad():
            out = model(torch.tensor([found.ids]), token_type_ids=torch.tensor([found.token_types]))
        ids.append(found.ids)
        outs.append(out[0][0])
    return ids, outs


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path, model = bert(tmp_path_factory.mktemp("masked"), "ForMaskedLM")
    model.name_or_path = str(path)
    return path, model


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    labels = {0: "no", 1: "yes", 2: "perhaps"}
    path, model = bert(tmp_path_factory.mktemp("c"), "ForSequenceClassification", id2label=labels)
    model.name_or_path = str(path)
    return path, model


def test_masks_are_filled_as_by_transformers(masked: tuple[Path, Any]) -> None:
    path, model = masked
    filler = headway.load(path)
    assert isinstance(filler, MaskedLM)
    texts = ["the [MASK] sat on a [MASK] .", "[MASK]", "who ran [MASK] , the dog [MASK] , the [MASK]"]
    found = filler.fill_mask(texts, top_k=4, batch_size=2)
    ids, outs = theirs(model, texts)
    for row, logits, masks in zip(ids, outs, found, strict=True):
        at = [i for i, token in enumerate(row) if token == VOCAB.index("[MASK]")]
        assert len(masks) == len(at)
        for i, candidates in zip(at, masks, strict=True):
            top = logits[i].softmax(-1).topk(4)
            assert [one.token for one in candidates] == top.indices.tolist()
            assert [one.piece for one in candidates] == [VOCAB[k] for k in top.indices.tolist()]
            assert torch.allclose(torch.tensor([c.probability for c in candidates]), top.values, atol=1e-5)
    alone = filler.fill_mask(texts[0], top_k=4)
    assert [[one.token for one in place] for place in alone] == [[one.token for one in p] for p in found[0]]


def test_what_cannot_be_filled(masked: tuple[Path, Any]) -> None:
    filler = headway.load(masked[0], task="fill-mask")
    with pytest.raises(DataError, match=r"text 1 has no \[MASK\]"):
        filler.fill_mask(["a [MASK]", "the cat"])
    with pytest.raises(ConfigError, match=r"top_k must lie in 1\.\."):
        filler.fill_mask("a [MASK]", top_k=0)
    with pytest.raises(DataError, match="no texts"):
        filler.fill_mask([])


def test_labels_of_texts_and_pairs(classifier: tuple[Path, Any]) -> None:
    path, model = classifier
    ours = headway.load(path, task="classify")
    texts = [*TEXTS, ("who sat", "the cat sat on a mat"), ("the dog", "猫")]
    _, outs = theirs(model, texts)
    found = ours.classify(texts, batch_size=3)
    for labels, logits in zip(found, outs, strict=True):
        wanted = logits.softmax(-1)
        assert [one.probability for one in labels] == sorted(
            (one.probability for one in labels), reverse=True
        )
        named = {one.label: one.probability for one in labels}
        for name, p in zip(("no", "yes", "perhaps"), wanted.tolist(), strict=True):
            assert named[name] == pytest.approx(p, abs=1e-5)
    assert [one.label for one in ours.classify(texts[3], top_k=1)] == [found[3][0].label]


def test_independent_labels_and_single_ones(tmp_path: Path) -> None:
    path, model = bert(
        tmp_path / "many",
        "ForSequenceClassification",
        problem_type="multi_label_classification",
        num_labels=3,
    )
    model.name_or_path = str(path)
    many = headway.load(path, task="classify")
    (logits,) = theirs(model, [TEXTS[0]])[1]
    assert sum(one.probability for one in many.classify(TEXTS[0])) == pytest.approx(
        float(logits.sigmoid().sum()), abs=1e-5
    )
    many.save(tmp_path / "again")
    again = headway.load(tmp_path / "again", task="classify")
    assert again.independent
    assert again.classify(TEXTS[0]) == many.classify(TEXTS[0])
    path, model = bert(tmp_path / "one", "ForSequenceClassification", num_labels=1)
    model.name_or_path = str(path)
    one = headway.load(path, task="classify")
    with pytest.raises(ConfigError, match=r"one label, 'LABEL_0', .* logits\(texts\)"):
        one.classify(TEXTS)
    assert torch.allclose(one.logits(TEXTS), torch.stack(theirs(model, TEXTS)[1]), atol=1e-5)


def test_a_long_text_is_an_error_or_cut(classifier: tuple[Path, Any]) -> None:
    ours = headway.load(classifier[0], task="classify")
    long = "the cat " * 20
    with pytest.raises(ConfigError, match=r"text 1 has 42 tokens, and this model reads 24; .* cut=True"):
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
    seen = 0
    for text, found in zip(texts, ours.tag(texts), strict=True):
        wanted = pipeline(text)
        assert [(s.label, s.start, s.end) for s in found] == [
            (w["entity_group"], w["start"], w["end"]) for w in wanted
        ]
        assert [s.probability for s in found] == pytest.approx([float(w["score"]) for w in wanted], abs=1e-5)
        assert all(text[s.start : s.end] == s.text for s in found)
        seen += len(found)
    assert seen > 3


def test_b_begins_a_span_and_i_goes_on() -> None:
    at = [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]
    names = ["B-X", "I-X", "B-X", "O", "I-Y"]
    found = spans("a b c d e", [(n, 0.5, p) for n, p in zip(names, at, strict=True)])
    assert [(s.label, s.text) for s in found] == [("X", "a b"), ("X", "c"), ("Y", "e")]


def best_spans(begins: Tensor, ends: Tensor, longest: int) -> list[tuple[float, int, int]]:
    """All stretches, the best first, one by one."""
    p, q = begins.double().softmax(0), ends.double().softmax(0)
    found = [(float(p[i] * q[j]), i, j) for i in range(len(p)) for j in range(i, min(len(p), i + longest))]
    return sorted(found, reverse=True)


@pytest.mark.parametrize("family", ["Bert", "Longformer"])
def test_answers_are_the_best_stretches_of_the_context(family: str, tmp_path: Path) -> None:
    if family == "Bert":
        path, model = bert(tmp_path / "m", "ForQuestionAnswering")
    else:
        torch.manual_seed(4)
        config = transformers.LongformerConfig(
            **{**SIZE, "max_position_embeddings": 40}, attention_window=4, type_vocab_size=1, pad_token_id=0,
            sep_token_id=3, bos_token_id=2, eos_token_id=3,
        )  # fmt: skip
        model = transformers.LongformerForQuestionAnswering(config).eval()
        path = folder_of(tmp_path / "m", model)
    ours = headway.load(path)
    assert isinstance(ours, Answerer)
    question, context = "who sat", "the cat sat on a mat ."
    read = ours.need_tokenizer().inputs([(question, context)])[0]
    with torch.no_grad():
        question_and_before = [
            i < max(k for k, t in enumerate(read.texts) if t == 0) + 1 for i in range(len(read.ids))
        ]
        more = (
            {"token_type_ids": torch.tensor([read.token_types])}
            if family == "Bert"
            else {"global_attention_mask": torch.tensor([question_and_before]).long()}
        )
        out = model(torch.tensor([read.ids]), **more)
    inside = [i for i, which in enumerate(read.texts) if which == 1]
    wanted = best_spans(out.start_logits[0, inside], out.end_logits[0, inside], 3)
    places = [read.offsets[i] for i in inside]
    found = ours.answer(question, context, top_k=5, longest=3)
    for (p, i, j), one in zip(wanted, found, strict=False):
        assert one.probability == pytest.approx(p, rel=1e-3)
        assert (one.start, one.end) == (places[i][0], places[j][1])  # type: ignore[index]
        assert one.text == context[one.start : one.end]


def test_a_long_context_is_read_in_windows(tmp_path: Path) -> None:
    path, _ = bert(tmp_path / "m", "ForQuestionAnswering")
    ours = headway.load(path, task="answer")
    question, context = "who sat", " ".join(WORDS[i] for i in [0, 1, 2, 3, 4, 5, 6, 7, 8] * 6)
    pair = ours.need_tokenizer().inputs([(question, context)])[0]
    parts = windows(pair, 24, 7)
    assert all(len(part.ids) <= 24 and part.texts.count(0) == 2 for part in parts)
    covered = {
        place for part in parts for place, which in zip(part.offsets, part.texts, strict=True) if which == 1
    }
    assert covered == {p for p, which in zip(pair.offsets, pair.texts, strict=True) if which == 1}
    best = ours.answer(question, context, top_k=3, stride=7, batch_size=2)
    assert len({(one.start, one.end) for one in best}) == 3
    begins, ends, places = [], [], []
    for part in parts:
        ids, types = torch.tensor([part.ids]), torch.tensor([part.token_types])
        out = ours(ids, types=types)[0].detach()
        inside = [i for i, which in enumerate(part.texts) if which == 1]
        begins.append(out[inside, 0])
        ends.append(out[inside, 1])
        places.append([part.offsets[i] for i in inside])
    starts = torch.cat(begins).double().log_softmax(0).split([len(b) for b in begins])
    stops = torch.cat(ends).double().log_softmax(0).split([len(b) for b in begins])
    score, place = max(
        (float(s[i] + e[j]), (at[i][0], at[j][1]))  # type: ignore[index]
        for s, e, at in zip(starts, stops, places, strict=True)
        for i in range(len(s))
        for j in range(i, len(s))
    )
    assert (best[0].start, best[0].end) == place
    assert best[0].probability == pytest.approx(float(torch.tensor(score).exp()), rel=1e-4)
    with pytest.raises(ConfigError, match="stride 128 leaves tokens between the windows unread"):
        ours.answer(question, context)
    with pytest.raises(ConfigError, match="leaves no room"):
        ours.answer("the cat " * 12, context)
    with pytest.raises(DataError, match="the context has no tokens"):
        ours.answer(question, "")


def sentences(path: Path, pooling: dict[str, bool], unit: bool) -> tuple[Path, Any]:
    """A folder as sentence-transformers writes it."""
    _, model = bert(path, "Model")
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling"), *([("2_Normalize", "Normalize")] if unit else [])]
    steps = [
        {"idx": i, "name": str(i), "path": where, "type": f"sentence_transformers.models.{kind}"}
        for i, (where, kind) in enumerate(kinds)
    ]
    (path / "modules.json").write_text(json.dumps(steps))
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **pooling}))
    (path / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": false}')
    return path, model


CLS, MEAN = "pooling_mode_cls_token", "pooling_mode_mean_tokens"


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
    wanted = states[:, 0] if cls else (states * mask).sum(1) / mask.sum(1)
    wanted = torch.nn.functional.normalize(wanted, dim=-1) if unit else wanted
    found = ours.embed(TEXTS)
    assert torch.allclose(found, wanted, atol=2e-5)
    for i, text in enumerate(TEXTS):  # a batch of different lengths is each text alone
        assert torch.allclose(ours.embed(text), found[i], atol=2e-5)
    assert torch.allclose(ours.embed(TEXTS, batch_size=1), found, atol=2e-5)
    with pytest.raises(ConfigError, match="has 22 tokens, and this model reads 12"):
        ours.embed("the cat " * 10)
    assert ours.embed("the cat " * 10, cut=True).equal(ours.embed("the cat " * 5))
    ours.save(tmp_path / "again")
    again = headway.load(tmp_path / "again")
    assert again.spec.trained_context == 12
    assert again.embed(TEXTS).equal(found)


def test_a_plain_encoder_is_embedded_as_asked(masked: tuple[Path, Any]) -> None:
    mean = headway.load(masked[0], task="embed")
    first = headway.load(masked[0], task="embed", pool="first", unit=True)
    states = headway.load(masked[0], task="states")
    assert type(states) is TextEncoder
    for i, own in enumerate(states.states(TEXTS)):
        assert torch.allclose(mean.embed(TEXTS)[i], own.mean(0), atol=1e-5)
        assert torch.allclose(first.embed(TEXTS)[i], own[0] / own[0].norm(), atol=1e-5)
    again = masked[0].parent / "again"
    mean.save(again)
    assert headway.load(again, task="embed").embed(TEXTS).equal(mean.embed(TEXTS))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({CLS: True, MEAN: True}, f"pooling by {CLS} and {MEAN}"),
        ({"pooling_mode_max_tokens": True}, "pooling by pooling_mode_max_tokens; what is read is one of"),
        ({}, "pooling by nothing"),
    ],
)
def test_a_pooling_that_is_not_known(change: dict[str, bool], match: str, tmp_path: Path) -> None:
    path, _ = sentences(tmp_path, change, False)
    with pytest.raises(ConfigError, match=match):
        headway.load(path)


def test_a_task_that_a_model_is_not_made_for(
    masked: tuple[Path, Any], classifier: tuple[Path, Any], tmp_path: Path
) -> None:
    save_folder(tmp_path / "d", small(), tokenizer=byte_level())
    for path, task, match in (
        (
            tmp_path / "d",
            "fill-mask",
            r"a decoder \(llama\), and 'fill-mask' needs an encoder .* headway generate",
        ),
        (tmp_path / "d", "embed", "a decoder .* 'embed' needs an encoder"),
        (
            masked[0],
            "classify",
            "fills masks .* 'classify' needs an encoder with a classifier; .*headway fill-mask",
        ),
        (classifier[0], "causal-lm", "'causal-lm' needs a decoder; .*headway classify"),
        (classifier[0], "translate", "needs an encoder-decoder"),
    ):
        with pytest.raises(ConfigError, match=match):
            headway.load(path, task=task)
    with pytest.raises(ConfigError, match=r"no task 'embd' \(did you mean \"embed\"\?\)"):
        headway.load(masked[0], task="embd")
    with pytest.raises(ConfigError, match='pool and unit are for task="embed"'):
        headway.load(masked[0], pool="mean")
    assert isinstance(headway.load(classifier[0]), Classifier)


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
        found = ours.translate(
            texts,
            beams=beams,
            length_penalty=penalty,
            max_new_tokens=12,
            with_greedy=beams == 1,
            n_best=beams,
        )
        for text, one in zip(texts, found, strict=True):
            out = model.generate(
                torch.tensor([tokenizer.encode(text)]), num_beams=beams, length_penalty=penalty, do_sample=False,
                max_new_tokens=12, num_return_sequences=beams,
            )  # fmt: skip
            wanted = [[i for i in row if i != tokenizer.pad] for row in out[:, 1:].tolist()]
            assert [list(text.ids) for text in one.hypotheses] == wanted
            assert one.text == tokenizer.decode(wanted[0])
