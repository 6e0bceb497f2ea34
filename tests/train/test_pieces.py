"""The parts of a step that need no run: schedule, parameter groups, optimizer state, loss, plan of rows."""

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headway.errors import CheckpointError
from headway.models import Decoder, ModelSpec, build
from headway.nn import IGNORE_INDEX, cross_entropy
from headway.nn.cross_entropy import fused_cross_entropy
from headway.train import TextConfig
from headway.train.microbatch_pool import choose_precision
from headway.train.optimizer import Optimizer, learning_rate, parameter_groups
from headway.train.tasks.base import Plan
from tests.nn.plain import plain_cross_entropy


def model(tied: bool = True, qkv_bias: bool = False) -> Decoder:
    fields = {"heads": 2, "kv_heads": 1, "head_dim": 8, "width": 16, "hidden": 24, "qkv_bias": qkv_bias}
    return build(ModelSpec.of_depth(2, 50, tied=tied, **fields), seed=0)  # type: ignore[arg-type]


def test_schedule_is_warm_up_then_cosine_to_the_floor() -> None:
    steps = 200
    rates = [learning_rate((s + 1) / steps, warmup=0.1, floor=0.2) for s in range(steps)]
    assert rates[:20] == pytest.approx([(s + 1) / 20 for s in range(20)])
    assert max(rates) == rates[19] == 1.0
    assert rates[-1] == pytest.approx(0.2)
    assert rates[109] == pytest.approx(0.6)  # half way down: (1 + 0.2) / 2
    assert all(a > b for a, b in pairwise(rates[19:]))
    assert learning_rate(0.0, warmup=0.0, floor=0.0) == 1.0
    assert learning_rate(1.0, warmup=1.0, floor=0.0) == 1.0
    assert learning_rate(7.0, warmup=0.1, floor=0.3) == pytest.approx(0.3)


@pytest.mark.parametrize("tied", [True, False])
def test_groups_hold_every_parameter_once_by_structure(tied: bool) -> None:
    m = model(tied, qkv_bias=True)
    groups = parameter_groups(m)
    assert sum(p.numel() for group in groups for p in group.values()) == sum(
        p.numel() for p in m.parameters()
    )
    assert set(groups.embeddings) == {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert len(groups.matrices) == 2 * 7
    assert all(n.endswith(".weight") and p.dim() == 2 for n, p in groups.matrices.items())
    assert {n.rsplit(".", 1)[-1] for n in groups.vectors} == {"weight", "bias"}
    m.model.norm.weight.requires_grad_(False)
    assert "model.norm.weight" not in parameter_groups(m).vectors


def test_only_matrices_decay() -> None:
    m = model()
    groups = parameter_groups(m)
    optimizer = Optimizer.of(groups, TextConfig(data="x", weight_decay=0.5, lr=0.1))
    before = {n: p.detach().clone() for n, p in m.named_parameters()}
    for p in m.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step(1.0)
    for name, p in m.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if name in groups.matrices else before[name]
        torch.testing.assert_close(p, expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_optimizer_state_goes_through_tensors(kind: str) -> None:
    def stepped(steps: int, restore_at: int | None = None) -> Decoder:
        m = model()
        config = TextConfig.of({"data": "x", "optimizer": kind})
        optimizer = Optimizer.of(parameter_groups(m), config)
        for step in range(steps):
            if step == restore_at:
                saved = {k: v.clone() for k, v in optimizer.state_tensors().items()}
                optimizer = Optimizer.of(parameter_groups(m), config)
                optimizer.load_state_tensors(saved)
            for i, p in enumerate(m.parameters()):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * step + i))
            optimizer.step(0.5)
        return m

    for a, b in zip(stepped(4).parameters(), stepped(4, restore_at=2).parameters(), strict=True):
        assert torch.equal(a, b)


