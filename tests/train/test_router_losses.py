"""Training adds the losses of routers, as `transformers` does, over the tokens of each micro-batch."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from headway.checkpoints import build_model, load_folder, save_folder
from headway.data import Batch
from headway.models import Decoder, ModelSpec, build, cost
from headway.nn import IGNORE_INDEX, Experts, MixtureOfExperts
from headway.nn.router_losses import router_losses, routing_of
from headway.text import train_bpe
from headway.tokens import Tokens
from headway.train import TextConfig, train
from headway.train.metrics import read_metrics
from tests.checkpoints.expert_rows import MOE, QWEN
from tests.saved import saved_tensors, storage_sizes
from tests.train.conftest import documents
from tests.train.objectives import Given, sgd_step

Make = Callable[..., TextConfig]
FLOAT = 1e-5
"""Relative tolerance: transformers computes routers, norms and angles in float32 in models of every dtype. Gradients
have ten times as much, as in `tests/checkpoints/test_decoders.py`."""
THEIRS: dict[str, dict[str, Any]] = {
    "mixtral": {**MOE, "num_local_experts": 4},
    "qwen3_moe": {**QWEN, "head_dim": 10, "norm_topk_prob": True, "mlp_only_layers": [0]},
}
COEF = 0.37
LENGTHS = [19, 12]
IDS = torch.randint(0, 61, (2, 19), generator=torch.Generator().manual_seed(1))


def pair(family: str, folder: Path) -> tuple[Any, Decoder]:
    """Returns a model of transformers that adds its router loss, and ours from its folder, both in float64."""
    config = AutoConfig.for_model(
        family, **THEIRS[family], output_router_logits=True, router_aux_loss_coef=COEF
    )
    backends = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_config(config, **backends).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            gain = name.endswith("norm.weight")
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.3 + gain)
    model.save_pretrained(folder)
    ours = build_model(load_folder(folder), dtype=torch.float64)
    assert isinstance(ours, Decoder)
    return model.train(), ours


def batch_of(rows: list[int], side: str = "right") -> Batch:
    """Returns rows of IDS, padded to the longest; targets are the tokens that follow."""
    count = max(LENGTHS[row] for row in rows)
    ids = torch.zeros(len(rows), count, dtype=torch.int64)
    targets = torch.full_like(ids, IGNORE_INDEX)
    for i, row in enumerate(rows):
        length = LENGTHS[row]
        slots = slice(0, length) if side == "right" else slice(count - length, count)
        ids[i, slots] = IDS[row, :length]
        targets[i, slots][:-1] = IDS[row, 1:length]
    return Batch({"ids": ids, "tokens": Tokens.from_lengths([LENGTHS[r] for r in rows], side=side)}, targets)


def packed() -> Batch:
    """Returns both rows of IDS as documents of one row."""
    parts = [batch_of([row]) for row in range(2)]
    ids = torch.cat([part.inputs["ids"] for part in parts], 1)
    return Batch({"ids": ids, "tokens": Tokens.packed([LENGTHS])}, torch.cat([p.targets for p in parts], 1))


@pytest.mark.parametrize("family", THEIRS)
def test_loss_and_gradients_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Theirs of rows padded on the right; ours of rows padded on either side, or packed, are the same."""
    model, ours = pair(family, tmp_path)
    assert {experts.aux_loss_coef for experts in ours.spec.experts if experts is not None} == {COEF}
    padded = batch_of([0, 1])
    tokens = padded.inputs["tokens"]
    labels = torch.where(tokens.valid, padded.inputs["ids"], IGNORE_INDEX)
    output = model(padded.inputs["ids"], attention_mask=tokens.valid.long(), labels=labels)
    output.loss.backward()
    plain = model(
        padded.inputs["ids"], attention_mask=tokens.valid.long(), labels=labels, output_router_logits=False
    )
    their_gradients = {name: p.grad for name, p in model.named_parameters()}
    trained = dict(ours.named_parameters())
    for batch in (padded, batch_of([0, 1], "left"), packed()):
        before = {name: p.detach().clone() for name, p in trained.items()}
        stats, _ = sgd_step(Given([batch]), ours)
        assert stats.extra["router_aux_loss"] / stats.count == pytest.approx(
            output.aux_loss.item(), rel=FLOAT
        )
        assert stats.loss == pytest.approx(plain.loss.item(), rel=FLOAT)
        total = stats.loss + COEF * stats.extra["router_aux_loss"] / stats.count
        assert total == pytest.approx(output.loss.item(), rel=FLOAT)
        for name, p in trained.items():
            gradient = before[name] - p.detach()
            expected = theirs_of(name, their_gradients, ours.spec)
            assert (gradient - expected).abs().max() <= 10 * FLOAT * float(expected.abs().max()), name
            p.data.copy_(before[name])


