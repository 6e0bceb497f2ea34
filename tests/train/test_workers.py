"""Micro-batches side by side: the same bits whichever worker is done first, and threads as they were before."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.choice import Choice
from headway.data import Rows
from headway.errors import ConfigError
from headway.models import ModelSpec, build
from headway.nn.block import Checkpointing
from headway.train import TextConfig, train
from headway.train.evaluation import evaluate
from headway.train.inputs import Inputs
from headway.train.microbatch_pool import MasterWeights, MicrobatchPool, choose_workers
from headway.train.optimizer import Optimizer, parameter_groups, shares
from headway.train.texts import prepare
from tests.train.objectives import accumulated
from tests.train.test_resume import assert_same_bits
from tests.train.test_step import joined, model, ragged

Make = Callable[..., TextConfig]


def test_results_come_in_order_and_threads_are_given_back() -> None:
    before = torch.get_num_threads()
    with MicrobatchPool(3) as workers:
        assert torch.get_num_threads() == 1
        delays = [0.05, 0.0, 0.02]
        assert list(workers.map(lambda i: (time.sleep(delays[i]), i)[1], range(3))) == [0, 1, 2]
    assert torch.get_num_threads() == before
    with MicrobatchPool(1) as alone:
        assert torch.get_num_threads() == before
        assert list(alone.map(str, [1, 2])) == ["1", "2"]


def test_an_error_in_a_worker_is_raised() -> None:
    with MicrobatchPool(2) as workers, pytest.raises(ZeroDivisionError):
        list(workers.map(lambda i: 1 // i, [1, 0]))


@pytest.mark.parametrize("redo", ["none", "block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_side_by_side_is_one_after_the_other_bit_for_bit(dtype: torch.dtype, redo: Checkpointing) -> None:
    """Results and gradients of two and three workers are those of one."""
    rows = joined(ragged(10), 2)
    runs = []
    for count in (1, 2, 3):
        m = model()
        m.gradient_checkpointing = redo
        weights = MasterWeights(m, dtype, count)
        with MicrobatchPool(count) as workers:
            result = accumulated(weights, rows, workers)
        runs.append((result, [p.grad for p in m.parameters()]))
    for result, gradients in runs[1:]:
        assert result == runs[0][0]
        for a, b in zip(gradients, runs[0][1], strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


class Backwards(MicrobatchPool):
    """Computes the items in reverse order; results still come in the order of the items."""

    def map(self, run: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        return [run(item) for item in reversed(list(items))][::-1]


def test_the_order_of_computing_changes_no_bit() -> None:
    rows = joined(ragged(9), 3)
    a, b = MasterWeights(model(), torch.bfloat16), MasterWeights(model(), torch.bfloat16, 3)
    accumulated(a, rows)
    accumulated(b, rows, Backwards(3))
    for p, q in zip(a.master.parameters(), b.master.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_optimizer_is_shared_out_without_changing_a_bit(kind: str) -> None:
    def stepped(count: int) -> dict[str, torch.Tensor]:
        m = model()
        with MicrobatchPool(count) as workers:
            optimizer = Optimizer.of(
                parameter_groups(m), TextConfig.of({"data": "x", "optimizer": kind}), workers
            )
            for step in range(3):
                for i, p in enumerate(m.parameters()):
                    p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
                optimizer.step(0.5)
        return dict(m.named_parameters()) | optimizer.state_tensors()

    alone, together = stepped(1), stepped(3)
    assert alone.keys() == together.keys()
    assert all(torch.equal(alone[name], together[name]) for name in alone)


def test_shares_hold_every_matrix_once() -> None:
    matrices = list(parameter_groups(model()).matrices.values())
    parts = shares(matrices, 3)
    assert sorted(id(p) for part in parts for p in part) == sorted(map(id, matrices))
    assert shares(matrices[:1], 4) == [matrices[:1]]


def test_a_run_side_by_side_is_the_run(settings: Make, tmp_path: Path) -> None:
    alone = settings(optimizer="muon", out=str(tmp_path / "alone"), workers=1)
    together = settings(optimizer="muon", out=str(tmp_path / "together"), workers=2)
    train(alone, quiet=True)
    train(together, quiet=True)
    assert_same_bits(together.out, alone.out)


def test_another_number_of_workers_is_said_on_resume(
    settings: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    train(settings(steps=1, workers=1, micro_batch=None), quiet=True)
    train(settings(steps=1, workers=2, micro_batch=None), resume="auto")
    stderr = capsys.readouterr().err
    assert "workers: 1 then, 2 now" in stderr
    assert "micro_batch: 8 then, 4 now" in stderr


def test_evaluation_side_by_side(settings: Make, tmp_path: Path) -> None:
    tokenizer, file, _, _ = prepare(Inputs.of(settings()), None, in_template=True)
    spec = ModelSpec.of_depth(1, tokenizer.vocab_size, width=16, heads=2, kv_heads=1, head_dim=8)
    m = build(spec, seed=0)
    rows = Rows(file, 24)
    alone = evaluate(m, rows)
    with MicrobatchPool(3) as workers:
        together = evaluate(m, rows, pool=workers)
    assert together.tokens == alone.tokens
    assert together.nats == pytest.approx(alone.nats, rel=1e-6)


IN_TURN = "dropout draws its seeds in the order of the micro batches"
SIDE_BY_SIDE = "micro batches side by side, one CPU thread each"
ADAPTER = {"model": "m", "adapter": "lora", "adapter_dropout": 0.25}
FEW = {"batch_tokens": 24 * 3}


def workers(changes: dict[str, Any], gradient: int = 0, **spec: float) -> Choice:
    """Returns the number of workers chosen for 8 micro-batches on 4 threads."""
    defaults = {"data": "x", "threads": 4, "context": 24, "batch_tokens": 24 * 8, "micro_batch": 1}
    return choose_workers(TextConfig.of(defaults | changes), ModelSpec.of_depth(1, 9, **spec), gradient)


@pytest.mark.parametrize(
    ("how", "spec", "gradient", "count", "why"),
    [
        ({}, {}, 0, 4, SIDE_BY_SIDE),
        (FEW, {}, 0, 3, SIDE_BY_SIDE),
        ({"workers": 2}, {}, 0, 2, "asked for"),
        ({"workers": 9, **FEW}, {}, 0, 3, "asked for"),
        ({}, {"attention_dropout": 0.1}, 0, 1, IN_TURN),
        (ADAPTER, {}, 0, 1, IN_TURN),
        ({**ADAPTER, "workers": 1}, {}, 0, 1, IN_TURN),
        ({"mesh": "dp=2"}, {}, 0, 4, SIDE_BY_SIDE),
        ({"mesh": "fsdp=1"}, {}, 0, 4, SIDE_BY_SIDE),
        ({"mesh": "fsdp=2"}, {}, 0, 1, "sharded weights are gathered for one micro batch at a time"),
        ({"mesh": "dp=2, fsdp=3"}, {}, 0, 1, "sharded weights are gathered for one micro batch at a time"),
        ({"mesh": "fsdp=2", "workers": 2}, {}, 0, 2, "asked for"),
        ({}, {}, 1 << 28, 4, SIDE_BY_SIDE),
        ({}, {}, (1 << 28) + 1, 1, "the gradients of 4 workers would take 1.0 GiB"),
        ({"threads": 1}, {}, 1 << 31, 1, SIDE_BY_SIDE),
    ],
)
def test_how_many_workers_and_why(
    how: dict[str, Any], spec: dict[str, float], gradient: int, count: int, why: str
) -> None:
    choice = workers(how, gradient, **spec)
    assert (choice.what, choice.why) == (str(count), why)


@pytest.mark.parametrize(
    ("how", "spec", "what"),
    [
        *(({}, {kind: 0.1}, f"{kind.replace('_', ' ')} 0.1")
          for kind in ("dropout", "attention_dropout", "activation_dropout")),
        (ADAPTER, {}, "adapter dropout 0.25"),
    ],
)  # fmt: skip
def test_dropout_draws_in_turn(how: dict[str, Any], spec: dict[str, float], what: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^workers=2 with {what}: dropout draws its seeds.*leave workers out"
    ):
        workers({**how, "workers": 2}, **spec)
