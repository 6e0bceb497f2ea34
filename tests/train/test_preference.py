"""Preference tuning: its loss and measures are the formulas on log-probabilities computed from all logits."""

import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from headway import load
from headway.errors import DataError
from headway.models import build
from headway.nn import IGNORE_INDEX
from headway.storage.tensors import open_tensors
from headway.train import train
from headway.train.metrics import read_metrics
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.tasks.preference import AT_ONCE, PreferenceConfig, PreferenceTuning
from tests.train.heads import write
from tests.train.prepared import prepared
from tests.train.test_chat import COLOURS, SHORT


def pairs(count: int) -> list[dict[str, Any]]:
    rng = random.Random(0)
    records = []
    for _ in range(count):
        thing, colour = rng.choice([*COLOURS.items()])
        wrong = rng.choice([other for other in COLOURS.values() if other != colour])
        records.append(
            {
                "prompt": f"what colour is {thing}?",
                "chosen": colour,
                "rejected": wrong + " " * rng.randint(0, 2),
            }
        )
    return records


def config(folder: Path, **changes: Any) -> PreferenceConfig:
    defaults: dict[str, Any] = {
        "data": write(folder / "pairs.jsonl", pairs(40)), "validation_share": 0.2,
        "template": SHORT, "vocab": 280, "depth": 1, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24,
        "context": 64, "batch": 6, "micro_batch": 2, "steps": 6, "lr": 3e-3, "dtype": "fp32",
        "backend": "sdpa", "out": str(folder / "run"), "workers": 1,
    }  # fmt: skip
    return PreferenceConfig(**defaults | changes)


def task(settings: PreferenceConfig) -> PreferenceTuning:
    tuning: PreferenceTuning = prepared(settings)
    return tuning


def dense_log_p(model: Any, ids: list[int], turns: list[int]) -> torch.Tensor:
    """Returns the log-probability of the trained ids of one row, computed from all logits at once."""
    logits = model(torch.tensor([ids[:-1]]))[0].log_softmax(-1)
    picked = logits.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return (picked * (torch.tensor(turns[1:]) > 0)).sum()


@pytest.mark.parametrize("loss", ["dpo", "orpo"])
def test_the_loss_and_its_gradient_are_the_formula(loss: str, tmp_path: Path) -> None:
    tuning = task(config(tmp_path, loss=loss, beta=0.3))
    model = build(tuning.model.spec, dtype=torch.float64, seed=1)  # not the reference
    rows = [0, 3, 5, 7]
    actual = tuning.loss(model, tuning.train_rows.batch(rows))
    actual.total.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    reference, total = tuning.model.double(), torch.zeros((), dtype=torch.float64)
    for i in rows:
        sides = tuning.train_rows.pairs[i]
        c, r = (dense_log_p(model, side.ids, side.turns) for side in sides)
        if loss == "dpo":
            with torch.no_grad():
                ref_c, ref_r = (dense_log_p(reference, side.ids, side.turns) for side in sides)
            total = total - F.logsigmoid(0.3 * ((c - ref_c) - (r - ref_r)))
        else:
            c, r = (log_p / sum(side.turns) for log_p, side in zip((c, r), sides, strict=True))
            odds = (c - torch.log1p(-c.exp())) - (r - torch.log1p(-r.exp()))
            total = total - c - 0.3 * F.logsigmoid(odds)
    total.backward()
    # the reference is kept in float32
    torch.testing.assert_close(actual.total, total.detach(), rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad, rtol=1e-5, atol=1e-7)


def test_only_the_last_answer_is_weighed(tmp_path: Path) -> None:
    tuning = task(config(tmp_path))
    tokenizer = tuning.tokenizer
    for chosen, rejected in tuning.train_rows.pairs:
        answers = [
            tokenizer.decode([i for i, t in zip(s.ids, s.turns, strict=True) if t])
            for s in (chosen, rejected)
        ]
        assert answers[0].strip() in COLOURS.values()
        assert answers[0] != answers[1]
    batch = tuning.train_rows.batch([0, 1])
    assert (batch.targets != IGNORE_INDEX).sum(1).min() > 0
    assert tuning.count(batch) == 2


