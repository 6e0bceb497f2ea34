"""Bits per byte are exact: each token but a document's first is predicted once, and bytes are those of the text."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from headway.checkpoints.restore import load_model
from headway.data import Rows, TokenFile, encode_corpus
from headway.errors import DataError
from headway.models import ModelSpec, build
from headway.text import train_bpe
from headway.train import TextConfig, train
from headway.train.evaluation import _buckets, evaluate
from headway.train.metrics import read_metrics


def test_bits_per_byte_by_hand(tmp_path: Path) -> None:
    texts = ["a text of words and words", "x", "änother tëxt, with wörds of more bytes than letters"]
    for i, text in enumerate(texts):
        (tmp_path / f"{i}.txt").write_text(text, encoding="utf-8")
    tokenizer = train_bpe(texts, 270)
    encode_corpus(tmp_path, tokenizer, tmp_path / "a.tokens")
    file = TokenFile(tmp_path / "a.tokens")
    model = build(
        ModelSpec.of_depth(1, tokenizer.vocab_size, width=16, heads=2, kv_heads=1, head_dim=8), seed=0
    )
    context = 12
    evaluation = evaluate(model, Rows(file, context))

    nats, count, by_position = 0.0, 0, [0.0] * context
    stream = [(d, t) for d in range(3) for t in file.document(d).tolist()]
    with torch.no_grad():
        for start in range(0, len(stream), context):
            window = stream[start : start + context + 1]
            for i in range(min(context, len(window) - 1)):
                document, target = window[i + 1]
                if window[i][0] != document:
                    continue
                first = next(j for j in range(i + 1) if window[j][0] == document)
                past = torch.tensor([[t for _, t in window[first : i + 1]]])
                loss = -float(model(past)[0, -1].log_softmax(-1)[target])
                nats += loss
                count += 1
                by_position[i - first] += loss
    size = sum(len(text.encode()) for text in texts)
    assert evaluation.tokens == count == len(file) - 3
    assert evaluation.text_bytes == size
    assert evaluation.bits_per_byte == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert evaluation.perplexity == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert [b.first for b in evaluation.positions] == [0]
    assert evaluation.positions[0].nats == pytest.approx(sum(by_position), rel=1e-5)
    assert model.training


def test_tokens_guessed_right_are_counted_once_at_their_position() -> None:
    ones = torch.ones(40, dtype=torch.float64)
    buckets = _buckets(ones, ones.long(), torch.arange(40))
    assert [b.hits for b in buckets] == [sum(range(16)), sum(range(16, 32)), sum(range(32, 40))]


def test_positions_add_up_and_a_limit_reads_less(tmp_path: Path) -> None:
    text = "one two three four five " * 60
    tokenizer = train_bpe([text], 265)
    (tmp_path / "a.txt").write_text(text)
    encode_corpus(tmp_path / "a.txt", tokenizer, tmp_path / "a.tokens")
    file = TokenFile(tmp_path / "a.tokens")
    model = build(
        ModelSpec.of_depth(1, tokenizer.vocab_size, width=16, heads=2, kv_heads=1, head_dim=8), seed=0
    )
    whole = evaluate(model, Rows(file, 40))
    assert [(b.first, b.last) for b in whole.positions] == [(0, 15), (16, 31), (32, 39)]
    assert sum(b.tokens for b in whole.positions) == whole.tokens
    assert sum(b.nats for b in whole.positions) == pytest.approx(whole.nats)
    limited = evaluate(model, Rows(file, 40), limit=50)
    assert limited.tokens == 50
    assert limited.text_bytes == round(whole.text_bytes * 50 / whole.tokens)
    calls: list[tuple[int, int]] = []
    longer = Rows(file, 40_000)
    of_long_row = evaluate(model, longer, limit=50, progress=lambda done, total: calls.append((done, total)))
    assert (of_long_row.tokens, calls) == (50, [(1, 1)])
    assert of_long_row.positions[-1].last == 49  # the slots after the limit are not computed
    assert of_long_row.nats == pytest.approx(evaluate(model, Rows(file, 50), limit=50).nats, rel=1e-6)
    everything = evaluate(model, Rows(file, 40), limit=10**6)
    assert (everything.nats, everything.text_bytes) == (whole.nats, whole.text_bytes)


def test_the_time_of_an_evaluation_is_that_of_its_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    from headway.data import TokenFileWriter

    with TokenFileWriter(tmp_path / "a.tokens", 9) as writer:
        writer.add([1, 2, 3])
    clock = SimpleNamespace(perf_counter=iter((100.0, 100.25)).__next__)
    monkeypatch.setattr("headway.train.evaluation.time", clock)
    model = build(ModelSpec.of_depth(1, 9), seed=0)
    model.eval()
    assert evaluate(model, Rows(TokenFile(tmp_path / "a.tokens"), 8)).seconds == 0.25
    assert not model.training


def test_nothing_to_predict_is_an_error(tmp_path: Path) -> None:
    from headway.data import TokenFileWriter

    with TokenFileWriter(tmp_path / "a.tokens", 9) as writer:
        writer.add([1])
        writer.add([2])
    model = build(ModelSpec.of_depth(1, 9), seed=0)
    with pytest.raises(DataError, match="no token to predict: every document has a single token"):
        evaluate(model, Rows(TokenFile(tmp_path / "a.tokens"), 8))


def test_a_run_measures_before_its_first_step_and_in_rows_of_other_lengths(
    settings: Callable[..., TextConfig], tmp_path: Path
) -> None:
    config = settings(
        validation_share=0.3,
        eval_at_start=True,
        eval_contexts=(12, 48),
        eval_tokens=1,
        eval_every=1,
        steps=2,
        dtype="fp32",
    )
    result = train(config, quiet=True)
    lines = [r for r in read_metrics(result.metrics) if "val_loss" in r]
    assert [(r["step"], "val_loss@12" in r) for r in lines] == [(0, True), (1, False), (2, True)]
    assert lines[0]["val_tokens"] == lines[2]["val_tokens"] > lines[1]["val_tokens"]
    file = TokenFile(Path(config.out) / "data" / "validation.tokens")
    model = load_model(result.model)
    for length in (12, 48):
        assert lines[-1][f"val_loss@{length}"] == pytest.approx(
            evaluate(model, Rows(file, length)).loss, rel=1e-5
        )
    fresh = load_model(Path(config.out) / "checkpoint-0")
    assert lines[0]["val_loss"] == pytest.approx(evaluate(fresh, Rows(file, config.context)).loss, rel=1e-5)
