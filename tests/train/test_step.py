"""One step: its gradient does not depend on how its rows are cut into micro-batches, packed or kept in memory."""

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headway.data import Batch, Rows
from headway.models import Decoder, ModelSpec, build
from headway.nn import IGNORE_INDEX
from headway.nn.block import Checkpointing
from headway.patterns import Causal, Sink, Window
from headway.tokens import Tokens
from headway.train import TrainingError
from headway.train.microbatch_pool import MasterWeights
from headway.train.trainer import Progress
from tests.datasets.test_tokenfile import token_file
from tests.train.objectives import Given, accumulated, sgd_step

VOCAB = 40


def model(seed: int = 0) -> Decoder:
    patterns = (Window.last(6), Causal() & (Window.last(4) | Sink(1)))
    spec = ModelSpec.of_depth(
        2, VOCAB, width=32, heads=4, kv_heads=2, head_dim=8, hidden=40, patterns=patterns, family="qwen3",
        init_std=0.3,
    )  # fmt: skip
    return build(spec, seed=seed)


def ragged(rows: int, length: int = 16) -> list[Batch]:
    """Returns rows of one document each, of very different lengths."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, length + 1, (rows,), generator=generator).tolist()
    ids = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    targets = ids[:, 1:].clone()
    for b, n in enumerate(lengths):
        targets[b, n:] = IGNORE_INDEX
    return [
        batch(ids[b : b + 1, :-1], targets[b : b + 1], Tokens.from_lengths([lengths[b]], total=length))
        for b in range(rows)
    ]


def batch(ids: Tensor, targets: Tensor, tokens: Tokens) -> Batch:
    return Batch({"ids": ids, "tokens": tokens}, targets)


def joined(batches: list[Batch], size: int) -> list[Batch]:
    micro_batches = []
    for i in range(0, len(batches), size):
        part = batches[i : i + size]
        lengths = [int(b.inputs["tokens"].valid.sum()) for b in part]
        micro_batches.append(
            batch(
                torch.cat([b.inputs["ids"] for b in part]),
                torch.cat([b.targets for b in part]),
                Tokens.from_lengths(lengths, total=part[0].targets.shape[1]),
            )
        )
    return micro_batches


def gradients(
    batches: list[Batch], dtype: torch.dtype = torch.float32, redo: Checkpointing = "none"
) -> dict[str, Tensor]:
    weights = MasterWeights(model(), dtype)
    weights.compute.gradient_checkpointing = redo
    accumulated(weights, batches)
    return {n: p.grad for n, p in weights.master.named_parameters() if p.grad is not None}


def test_accumulation_is_a_big_batch() -> None:
    rows = ragged(8)
    whole = gradients(joined(rows, 8))
    for size in (4, 1):
        cut = gradients(joined(rows, size))
        for name, grad in whole.items():
            assert (cut[name] - grad).abs().max() <= 1e-6 * max(1.0, float(grad.abs().max())), (size, name)


def test_accumulation_is_not_the_mean_of_micro_batch_means() -> None:
    """The test above would notice this mistake."""
    rows = ragged(8)
    whole = gradients(joined(rows, 8))
    means = [gradients([row]) for row in rows]
    wrong = {n: torch.stack([m[n] for m in means]).mean(0) for n in whole}
    assert max(float((wrong[n] - g).abs().max()) for n, g in whole.items()) > 1e-3


def test_bf16_gradients_are_added_up_in_fp32() -> None:
    rows = ragged(8)
    exact = gradients(joined(rows, 8))
    low = gradients(joined(rows, 1), torch.bfloat16)
    for name, grad in exact.items():
        assert low[name].dtype == torch.float32
        assert (low[name] - grad).norm() <= 0.1 * grad.norm(), name


def test_checkpointed_blocks_give_the_same_gradients() -> None:
    rows = joined(ragged(8), 4)
    kept, redone = gradients(rows), gradients(rows, redo="block")
    for name, grad in kept.items():
        torch.testing.assert_close(redone[name], grad, rtol=0, atol=1e-5 * float(grad.abs().max()) + 1e-9)


def test_a_window_without_a_trained_token_has_no_gradient() -> None:
    row = ragged(1)[0]
    empty = row._replace(targets=torch.full_like(row.targets, IGNORE_INDEX))
    weights = MasterWeights(model(), torch.float32)
    assert accumulated(weights, [empty] * 3) == (0.0, 0, {})
    assert all(p.grad is None for p in weights.master.parameters())


def test_a_micro_batch_without_a_trained_token_changes_nothing() -> None:
    rows = ragged(3)
    empty = rows[0]._replace(targets=torch.full_like(rows[0].targets, IGNORE_INDEX))
    for name, grad in gradients([rows[1], empty, rows[2]]).items():
        torch.testing.assert_close(grad, gradients([rows[1], rows[2]])[name])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_with_step_and_rows(tmp_path: Path, where: str) -> None:
    rows = Rows(token_file(tmp_path / "a.tokens", [list(range(30))], VOCAB), 8)
    m = model()
    weight = m.model.layers[0].mlp.down_proj.weight
    if where == "loss":
        with torch.no_grad():
            weight[0, 0] = float("inf")
    else:
        weight.register_hook(lambda grad: grad * float("nan"))
    with pytest.raises(TrainingError, match=re.escape(f"step 7: the {where} is not finite")) as caught:
        sgd_step(Given.of(rows, [[2], [0]]), m, clip=1.0, progress=Progress(step=6))
    assert f"rows 2, 0 of {tmp_path / 'a.tokens'}" in str(caught.value)
    if where == "gradient":
        assert "not finite: model.layers.0.mlp.down_proj.weight" in str(caught.value)


def test_clipping_bounds_the_norm_and_reports_it_before(tmp_path: Path) -> None:
    rows = Rows(token_file(tmp_path / "a.tokens", [list(range(30))], VOCAB), 8)
    for clip in (1e-2, float("inf")):
        stats, gradient = sgd_step(Given.of(rows, [[0, 1]]), model(), clip=clip)
        assert stats.grad_norm > 0.1
        assert float(gradient.norm()) == pytest.approx(min(clip, stats.grad_norm), rel=1e-4)