def test_it_learns_what_is_preferred_and_says_so(tmp_path: Path) -> None:
    result = train(config(tmp_path, steps=60, eval_every=30, eval_at_start=True), quiet=True)
    lines = [r for r in read_metrics(result.metrics) if "val_loss" in r]
    assert lines[0]["val_loss"] == pytest.approx(0.6931, abs=1e-3)  # the model is the reference: log 2
    assert lines[0]["val_margin"] == pytest.approx(0, abs=1e-4)
    assert lines[-1]["val_loss"] < 0.6
    assert lines[-1]["val_accuracy"] > 0.8
    assert {"chosen_log_p", "rejected_log_p", "margin", "accuracy"} <= read_metrics(result.metrics)[-2].keys()
    tuning, saved = task(config(tmp_path)), load(result.model).model
    assert tuning.held_rows is not None
    tuning.held_rows.reference = open_tensors(tmp_path / "run/data/held-reference.safetensors")["log_p"]
    evaluation = tuning.evaluate(saved, MicrobatchPool(1), whole=True)  # type: ignore[arg-type]
    assert evaluation is not None
    assert evaluation.record == pytest.approx({name: lines[-1][name] for name in evaluation.record}, rel=1e-5)


def test_what_is_held_out_is_measured_pair_by_pair(tmp_path: Path) -> None:
    """The 11 pairs are more than one block, and the last block is not full."""
    tuning = task(config(tmp_path, validation_share=11 / 40, beta=0.3))
    model = build(tuning.model.spec, dtype=torch.float64, seed=1)  # not the reference
    assert tuning.held_rows is not None
    assert len(tuning.held_rows) % AT_ONCE
    evaluation = tuning.evaluate(model, MicrobatchPool(1), whole=True)  # type: ignore[arg-type]
    reference, sums = tuning.model.double(), defaultdict[str, float](float)
    with torch.no_grad():
        for sides in tuning.held_rows.pairs:
            (c, ref_c), (r, ref_r) = (
                [dense_log_p(m, side.ids, side.turns) for m in (model, reference)] for side in sides
            )
            margin = (c - ref_c) - (r - ref_r)
            sums["loss"] -= float(F.logsigmoid(0.3 * margin))
            measures = {"margin": margin, "accuracy": margin > 0, "chosen_log_p": c, "rejected_log_p": r}
            for name, value in measures.items():
                sums[name] += float(value)
    assert evaluation is not None
    assert evaluation.tokens == len(tuning.held_rows) == 11
    assert evaluation.record == pytest.approx({f"val_{name}": sums[name] / 11 for name in sums}, rel=1e-4)


@pytest.mark.parametrize("base", [None, "nf4"])
def test_beside_a_frozen_model_the_reference_is_the_policy_at_first(base: str | None, tmp_path: Path) -> None:
    """The reference is computed in the base's own number format, quantized or not."""
    train(config(tmp_path, steps=1, out=str(tmp_path / "base")), quiet=True)
    fresh = dict.fromkeys(("template", "vocab", "depth", "width", "heads", "kv_heads", "hidden"))
    adapter_config = config(
        tmp_path, **fresh, model=str(tmp_path / "base" / "final"), adapter="lora", rank=2, base=base, dtype="bf16",
        eval_at_start=True, out=str(tmp_path / "run2"),
    )  # fmt: skip
    first = next(r for r in read_metrics(train(adapter_config, quiet=True).metrics) if "val_loss" in r)
    assert first["val_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert first["val_margin"] == pytest.approx(0.0, abs=1e-6)


def test_pairs_that_do_not_fit_are_counted(tmp_path: Path) -> None:
    long = {"prompt": "what colour is sky?", "chosen": "blue " * 60, "rejected": "red"}
    file = write(tmp_path / "long.jsonl", [*pairs(20), long])
    tuning = task(config(tmp_path, data=file, validation_share=0.0))
    assert any("1 of 21 pairs are longer than context 64: left out" in remark for remark in tuning.remarks)
    with pytest.raises(DataError, match="none of the 40 pairs fits context 4"):
        task(config(tmp_path, context=4, validation_share=0.0))
    broken = write(tmp_path / "broken.jsonl", [{"prompt": "x", "chosen": "y"}])
    with pytest.raises(DataError, match=r"broken\.jsonl:1"):
        task(config(tmp_path, data=broken))
