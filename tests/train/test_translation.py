"""Row 26: translation as a task: batches, schedule, label smoothing, settings and BLEU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import headway
from headway.api.translator import bleu
from headway.data.pairs import END, START, Pairs, batches, encode_pairs, read_pairs
from headway.errors import DataError
from headway.models import EncoderDecoder, build
from headway.nn import IGNORE_INDEX, cross_entropy
from headway.nn.cross_entropy import chunked_cross_entropy
from headway.text import Tokenizer
from headway.train import train
from headway.train.config_io import config_yaml, read_config
from headway.train.metrics import read_metrics
from headway.train.tasks.translation import TranslationConfig, inverse_sqrt, translation_spec
from tests.data import data_path
from tests.train.prepared import prepared
from tests.train.translation import TINY, corpus


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=60),
    seed=st.integers(0, 5),
)
def test_batches_hold_every_pair_once_and_no_more_slots_than_asked(
    lengths: list[tuple[int, int]], seed: int
) -> None:
    pairs = Pairs([[9] * a for a, _ in lengths], [[9] * b for _, b in lengths])
    epoch = batches(pairs, 40, seed, 0)
    assert sorted(i for rows in epoch for i in rows) == list(range(len(lengths)))
    for rows in epoch:
        inputs = pairs.batch(rows).inputs
        assert inputs["source"].numel() <= 40
        assert inputs["ids"].numel() <= 40
    assert epoch == batches(pairs, 40, seed, 0)


def test_epochs_have_orders_of_their_own() -> None:
    pairs = Pairs([[9] * (1 + i % 4) for i in range(50)], [[9] * (1 + i % 3) for i in range(50)])
    assert batches(pairs, 12, 0, 0) != batches(pairs, 12, 0, 1)


def test_row_14_a_target_is_read_one_slot_late() -> None:
    batch = Pairs([[5, 6, END], [5, END]], [[7, END], [8, 9, END]]).batch([0, 1])
    assert batch.inputs["ids"].tolist() == [[START, 7, END], [START, 8, 9]]
    assert batch.targets.tolist() == [[7, END, IGNORE_INDEX], [8, 9, END]]
    assert batch.inputs["tokens"].index.tolist() == [[0, 1, -1], [0, 1, 2]]
    assert batch.inputs["source_tokens"].index.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_the_rate_rises_and_falls_as_the_paper_says() -> None:
    width, warmup = 512, 4000
    rates = [inverse_sqrt(step, width, warmup) for step in range(1, 20001)]
    assert max(rates) == rates[warmup - 1] == pytest.approx((width * warmup) ** -0.5)
    assert rates[99] == pytest.approx(100 * rates[0])
    assert rates[15999] == pytest.approx(rates[3999] / 2)


@pytest.mark.parametrize("rows", [64, 4], ids=["one chunk", "two"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_labels_are_smoothed_as_the_formula_says(
    smoothing: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocab: rows)
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, 2, IGNORE_INDEX], [0, 6, 3]])
    logits.requires_grad_()
    loss, nats, count, token_nats, _ = chunked_cross_entropy(
        logits, targets, torch.nn.Identity(), 7, label_smoothing=smoothing
    )
    log_p = logits.double().log_softmax(-1)
    trained = targets != IGNORE_INDEX
    picked = log_p.gather(-1, targets.clamp_min(0).unsqueeze(-1))[..., 0]
    expected = -(1 - smoothing) * picked - smoothing * log_p.mean(-1)
    assert float(loss.detach()) == pytest.approx(float(expected[trained].detach().sum()), rel=1e-5)
    assert float(nats) == pytest.approx(float(-picked[trained].detach().sum()), rel=1e-5)
    assert count == 5
    torch.testing.assert_close(token_nats.double(), torch.where(trained, -picked, 0.0))
    weights = torch.rand(2, 3, generator=torch.Generator().manual_seed(1))
    for actual, exact in (
        (loss, expected[trained].sum()),
        ((weights * token_nats).sum(), -(weights * picked)[trained].sum()),
    ):
        (a,), (b,) = (torch.autograd.grad(value, logits, retain_graph=True) for value in (actual, exact))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [1, 5, 7, 100])
def test_a_step_reads_all_of_its_pairs_however_it_is_cut(micro_batch: int, tmp_path: Path) -> None:
    def targets(**changes: Any) -> list[list[int]]:
        task = prepared(TranslationConfig.of({**TINY, **files, **changes}), tmp_path)
        rows = [row for batch in task.batches(2) for row in batch.targets.tolist()]
        return [[i for i in row if i != IGNORE_INDEX] for row in rows]

    files = corpus(tmp_path, 70)
    whole = targets()
    assert len(whole) % 5
    assert len(whole) % 7
    assert targets(micro_batch=micro_batch) == whole


def test_the_gradient_is_that_of_the_mean_over_target_tokens(tmp_path: Path) -> None:
    """The first step's norm is compared with torch's: dropout is 0, and one batch holds all pairs."""
    files, one_step = corpus(tmp_path, 9), {"out": str(tmp_path / "run"), "steps": 1, "batch_tokens": 4096}
    config = TranslationConfig.of({**TINY, **files, **one_step})
    result = train(config, quiet=True)
    tokenizer = Tokenizer.load(result.model)
    pairs = encode_pairs(tokenizer, *read_pairs(config.source, config.target), config.context)
    batch = pairs.batch(batches(pairs, 4096, config.seed, 0)[0])
    model = build(translation_spec(config, tokenizer.vocab_size), seed=config.seed)
    logits = model(**batch.inputs)
    mean = F.cross_entropy(
        logits.flatten(0, 1), batch.targets.flatten(), label_smoothing=config.label_smoothing
    )
    norm = torch.cat([g.flatten() for g in torch.autograd.grad(mean, list(model.parameters()))]).norm()
    assert (batch.targets == IGNORE_INDEX).any()
    assert read_metrics(result.metrics)[0]["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


@pytest.mark.parametrize("order", ["post", "pre"])
def test_rows_21_and_27_one_matrix_and_either_order(order: str) -> None:
    spec = translation_spec(TranslationConfig.of({**TINY, "source": "a", "target": "b", "order": order}), 300)
    model = build(spec, seed=0)
    assert isinstance(model, EncoderDecoder)
    assert [n for n, _ in model.named_parameters() if "embed_tokens" in n or "lm_head" in n] == [
        "decoder.embed_tokens.weight"
    ]
    assert (spec.order, spec.encoder and spec.encoder.order, spec.final_norm) == (
        order,
        order,
        order == "pre",
    )
    assert spec.embedding_scale == math.sqrt(32)


def test_bleu_is_that_of_sacrebleu() -> None:
    import sacrebleu

    texts, references = ["the cat sat on the mat .", "a dog"], ["the cat sat on a mat .", "the dog"]
    result = bleu(texts, references)
    assert result.score == sacrebleu.corpus_bleu(texts, [references]).score
    assert "tok:13a" in result.signature
    assert "version:" in str(result)
    assert bleu(references, references).score == pytest.approx(100)
    with pytest.raises(DataError, match="2 translations, 1 references"):
        bleu(texts, references[:1])


def test_settings_come_back_from_their_yaml(tmp_path: Path) -> None:
    config = TranslationConfig.of({**TINY, "source": "a", "target": "b"})
    (tmp_path / "c.yaml").write_text(config_yaml(config))
    assert read_config(tmp_path / "c.yaml") == config
    assert read_config(tmp_path / "c.yaml", ["steps=7"]).steps == 7
    recipe = read_config(Path(__file__).parents[2] / "recipes" / "translation.yaml")
    assert (recipe.label_smoothing, recipe.order) == (0.1, "post")


@pytest.mark.parametrize(
    ("source", "target", "match"),
    [
        ("a\nb\n", "a\n", "2 lines, but .* 1; line i of one must be the translation"),
        ("a\n\nb\n", "a\nb\nc\n", ":2: the line is empty"),
        ("", "", "the file is empty"),
        ("a b " * 40 + "\n", "a\n", r"pair 1 has \d+ tokens on one side, more than context 32"),
    ],
)
@pytest.mark.filterwarnings("ignore:train_bpe")
def test_pairs_that_are_none(source: str, target: str, match: str, tmp_path: Path) -> None:
    (tmp_path / "s").write_text(source)
    (tmp_path / "t").write_text(target)
    files = {"source": str(tmp_path / "s"), "target": str(tmp_path / "t"), "out": str(tmp_path / "out")}
    with pytest.raises(DataError, match=match):
        train(TranslationConfig.of({**TINY, **files}), quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_row_26_german_from_english(tmp_path: Path) -> None:
    files = {"source": data_path("multi30k/val.en.gz"), "target": data_path("multi30k/val.de.gz")}
    size = {
        "vocab": 1000,
        "layers": 2,
        "width": 64,
        "heads": 2,
        "hidden": 128,
        "batch_tokens": 512,
        "steps": 150,
    }
    config = {**size, "warmup": 60, "context": 128, "out": str(tmp_path / "run")}
    result = train(TranslationConfig.of({**{k: str(v) for k, v in files.items()}, **config}), quiet=True)
    losses = [record["loss"] for record in read_metrics(result.metrics) if "loss" in record]
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])
    translator = headway.load(result.model, task="translation")
    import gzip

    lines = [gzip.decompress(path.read_bytes()).decode().splitlines()[:40] for path in files.values()]
    beams, greedy = (translator.translate(lines[0], beams=n, max_new_tokens=40) for n in (4, 1))
    assert all(b.score >= g.score - 1e-4 for b, g in zip(beams, greedy, strict=True))  # type: ignore[operator]
    print(bleu([translation.text for translation in beams], lines[1]))
