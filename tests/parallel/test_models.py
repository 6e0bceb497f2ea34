"""A model whose rows are sharded over ranks has the loss and every gradient of one process."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from headway.errors import ConfigError
from headway.models import Decoder, ModelSpec, build
from headway.nn import Attention, GlobalAttention, LinearAttention
from headway.parallel import ContextParallel, DistributedExchange, Exchange, ShardLayout
from headway.patterns import Causal
from headway.tokens import Tokens
from tests.parallel import steps
from tests.parallel.simulation import simulate
from tests.parallel.steps import SUM


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", steps.PATTERNS)
def test_row_45_loss_and_every_gradient_are_those_of_one_process(name: str, ranks: int) -> None:
    """With packed documents, grouped heads and rotary positions; a contiguous shard of four has no trained token."""
    model = steps.model_of(name)
    results = simulate(ranks, lambda exchange: steps.step(model, name, exchange))
    sums = [torch.stack(same).sum(0) for same in zip(*results, strict=True)]
    torch.testing.assert_close(sums, steps.step(model, name), **SUM)


@pytest.mark.parametrize("name", steps.PATTERNS)
def test_row_45_ranks_of_a_zigzag_have_the_loss_and_every_gradient_of_one_process(name: str) -> None:
    """Each rank has two runs of slots; for these short rows the contiguous layout would be chosen."""
    model, layout = steps.model_of(name), ShardLayout.zigzag(steps.COUNT, 2)
    results = simulate(2, lambda exchange: steps.step(model, name, exchange, layout))
    sums = [torch.stack(same).sum(0) for same in zip(*results, strict=True)]
    torch.testing.assert_close(sums, steps.step(model, name), **SUM)


def test_rotations_that_depend_on_lengths_and_blocks_that_are_computed_again() -> None:
    model = steps.model_of("sink", ntk=True)
    expected = steps.step(model, "sink")
    assert isinstance(model, Decoder)
    model.train().gradient_checkpointing = "block"
    results = simulate(2, lambda exchange: steps.step(model, "sink", exchange))
    sums = [torch.stack(same).sum(0) for same in zip(*results, strict=True)]
    torch.testing.assert_close(sums, expected, **SUM)


def test_what_cannot_be_sharded_is_refused_by_name() -> None:
    def rank(exchange: Exchange) -> None:
        context = ContextParallel(Tokens.range(8), ShardLayout.contiguous(8, 2), exchange)
        x = torch.randn(1, 4, 16)
        for layer, words in (
            (LinearAttention(16, 2), "LinearAttention"),
            (GlobalAttention(16, 2), "global queries"),
        ):
            with pytest.raises(ConfigError, match=words):
                layer(x, context=context)
        with pytest.raises(ConfigError, match=r"context= .* cannot be combined with cache= or memory="):
            Attention(16, 2)(x, context=context, memory=x)
        with pytest.raises(ConfigError, match="drop tokens="):
            Attention(16, 2)(x, context=context, tokens=Tokens.range(4))
        short = build(ModelSpec.of_depth(1, 9, patterns=Causal(), max_context=7), seed=0)
        with pytest.raises(ConfigError, match="a row of 8 tokens is longer"):
            short(torch.zeros(1, 4, dtype=torch.int64), context=context)

    simulate(2, rank)


def process(rank: int, ranks: int, folder: str, names: list[str]) -> None:
    """Runs one rank of a gloo group: sums losses and gradients by all_reduce and compares with one process."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        for name in names:
            model = steps.model_of(name)
            sums = steps.step(model, name, DistributedExchange())
            for t in sums:
                dist.all_reduce(t)
            torch.testing.assert_close(sums, steps.step(model, name), **SUM)
    finally:
        dist.destroy_process_group()


def spawn(ranks: int, folder: Path, names: list[str]) -> None:
    processes.start_processes(process, (ranks, str(folder), names), ranks, start_method="spawn")  # type: ignore[no-untyped-call]


@pytest.mark.skipif(sys.platform == "win32", reason="gloo over file:// is for POSIX")
def test_two_processes_over_gloo(tmp_path: Path) -> None:
    spawn(2, tmp_path, ["full", "window"])


@pytest.mark.slow
def test_four_processes_over_gloo(tmp_path: Path) -> None:
    spawn(4, tmp_path, list(steps.PATTERNS))
