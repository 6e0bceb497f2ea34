"""The harness of small training runs: equal budgets, equal data, equal weights."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from headway.data import Batch
from headway.errors import DataError
from headway.models import ModelSpec, build
from headway.positions import NoPositions
from headway_lab.explain import (
    linear_training,
    runs,
)
from headway_lab.explain.runs import Budget, BytePrediction, batch_of, contend, mean_loss, small, train

TOY = Budget(steps=2, rows=2, seeds=(0, 1))


@pytest.fixture(scope="module", autouse=True)
def few_rows() -> Iterator[None]:
    """Few held-out rows keep these tests short."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "HELD_OUT_ROWS", 8)
        yield


def test_contenders_of_a_seed_have_equal_budgets_and_equal_data_in_equal_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, bytes]] = []
    batches = BytePrediction.batches

    def spy(prediction: BytePrediction, step: int) -> list[Batch]:
        (batch,) = batches(prediction, step)
        seen.append((step, batch.inputs["ids"].numpy().tobytes()))
        return [batch]

    monkeypatch.setattr(BytePrediction, "batches", spy)
    contend({"rotary": small(), "none": small(positions=NoPositions()), "wide": small(width=32)}, TOY)
    by_contender = [seen[i : i + TOY.steps] for i in range(0, len(seen), TOY.steps)]
    assert [step for step, _ in seen] == [0, 1] * 6
    assert by_contender[0] == by_contender[1] == by_contender[2], "three contenders of a seed"
    assert by_contender[3] == by_contender[4] == by_contender[5]
    assert by_contender[0] != by_contender[3], "another seed sees other rows"
    assert {len(ids) for _, ids in seen} == {8 * TOY.rows * TOY.tokens}


def test_contenders_of_a_seed_start_from_the_same_weights_where_shapes_agree() -> None:
    first, second = build(small(), seed=3), build(small(positions=NoPositions()), seed=3)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_seed_gives_the_same_run_again_on_any_number_of_threads() -> None:
    spec = {"rotary": small()}
    first = contend(spec, TOY)["rotary"]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        second = contend(spec, TOY)["rotary"]
        assert torch.get_num_threads() == 2, "the setting comes back"
    finally:
        torch.set_num_threads(before)
    assert [run.loss for run in first] == [run.loss for run in second]
    assert first[0].loss != first[1].loss


def test_training_lowers_the_loss_of_text_that_was_not_trained_on() -> None:
    run = train(small(), Budget(steps=20, rows=4, seeds=(0, 1)), 0)
    fresh = runs.held_out_loss(build(small(), seed=0), TOY.tokens)
    assert run.loss < fresh - 1


@pytest.mark.parametrize(
    "spec", [small(), linear_training.contenders()["linear"]], ids=["decoder", "encoder"]
)
def test_a_run_is_adam_on_the_mean_loss(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the loop written out: three steps, clipped, on the rows and masks of the seed."""
    budget = Budget(steps=3, rows=2, seeds=(0, 1))
    model, objective = build(spec, seed=1), BytePrediction(budget, 1, spec.causal)
    adam = torch.optim.Adam(model.parameters(), betas=(0.9, 0.95))
    curve = []
    for step in range(3):
        ((inputs, targets),) = objective.batches(step)
        share = (step + 1) / 3
        assert share > runs.WARM_UP
        cosine = 0.5 + 0.5 * math.cos(math.pi * (share - runs.WARM_UP) / (1 - runs.WARM_UP))
        adam.param_groups[0]["lr"] = budget.rate * (runs.FLOOR + (1 - runs.FLOOR) * cosine)
        loss = torch.nn.functional.cross_entropy(model(**inputs).flatten(0, 1), targets.flatten())
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), runs.CLIP)
        adam.step()
        curve.append(loss.item())
    steps: list[Any] = []
    fit = runs.fit
    monkeypatch.setattr(runs, "fit", lambda *arguments, **named: steps.extend(fit(*arguments, **named)))
    train(spec, budget, 1)
    assert [step.loss_sum / step.count for step in steps] == pytest.approx(curve, rel=1e-5)


def test_training_and_held_out_text_share_no_module() -> None:
    train_text, held = runs.text()
    assert min(len(train_text), len(held)) > runs.LEAST_BYTES
    assert int(held.min()) > 0, "no byte is the mask"
    middle = bytes(held[5000:5400].tolist())
    assert middle not in bytes(train_text.tolist())


def test_a_python_without_its_library_as_files_is_told(monkeypatch, tmp_path) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(runs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(
        DataError, match="0 bytes of Python modules to train on and 0 held out, but 100000 of each"
    ):
        runs.text.__wrapped__()


def test_a_hidden_byte_does_not_reach_the_encoder() -> None:
    model = build(linear_training.contenders()["softmax"], seed=0).eval()
    ids = runs.held_out_rows(32, 2)
    noise = torch.Generator().manual_seed(5)
    hidden = torch.rand(2, 32, generator=noise) < runs.MASKED
    hidden[:, 0] = True
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda _, args, named: seen.append(named["ids"]), with_kwargs=True)
    loss = mean_loss(model, batch_of(ids, False, torch.Generator().manual_seed(5)))
    assert (seen[0][hidden] == runs.MASK).all()
    assert torch.equal(seen[0][~hidden], ids[:, :-1][~hidden])
    logits = model(ids=seen[0])[hidden]
    expected = torch.nn.functional.cross_entropy(logits, ids[:, :-1][hidden])
    assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