def theirs_of(name: str, gradients: dict[str, Tensor], spec: ModelSpec) -> Tensor:
    """Returns their gradient of one of our parameters: they have all experts of a layer in one tensor."""
    if ".experts." not in name:
        return gradients[name]
    layer, _, suffix = name.partition(".experts.")
    number, part, _ = suffix.split(".")
    stacked = gradients[f"{layer}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][
        int(number)
    ]
    if part == "down_proj":
        return stacked
    units = len(stacked) // 2
    return stacked[:units] if part == "gate_proj" else stacked[units:]


def small(vocab: int = 61, **fields: Any) -> Decoder:
    experts = Experts(count=4, top=2, hidden=8, aux_loss_coef=0.5, z_loss_coef=0.2)
    sizes: dict[str, Any] = {
        "vocab": vocab,
        "width": 16,
        "layers": 2,
        "heads": 2,
        "hidden": 8,
        "init_std": 0.3,
    }
    spec = ModelSpec.of("qwen3_moe", **sizes, experts=replace(experts, **fields))
    model = build(spec, seed=0).double()
    assert isinstance(model, Decoder)
    return model


def test_micro_batches_have_losses_of_their_own_weighted_by_their_targets() -> None:
    """The losses of a step are those of one batch if its micro-batches have the same tokens."""
    first, second = batch_of([0]), batch_of([1])
    stats, _ = sgd_step(Given([first, second]), small())
    model, separate = small(), []
    for batch in (first, second):
        with routing_of(model) as routed:
            model(**batch.inputs, targets=batch.targets)
        separate.append(router_losses(routed).each)
    for name in separate[0]:
        assert stats.extra[name] / stats.count == pytest.approx(
            (18 * separate[0][name] + 11 * separate[1][name]) / 29
        )
    twice, gradient = sgd_step(Given([first, first]), small())
    once, expected = sgd_step(Given([doubled(first)]), small())
    assert twice.extra["router_aux_loss"] == pytest.approx(once.extra["router_aux_loss"], rel=1e-12)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-12)


def doubled(batch: Batch) -> Batch:
    ids, tokens = batch.inputs["ids"], batch.inputs["tokens"]
    return Batch({"ids": ids.repeat(2, 1), "tokens": tokens}, batch.targets.repeat(2, 1))


@pytest.mark.parametrize("redo", ["block", "feed_forward"])
def test_layers_that_are_computed_again_count_once(redo: Any) -> None:
    plain, again = small(), small()
    again.gradient_checkpointing = redo
    (first, expected), (second, actual) = (sgd_step(Given([packed()]), model) for model in (plain, again))
    assert first.extra == second.extra
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


def test_without_a_coefficient_nothing_is_added_or_kept() -> None:
    model = small(aux_loss_coef=0.0, z_loss_coef=0.0)
    stats, _ = sgd_step(Given([packed()]), model)
    assert set(stats.extra) <= {"hits"}
    assert all(m.gate.heard is None for m in model.modules() if isinstance(m, MixtureOfExperts))


def test_what_the_backward_needs_of_them_is_counted() -> None:
    """`cost` counts a softmax and scores for each token and layer."""
    plain, batch = small(aux_loss_coef=0.0, z_loss_coef=0.0), packed()
    model = small()
    with routing_of(model) as routed:
        model(**batch.inputs, targets=batch.targets)
    with saved_tensors() as saved:
        router_losses(routed)
    activations = [
        cost.activation_bytes(m.spec, 31, 1, torch.float64)["feed-forward"] for m in (plain, model)
    ]
    assert activations[1] - activations[0] == 2 * 2 * 31 * 4 * 8
    assert sum(size for size in storage_sizes(saved) if size > 1000) == activations[1] - activations[0]


def test_a_run_logs_them_and_its_folder_keeps_the_coefficient(settings: Make, tmp_path: Path) -> None:
    tokenizer = train_bpe(documents(0, 60), 300)
    model = small(z_loss_coef=0.0, vocab=tokenizer.vocab_size).float()
    save_folder(tmp_path / "base", model, tokenizer=tokenizer)
    unset = ("vocab", "depth", "width", "heads", "kv_heads", "hidden", "patterns")
    config = settings(**dict.fromkeys(unset), model=str(tmp_path / "base"), lr=0.01, steps=30)
    train(config, quiet=True)
    losses = [r["router_aux_loss"] for r in read_metrics(Path(config.out) / "metrics.jsonl") if "lr" in r]
    assert len(losses) == 30
    assert min(losses[-5:]) < losses[0]
    assert json.loads((Path(config.out) / "final" / "config.json").read_text())["router_aux_loss_coef"] == 0.5
