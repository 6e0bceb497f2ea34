"""Pre-training of encoders on masked tokens (rows 82, 84, 86, 87)."""

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import build_model
from headway.cli import run
from headway.data import HELD_OUT, MaskedRows, Masking, TokenFile
from headway.models import Encoder, ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.text import Tokenizer
from headway.train import TextConfig, evaluate, train
from headway.train.metrics import read_metrics
from headway.train.microbatch_pool import MasterWeights
from tests.checkpoints.shares import share
from tests.data import data_path
from tests.train.objectives import accumulated
from tests.train.prepared import prepared

Make = Callable[..., TextConfig]
FAMILIES = ("bert", "roberta", "roformer", "wobert", "nezha", "longformer")


def model_of(folder: Path) -> Encoder:
    model = build_model(load_folder(folder))
    assert isinstance(model, Encoder)
    return model


def masked_rows(
    file: TokenFile,
    length: int,
    tokenizer: Tokenizer,
    seed: int = 0,
    draw: int = HELD_OUT,
    packed: bool = True,
) -> MaskedRows:
    template = tokenizer.template
    return MaskedRows(
        file, length, Masking.of(tokenizer), prefix=template.prefix, suffix=template.suffix, packed=packed,
        seed=seed, draw=draw,
    )  # fmt: skip


