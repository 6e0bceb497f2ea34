"""The memory that `headway plan` states for processes with shards of the weights, compared with their peak, which is
measured as in `tests/models/test_peak.py`."""

import os
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from headway.models import build
from headway.models.cost.processes import process_shares
from headway.parallel import Mesh, Parallel, joined
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.optimizer import Optimizer, parameter_groups
from headway.train.rows_config import TextConfig
from headway.train.sharing import divide
from headway.train.trainer import Trainer
from headway_lab.bench.subprocess_runner import SubprocessRunner, peak_of
from tests.models.test_peak import BF16, F32, LLAMA, RETURNS, Same, Shape


class Each(Same):
    """An objective with a micro-batch for each process."""

    def __init__(self, shape: Shape, count: int) -> None:
        super().__init__(shape)
        self.parts = self.parts * count


def training(shape: Shape, parallel: Parallel) -> Any:
    model: Any = build(shape.spec, seed=0)
    model.gradient_checkpointing = shape.redo
    divide(SimpleNamespace(model=model), parallel, shape.dtype)  # type: ignore[arg-type]
    dtype = F32 if parallel.mesh.fsdp > 1 else shape.dtype
    optimizer = Optimizer.of(parameter_groups(model), TextConfig(data="none"), MicrobatchPool(1))
    batches = Each(shape, parallel.mesh.batches)
    return Trainer(batches, model, optimizer, clip=1.0, dtype=dtype, parallel=parallel).step


def peak(shape: Shape, mesh: str) -> int:
    with joined(mesh) as parallel:
        peak_of(training, shape.toy, parallel)
        return peak_of(training, shape, parallel)


def peaks(shape: Shape, mesh: Mesh) -> list[int]:
    """Returns the measured peak of each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = {"WORLD_SIZE": str(mesh.ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        runners = []
        for rank in range(mesh.ranks):
            with patch.dict(os.environ, {**RETURNS, **group, "RANK": str(rank)}):
                runners.append(stack.enter_context(SubprocessRunner()))
        with ThreadPoolExecutor(mesh.ranks) as pool:
            return list(pool.map(lambda runner: runner.call(peak, shape, str(mesh)), runners))


SHAPES = {
    "fp32 by 2": (Shape(LLAMA, 512, 2), Mesh(fsdp=2)),
    "fp32 by 4": (Shape(LLAMA, 512, 2), Mesh(fsdp=4)),
    "bf16 by 2": (Shape(LLAMA, 512, 2, BF16), Mesh(fsdp=2)),
    "blocks again by 2": (Shape(LLAMA, 512, 2, redo="block"), Mesh(fsdp=2)),
    "fp32, layers and vocab by 2": (Shape(LLAMA, 512, 2), Mesh(tp=2)),
    "bf16, layers and vocab by 2": (Shape(LLAMA, 512, 2, BF16), Mesh(tp=2)),
    "shared layers by 2 x 2": (Shape(LLAMA, 512, 2), Mesh(fsdp=2, tp=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_row_45_the_peak_of_sharded_processes_is_what_is_said(name: str) -> None:
    shape, mesh = SHAPES[name]
    options: Any = {"gradient_checkpointing": shape.redo}
    shares = process_shares(
        shape.spec, mesh, shape.context, shape.batch * mesh.batches, shape.dtype, **options
    )
    for measured, share in zip(peaks(shape, mesh), shares, strict=True):
        stated = share.memory
        print(
            f"{name}: {measured / 2**20:.0f} MiB measured, {stated / 2**20:.0f} said ({stated / measured:.2f})"
        )
        assert abs(stated - measured) < 0.15 * measured