def test_optimizer_state_is_strict() -> None:
    m = model()
    optimizer = Optimizer.of(parameter_groups(m), TextConfig(data="x"))
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step(1.0)
    state = optimizer.state_tensors()
    with pytest.raises(CheckpointError, match="state has 'nobody', but the model has no such parameter"):
        optimizer.load_state_tensors(state | {"nobody/step": torch.zeros(())})
    with pytest.raises(CheckpointError, match=r"state lacks model\.norm\.weight"):
        optimizer.load_state_tensors({k: v for k, v in state.items() if "model.norm" not in k})
    with pytest.raises(CheckpointError, match=r"has shape \(3,\), the parameter has \(16,\)"):
        optimizer.load_state_tensors(state | {"model.norm.weight/exp_avg": torch.zeros(3)})
    muon = Optimizer.of(parameter_groups(m), TextConfig(data="x", optimizer="muon"))
    with pytest.raises(CheckpointError, match=r"Muon keeps .*; resume with the optimizer of the run"):
        muon.load_state_tensors(state)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_of_another_run_are_taken_where_they_fit(kind: str) -> None:
    """A parameter without moments steps like a fresh one, and the state is complete: it can be saved and loaded."""

    def stepped(optimizer: Optimizer) -> None:
        for p in optimizer.parameters.values():
            p.grad = torch.ones_like(p)
        optimizer.step(1.0)

    config = TextConfig(data="x", optimizer=kind)  # type: ignore[arg-type]
    first, second, fresh = (Optimizer.of(parameter_groups(model()), config) for _ in range(3))
    stepped(first)
    missing = "model.layers.0.self_attn.k_proj.weight"
    kept = {key: value for key, value in first.state_tensors().items() if missing not in key}
    assert (
        second.load_state_tensors(kept | {"nobody/step": torch.zeros(())}, strict=False)
        == len(first.parameters) - 1
    )
    assert all(torch.equal(second.state_tensors()[key], value) for key, value in kept.items())
    Optimizer.of(parameter_groups(model()), config).load_state_tensors(second.state_tensors())
    stepped(second)
    stepped(fresh)
    torch.testing.assert_close(second.parameters[missing], fresh.parameters[missing], rtol=0, atol=0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("ignored", ["some", "none", "all"])
def test_chunked_loss_is_the_plain_one(
    rows: int, ignored: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocab: rows)
    generator = torch.Generator().manual_seed(rows)
    hidden = torch.randn(3, 11, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(29, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    targets = torch.randint(0, 29, (3, 11), generator=generator)
    if ignored != "none":
        targets[0, : 11 if ignored == "some" else None] = IGNORE_INDEX
        targets[1:] = IGNORE_INDEX if ignored == "all" else targets[1:]
    bias = torch.randn(29, dtype=torch.float64, generator=generator, requires_grad=True) if biased else None
    total, _, count, losses, hits = fused_cross_entropy(hidden, weight, targets, bias=bias, hits=True)
    assert count == int((targets != IGNORE_INDEX).sum())
    assert hits is not None
    assert torch.equal(hits, F.linear(hidden, weight, bias).argmax(-1) == targets)
    expected = plain_cross_entropy(hidden, weight, targets, bias)
    torch.testing.assert_close(total, expected)
    torch.testing.assert_close(losses.sum(), expected)
    assert torch.equal(losses == 0, targets == IGNORE_INDEX)
    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    gradients = torch.autograd.grad(0.37 * total, inputs)
    for a, b in zip(gradients, torch.autograd.grad(0.37 * expected, inputs), strict=True):
        torch.testing.assert_close(a, b)


def test_chunked_loss_in_bf16_is_as_near_as_bf16_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "chunk_rows", lambda vocab: 16)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(64, 32, generator=generator)
    weight = torch.randn(100, 32, generator=generator)
    targets = torch.randint(0, 100, (64,), generator=generator)
    low_h, low_w = (t.bfloat16().requires_grad_() for t in (hidden, weight))
    exact_h, exact_w = (t.detach().double().requires_grad_() for t in (low_h, low_w))
    exact_gradients = torch.autograd.grad(plain_cross_entropy(exact_h, exact_w, targets), (exact_h, exact_w))
    plain_gradients = torch.autograd.grad(plain_cross_entropy(low_h, low_w, targets), (low_h, low_w))
    fused_gradients = torch.autograd.grad(fused_cross_entropy(low_h, low_w, targets)[0], (low_h, low_w))
    for a, b, exact in zip(fused_gradients, plain_gradients, exact_gradients, strict=True):
        assert (a.double() - exact).norm() <= 2 * (b.double() - exact).norm()


def test_chunked_loss_computes_no_gradient_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight = torch.randn(4, 8), nn.Parameter(torch.randn(9, 8))
    for product in ("input_product", "weight_product"):
        monkeypatch.setattr(cross_entropy, product, None)
    with torch.no_grad():
        total, *_ = fused_cross_entropy(hidden, weight, torch.arange(4))
    assert not total.requires_grad


def plan(rows: int, **settings: object) -> Plan:
    return Plan.of(TextConfig.of({"data": "x", "context": 4, "batch_tokens": 20, **settings}), rows)


def test_an_epoch_reads_every_row_once_and_its_last_window_is_what_is_left() -> None:
    p = plan(13, epochs=2, micro_batch=2)
    assert p.steps == 6
    read = [p.rows_of(s) for s in range(6)]
    assert [len(r) for r in read] == [5, 5, 5, 5, 5, 1]
    flat = [row for rows in read for row in rows]
    assert sorted(flat[:13]) == sorted(flat[13:]) == list(range(13))
    assert flat[:13] != flat[13:]
    assert p.micro_batches(1) == [read[1][:2], read[1][2:4], read[1][4:]]
    assert p.epoch(6) == 2.0


def test_the_rows_of_a_step_depend_on_nothing_but_seed_and_step() -> None:
    assert (
        plan(13, steps=9).rows_of(7) == plan(13, steps=500).rows_of(7) == plan(13, max_seconds=9).rows_of(7)
    )
    assert plan(13, steps=9, seed=1).rows_of(7) != plan(13, steps=9).rows_of(7)


def test_the_dtype_is_the_one_that_was_asked_for_or_has_a_reason() -> None:
    assert choose_precision("fp32").what == "fp32"
    assert choose_precision("bf16").what == "bf16"
    assert choose_precision("auto").why


def test_schedule_values_are_finite_everywhere() -> None:
    for i in range(101):
        for warmup in (0.0, 0.3, 1.0):
            assert math.isfinite(learning_rate(i / 100, warmup=warmup, floor=0.1))
