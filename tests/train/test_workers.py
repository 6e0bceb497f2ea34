"""Side by side: the same gradients, the same bits whoever is done first, and threads as they were."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.data import Rows
from headway.errors import ConfigError
from headway.models import ModelSpec, build, cost
from headway.nn.block import Checkpointing
from headway.train import TextConfig, train
from headway.train.evaluation import evaluate
from headway.train.inputs import Inputs
from headway.train.microbatch_pool import GRADIENT_BYTES, MasterWeights, MicrobatchPool, choose_workers
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
    """Also when the workers finish in the other order."""
    rows = joined(ragged(10), 2)
    found = []
    for count in (1, 2, 3):
        m = model()
        m.gradient_checkpointing = redo
        weights = MasterWeights(m, dtype, count)
        with MicrobatchPool(count) as workers:
            result = accumulated(weights, rows, workers)
        found.append((result, [p.grad for p in m.parameters()]))
    for result, gradients in found[1:]:
        assert result == found[0][0]
        for a, b in zip(gradients, found[0][1], strict=True):
            assert a is not None
            assert b is not None
            assert torch.equal(a, b)


class Backwards(MicrobatchPool):
    """Computes the items in the other order; results still come in theirs."""

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
    said = capsys.readouterr().err
    assert "workers: 1 then, 2 now" in said
    assert "micro_batch: 8 then, 4 now" in said


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


def test_how_many_workers_and_why() -> None:
    def chosen(
        asked: int | None = None, micro: int = 8, dropout: float = 0.0, hidden: int = 128
    ) -> tuple[str, str]:
        big = ModelSpec.of_depth(2, 100, hidden=hidden, attention_dropout=dropout)
        found = choose_workers(config(asked, micro), big, 4 * cost.parameter_count(big))
        return found.what, found.why

    def config(asked: int | None, micro: int) -> TextConfig:
        length = {"context": 24, "batch_tokens": 24 * micro, "micro_batch": 1}
        return TextConfig.of({"data": "x", "threads": 4, "workers": asked, **length})

    assert chosen()[0] == "4"
    assert chosen(micro=3)[0] == "3"
    assert chosen(asked=2) == ("2", "asked for")
    assert chosen(asked=9, micro=3)[0] == "3"
    assert chosen(dropout=0.1) == ("1", "dropout draws its seeds in the order of the micro batches")
    with pytest.raises(ConfigError, match=r"workers=2 with attention dropout 0.1: .*leave workers out"):
        chosen(2, dropout=0.1)
    for kind in ("dropout", "activation_dropout"):
        dropping = ModelSpec.of_depth(2, 100, **{kind: 0.1})
        with pytest.raises(ConfigError, match=f"workers=2 with {kind.replace('_', ' ')} 0.1"):
            choose_workers(config(2, 8), dropping, 0)
    assert chosen(hidden=10**6)[0] == "1"
    assert "gradients of 4 workers would take" in chosen(hidden=10**6)[1]


@pytest.mark.parametrize(
    ("mesh", "workers"),
    [("dp=2", 4), ("fsdp=1", 4), ("fsdp=2", 1), ("dp=2, fsdp=3", 1)],
)
def test_sharded_weights_are_gathered_for_one_micro_batch_at_a_time(mesh: str, workers: int) -> None:
    usual = {"data": "x", "threads": 4, "context": 24, "batch_tokens": 24 * 8, "micro_batch": 1, "mesh": mesh}
    choice = choose_workers(TextConfig.of(usual), ModelSpec.of_depth(1, 9), 0)
    assert choice.what == str(workers)
    assert choice.why.startswith("sharded weights" if workers == 1 else "micro batches side by side")
    asked = choose_workers(TextConfig.of(usual | {"workers": 2}), ModelSpec.of_depth(1, 9), 0)
    assert (asked.what, asked.why) == ("2", "asked for")


@pytest.mark.parametrize(
    ("threads", "gradient", "workers"),
    [(4, GRADIENT_BYTES // 4, "4"), (4, GRADIENT_BYTES // 4 + 1, "1"), (1, 2 * GRADIENT_BYTES, "1")],
)
def test_gradients_of_all_workers_take_a_gib_at_most(threads: int, gradient: int, workers: str) -> None:
    config = TextConfig.of(
        {"data": "x", "threads": threads, "context": 24, "batch_tokens": 24 * 8, "micro_batch": 1}
    )
    choice = choose_workers(config, ModelSpec.of_depth(1, 9), gradient)
    assert GRADIENT_BYTES == 1 << 30
    assert choice.what == workers
    assert ("would take" in choice.why) == (threads > 1 and workers == "1")


def test_dropout_of_adapters_draws_in_turn_too() -> None:
    given = {"data": "x", "threads": 4, "context": 24, "batch_tokens": 24 * 8, "micro_batch": 1}
    given |= {"model": "m", "adapter": "lora", "adapter_dropout": 0.25}
    spec = ModelSpec.of_depth(1, 9)
    assert choose_workers(TextConfig.of(given), spec, 0).what == "1"
    with pytest.raises(ConfigError, match=r"^workers=2 with adapter dropout 0\.25: its seeds are drawn"):
        choose_workers(TextConfig.of(given | {"workers": 2}), spec, 0)
    assert choose_workers(TextConfig.of(given | {"workers": 1}), spec, 0).what == "1"