def test_row_87_a_run_learns_and_logs_loss_and_accuracy(
    encoder: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    config = encoder(
        validation_share=0.2, steps=40, lr=1e-2, eval_every=20, eval_tokens=200, dropout=0.0, optimizer="muon",
        sample_prompts=["one [MASK] three"], sample_every=20,
    )  # fmt: skip
    result = train(config)
    records = read_metrics(result.metrics)
    steps = [r for r in records if "loss" in r]
    assert steps[-1]["loss"] < steps[0]["loss"] - 1
    assert all("bits_per_byte" not in r and 0 <= r["accuracy"] <= 1 for r in steps)
    assert steps[-1]["accuracy"] == result.accuracy
    assert sum(r["tokens"] for r in steps) == result.trained_tokens < 0.25 * 40 * 8 * 24
    held = [r for r in records if "val_loss" in r]
    assert [r["step"] for r in held] == [20, 40]
    assert all(set(r) == {"step", "val_loss", "val_tokens", "val_accuracy"} for r in held)
    last = result.validation
    assert last is not None
    assert held[-1]["val_accuracy"] == last.accuracy == sum(b.hits or 0 for b in last.positions) / last.tokens
    assert held[-1]["val_accuracy"] > held[0]["val_accuracy"]
    assert last.bits_per_byte is None
    stderr = capsys.readouterr().err
    assert re.search(r"held out, step 40: loss \d\.\d{4}, accuracy 0\.\d{4} over \d+ tokens", stderr)
    assert re.search(r"step 20: one \[MASK\] three -> one.*three\n", stderr)
    assert result.curve.read_bytes().startswith(b"\x89PNG")

    file, tokenizer = TokenFile(result.out / "data" / "validation.tokens"), Tokenizer.load(result.model)
    again = evaluate(model_of(result.model), masked_rows(file, 24, tokenizer, seed=config.seed))
    assert (again.hits, again.tokens) == (last.hits, last.tokens)
    assert again.nats == pytest.approx(last.nats, rel=1e-5)
    other = evaluate(model_of(result.model), masked_rows(file, 24, tokenizer, seed=config.seed + 1))
    assert other.nats != again.nats


def examples(config: TextConfig, folder: Path) -> tuple[MaskedRows, ModelSpec]:
    task = prepared(config, folder)
    rows = task.train_rows.drawn(0)
    assert isinstance(rows, MaskedRows)
    return rows, task.model.spec


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_the_mean_over_masked_tokens(encoder: Make, tmp_path: Path, family: str) -> None:
    """Compared with the cross-entropy on all logits of the model's forward pass."""
    patterns = "Window.around(3) | Global()" if family == "longformer" else None
    rows, spec = examples(encoder(family=family, patterns=patterns), tmp_path / "made")
    model = build(replace(spec, init_std=0.3), seed=1).eval()
    assert isinstance(model, Encoder)
    batch = rows.batch(range(6))
    ids, tokens, targets = batch.inputs["ids"], batch.inputs["tokens"], batch.targets
    masked = targets != IGNORE_INDEX
    assert (tokens.is_global is not None) == spec.global_projections
    logits = model(ids, tokens=tokens)[masked].double().detach()
    expected = F.cross_entropy(logits, targets[masked], reduction="none")
    total, nats, count, each, hits = model(ids, tokens=tokens, targets=targets)
    assert (count, float(nats)) == (int(masked.sum()), float(total.detach()))
    assert not each[~masked].any()
    assert not hits[~masked].any()
    torch.testing.assert_close(each[masked].double(), expected, rtol=1e-5, atol=1e-5)
    assert float(total.detach()) == pytest.approx(float(expected.sum()), rel=1e-6)
    assert torch.equal(hits[masked], logits.argmax(-1) == targets[masked])
    weights = MasterWeights(model, torch.float32)
    assert accumulated(weights, [batch]) == (float(total.detach()), count, {"hits": int(hits.sum())})


def test_every_parameter_is_trained(encoder: Make, tmp_path: Path) -> None:
    """So are Longformer's projections of global tokens, except in the last layer, where only [CLS] would need them."""
    for family in FAMILIES:
        rows, spec = examples(encoder(family=family), tmp_path / family)
        weights = MasterWeights(build(replace(spec, init_std=0.3), seed=1).train(), torch.float32)
        accumulated(weights, [rows.batch(range(8))])
        untrained = {n for n, p in weights.master.named_parameters() if p.grad is None or not p.grad.any()}
        # A bias on the keys adds the same to all scores of a query.
        untrained = {n for n in untrained if not n.endswith(("k_proj.bias", "k_global_proj.bias"))}
        last = f"model.layers.{spec.layers - 1}.self_attn."
        assert all(n.startswith(last) and "_global_proj." in n for n in untrained), (family, untrained)


def test_a_packed_row_is_its_texts_alone(encoder: Make, tmp_path: Path) -> None:
    config = encoder(family="roformer")
    rows, spec = examples(config, tmp_path / "made")
    model = build(replace(spec, init_std=0.3), seed=1).eval()
    assert isinstance(model, Encoder)
    batch = rows.batch(range(len(rows)))
    alone = []
    tokens = batch.inputs["tokens"]
    for ids, targets, index, document in zip(
        batch.inputs["ids"], batch.targets, tokens.index, tokens.document, strict=True
    ):
        for d in document[index >= 0].unique():
            inside = document == d
            labels = targets[inside][None]
            if (labels != IGNORE_INDEX).any():
                alone.append(model(ids[inside][None], targets=labels).each[labels != IGNORE_INDEX])
    assert len(alone) > len(rows)
    together = model(**batch.inputs, targets=batch.targets).each[batch.targets != IGNORE_INDEX]
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


@share("family", ["bert", "roformer"], 1, 2)
def test_transformers_goes_on_with_what_was_trained(encoder: Make, family: str) -> None:
    """transformers loads the folder as BertForMaskedLM or RoFormerForMaskedLM, with the same loss on padded rows."""
    import transformers

    peer_class = {"bert": transformers.BertForMaskedLM, "roformer": transformers.RoFormerForMaskedLM}[family]
    result = train(encoder(family=family, steps=3, pack=False, validation_share=0.2), quiet=True)
    config = json.loads((result.model / "config.json").read_text())
    assert config["architectures"] == [peer_class.__name__]
    peer, ours = peer_class.from_pretrained(result.model).eval(), model_of(result.model)
    file, tokenizer = TokenFile(result.out / "data" / "validation.tokens"), Tokenizer.load(result.model)
    rows = masked_rows(file, 24, tokenizer, packed=False, draw=5)
    batch = rows.batch(range(len(rows)))
    ids, tokens, targets = batch.inputs["ids"], batch.inputs["tokens"], batch.targets
    with torch.no_grad():
        peer_output = peer(input_ids=ids, attention_mask=tokens.valid.long(), labels=targets)
        actual = ours(ids, tokens=tokens, targets=targets)
    assert actual.tokens > 5
    assert float(actual.nats) / actual.tokens == pytest.approx(float(peer_output.loss), rel=1e-5)
    peer_tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
    assert peer_tokenizer("one two")["input_ids"] == tokenizer.encode("one two")
    assert peer_tokenizer.mask_token_id == tokenizer.mask


def test_masks_do_not_depend_on_micro_batches_and_differ_by_step(encoder: Make, tmp_path: Path) -> None:
    token_counts: list[list[float]] = []
    for size in (8, 3):
        config = encoder(dropout=0.0, micro_batch=size, out=str(tmp_path / str(size)))
        result = train(config, quiet=True)
        token_counts.append([r["tokens"] for r in read_metrics(result.metrics) if "loss" in r])
    assert token_counts[0] == token_counts[1]
    rows, _ = examples(encoder(), tmp_path / "made")
    assert not torch.equal(rows.drawn(0).batch([0])[1], rows.drawn(1).batch([0])[1])


def test_the_command_line(encoder: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Trains by flags, and evaluates at the trained length and at four times that length (row 84)."""
    out = str(tmp_path / "run")
    sizes = "--depth 2 --width 16 --heads 2 --vocab 300 --context 24 --batch-tokens 96 --steps 2"
    options = f"--family roformer {sizes} --dtype fp32 --validation-share 0.3"
    assert run(["train", *options.split(), "--data", encoder().data, "--out", out]) == 0
    output = capsys.readouterr().out
    assert "held-out accuracy" in output
    assert f"next: headway eval {out}/final --data" in output
    held = f"{out}/data/validation.tokens"
    for context in (24, 96):
        arguments = ["eval", f"{out}/final", "--data", held, "--dtype", "fp32", "--context", str(context)]
        assert run([*arguments, "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert report["context"] == context
        assert report["bits_per_byte"] is None
        assert 0 <= report["accuracy"] <= 1
        assert sum(p["tokens"] for p in report["positions"]) == report["tokens"]
    assert report["positions"][-1]["first"] == 64
    assert run(arguments) == 0
    assert "tokens before it" in capsys.readouterr().out
    assert not any("position" in name for name in dict(load_folder(f"{out}/final").tensors))


@pytest.mark.slow
@pytest.mark.parametrize("changes", [
    {"units": "characters"}, {"units": "words", "vocab": 4000}, {"units": "characters", "mixers": "elu+1"},
    {"units": "characters", "mixers": "cosine"},
], ids=lambda c: "-".join(map(str, c.values())))  # fmt: skip
def test_a_small_roformer_learns_chinese(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Rows 82, 84, 86: the loss falls, also with linear attention; held-out accuracy beats naming the most frequent
    token; rows of four times the length have a loss near that of the trained length."""
    text = gzip.decompress(data_path("chinese/hongloumeng.txt.gz").read_bytes()).decode("utf-8-sig")
    (tmp_path / "text.txt").write_text(text[:200_000], encoding="utf-8")
    config = TextConfig.of(
        {
            "data": str(tmp_path / "text.txt"), "validation_share": 0.1, "vocab": 2400, "family": "roformer",
            "depth": 2, "width": 96, "heads": 4, "dropout": 0.0, "context": 64, "batch_tokens": 1024, "steps": 120,
            "optimizer": "muon", "lr": 5e-3, "weight_decay": 0.0, "out": str(tmp_path / "run"), **changes,
        }
    )  # fmt: skip
    result = train(config, quiet=True)
    curve = [r["loss"] for r in read_metrics(result.metrics) if "loss" in r]
    assert sum(curve[-10:]) / 10 < curve[0] - 1.5
    file, tokenizer = TokenFile(result.out / "data" / "validation.tokens"), Tokenizer.load(result.model)
    assert result.validation is not None
    counts = torch.bincount(torch.from_numpy(file.tokens.astype("int64")))
    assert result.validation.accuracy is not None
    print(f"accuracy {result.validation.accuracy:.3f}, most frequent {float(counts.max()) / len(file):.3f}")
    assert result.validation.accuracy > float(counts.max()) / len(file)
    longer = evaluate(model_of(result.model), masked_rows(file, 4 * 64, tokenizer))
    print(f"loss {result.validation.loss:.3f}, at four times the length {longer.loss:.3f}, {longer.accuracy}")
    assert longer.positions[-1].tokens > 50
    assert longer.loss < result.validation.loss + 0.5


def test_words_are_fewer_than_characters(tmp_path: Path, encoder: Make) -> None:
    """Row 86: the same text has fewer tokens with words."""
    text = "宝玉笑道：“妹妹来了。”黛玉笑道：“宝玉来了。”\n" * 20
    (tmp_path / "zh.txt").write_text(text, encoding="utf-8")
    sizes = {}
    for units, vocab in (("characters", 274), ("words", 276)):
        config = encoder(
            data=str(tmp_path / "zh.txt"), units=units, vocab=vocab, steps=1, out=str(tmp_path / units)
        )
        result = train(config, quiet=True)
        file, tokenizer = TokenFile(result.out / "data" / "train.tokens"), Tokenizer.load(result.model)
        assert tokenizer.decode(file.tokens.tolist()) == text
        sizes[units] = len(file)
    assert sizes["words"] < sizes["characters"] == len(text)
