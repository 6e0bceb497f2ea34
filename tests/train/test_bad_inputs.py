"""Inputs that stop a run or must not disturb it: foreign ids, steps without targets, gradients that are not finite."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.checkpoints.restore import load_model
from headway.checkpoints.saving import save_folder
from headway.data import Rows, TokenFile, TokenFileWriter
from headway.errors import CheckpointError, ConfigError, DataError
from headway.models import ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.nn.cross_entropy import fused_cross_entropy
from headway.text import Tokenizer, train_bpe
from headway.train import (
    Callback,
    CallbackContext,
    TextConfig,
    TrainingError,
    evaluate,
    read_config,
    train,
)
from headway.train.checkpoint import checkpoints
from headway.train.metrics import read_metrics
from headway.train.tasks.base import Plan
from tests.datasets.test_tokenfile import token_file
from tests.train.objectives import Given, sgd_step
from tests.train.runs import HOME_MADE
from tests.train.test_step import VOCAB, model

Make = Callable[..., TextConfig]


@pytest.mark.parametrize("bad", [-1, -101, 9, 10**6])
def test_a_target_outside_the_vocab_is_named(bad: int) -> None:
    """The target is neither trained as another token nor left out."""
    hidden, weight = torch.randn(1, 4, 8), torch.randn(9, 8)
    targets = torch.tensor([[0, IGNORE_INDEX, bad, 8]])
    with pytest.raises(DataError, match=rf"target {bad} is neither in 0\.\.8, the model's vocab, nor -100"):
        fused_cross_entropy(hidden, weight, targets)
    fixed = targets.clamp(IGNORE_INDEX, 8).where(targets != bad, 1)
    assert fused_cross_entropy(hidden, weight, fixed).each[0, 1] == 0


def test_a_token_file_of_a_larger_vocab_is_refused_by_a_smaller_model(tmp_path: Path) -> None:
    """The last token is only a target and is never embedded."""
    for ids, message in (([1, 2, 39, 3], "token id 39"), ([1, 2, 3, 39], "target 39 is neither in 0..19")):
        file = token_file(tmp_path / "a.tokens", [ids], VOCAB)
        with pytest.raises(DataError, match=message):
            evaluate(build(ModelSpec.of_depth(1, 20), seed=0), Rows(file, 8))


def test_a_tokenizer_larger_than_the_embedding_stops_a_run_before_it_begins(
    settings: Make, tmp_path: Path
) -> None:
    larger = train_bpe(["one two three four five"] * 3, 270)
    small = build(ModelSpec.of_depth(1, 269, width=16, heads=2, kv_heads=1, head_dim=8), seed=0)
    save_folder(tmp_path / "small", small)
    larger.save(tmp_path / "larger")
    config = settings(model=str(tmp_path / "small"), tokenizer=str(tmp_path / "larger"), **HOME_MADE)
    with pytest.raises(
        CheckpointError, match=r"ids up to 269 \(270 tokens\) but the model's embedding has 269"
    ):
        train(config, quiet=True)
    assert not checkpoints(Path(config.out))


def test_the_last_window_of_an_epoch_is_the_mean_over_its_own_tokens(tmp_path: Path) -> None:
    """11 rows in steps of 4: the last has 3, in micro-batches of 2 and 1, and is not averaged as if it were full."""
    documents = [list(range(n)) for n in (30, 9, 1, 17, 2, 25)]
    rows = Rows(token_file(tmp_path / "a.tokens", documents, VOCAB), 8)
    config = {"data": "x", "context": 8, "batch_tokens": 32, "micro_batch": 2, "epochs": 1}
    plan = Plan.of(TextConfig.of(config), len(rows))
    last = plan.micro_batches(plan.steps - 1 if plan.steps else 0)
    assert [len(part) for part in last] == [2, 1]
    trained, plain = model(), model()
    stats, gradient = sgd_step(Given.of(rows, last), trained)
    inputs, targets = rows.batch([r for part in last for r in part])
    mean = F.cross_entropy(plain(**inputs).flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX)
    mean.backward()  # torch's own mean over the tokens that are trained on
    assert stats.count == int((targets != IGNORE_INDEX).sum())
    assert stats.loss == pytest.approx(float(mean.detach()), rel=1e-6)
    expected = torch.cat([q.grad.flatten() for q in plain.parameters()])
    torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-6 * max(1.0, float(expected.abs().max())))


def test_a_window_that_trains_nothing_makes_no_step(settings: Make, tmp_path: Path) -> None:
    """Documents of one token give rows without targets: no weight moves, not even by decay, and nothing is NaN."""
    first = train(settings(steps=1), quiet=True)
    tokenizer = Tokenizer.load(first.model)
    with TokenFileWriter(
        tmp_path / "x.tokens", tokenizer.vocab_size, fingerprint=tokenizer.fingerprint
    ) as writer:
        for i in range(24 * 16):
            writer.add([i % 7], text_bytes=1)
        writer.add(list(range(24)), text_bytes=24)
    changes = {"data": str(tmp_path / "x.tokens"), "tokenizer": str(first.model), "vocab": None}
    config = settings(**changes, out=str(tmp_path / "b"), epochs=1, steps=None, weight_decay=0.5, lr=0.1, save_every=1,
                      keep_last=99, log_every=1, optimizer="muon")  # fmt: skip
    train(config)
    records = [r for r in read_metrics(Path(config.out) / "metrics.jsonl") if "loss" in r]
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    assert {r["tokens"] == 0 for r in records} == {True, False}
    folders = {int(p.name.split("-")[1]): p for p in checkpoints(Path(config.out))}
    for record in records:
        before, after = (load_model(folders[n]).state_dict() for n in (record["step"] - 1, record["step"]))
        assert all(bool(t.isfinite().all()) for t in after.values())
        if record["tokens"]:
            assert record["loss"] > 0
            assert any(not torch.equal(before[n], after[n]) for n in before)
        else:
            assert (record["loss"], record["grad_norm"]) == (None, 0.0)
            assert all(torch.equal(before[n], after[n]) for n in before)


@pytest.mark.parametrize("factor", [float("nan"), float("-inf")])
def test_a_bad_gradient_makes_no_step_and_names_the_rows(settings: Make, factor: float) -> None:
    """The weights stay those of the previous step."""
    kept: list[dict[str, Tensor]] = []
    models: list[torch.nn.Module] = []

    def watch(context: CallbackContext) -> None:
        kept.append({n: p.clone() for n, p in context.model.named_parameters()})
        models.append(context.model)
        if context.step == 3:
            weight = context.model.model.layers[1].mlp.down_proj.weight  # type: ignore[union-attr]
            weight.register_hook(lambda grad: torch.full_like(grad, 1.0) * factor)

    with pytest.raises(
        TrainingError, match=r"step 4: the gradient is not finite .*the weights were not updated"
    ) as caught:
        train(settings(steps=9), callbacks=[Callback(watch, every_steps=1)], quiet=True)
    assert len(kept) == 3
    config = settings(steps=9)
    tokens = Path(config.out) / "data" / "train.tokens"
    rows = Plan.of(config, len(Rows(TokenFile(tokens), config.context))).rows_of(3)
    assert len(rows) == 8
    assert f"rows {', '.join(map(str, rows))} of {tokens}" in str(caught.value)
    for name, parameter in models[-1].named_parameters():
        assert torch.equal(parameter, kept[-1][name]), name
    assert "not finite: model.layers.1.mlp.down_proj.weight." in str(caught.value)


def test_the_rows_that_are_named_are_the_rows_of_the_step(tmp_path: Path) -> None:
    rows = Rows(token_file(tmp_path / "a.tokens", [[i % VOCAB for i in range(90)]], VOCAB), 8)
    m = model()
    with torch.no_grad():
        m.model.embed_tokens.weight[5] = float("inf")  # only rows that hold token 5 are bad
    bad = [i for i in range(len(rows)) if 5 in rows[i].ids.tolist()]
    assert 0 < len(bad) < len(rows)
    with pytest.raises(TrainingError, match=rf"rows {bad[0]} of .*a\.tokens"):
        sgd_step(Given.of(rows, [[bad[0]]]), m)


def test_a_folder_of_settings_is_no_file_of_settings(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"cannot read the settings {tmp_path}: Is a directory"):
        read_config(tmp_path)
    with pytest.raises(DataError, match=r"no such token file \(it is a folder\)"):
        TokenFile(tmp_path)
