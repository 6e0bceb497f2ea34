"""Sharing the steps and evaluations of a run among its processes."""

from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method

from headway.data import Batch
from headway.errors import ConfigError
from headway.models import tensor_parallel
from headway.models.expert_parallel import shard_experts
from headway.nn import Block, linears
from headway.nn.weights import Plain
from headway.parallel import ContextParallel, Parallel, choose_layout
from headway.parallel.sharded import Divided, own_part, shard_weights
from headway.train.microbatch_pool import MicrobatchPool, R, T
from headway.train.tasks.base import Task


class SharedPool(MicrobatchPool):
    """A pool whose items are shared among processes: each computes its own on `pool`, and all have all results."""

    def __init__(self, pool: MicrobatchPool, parallel: Parallel) -> None:
        super().__init__(pool.count)
        self.pool, self.parallel = pool, parallel

    def map(self, run: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return self.parallel.map(lambda part: self.pool.map(run, part), items)


def own_batch(batch: Any, model: nn.Module, parallel: Parallel) -> Any:
    """The slots of a micro batch that this process has (`ContextParallel`): all of them without context parallel."""
    if parallel.exchange is None:
        return batch
    inputs = dict(batch.inputs)
    ids, tokens = inputs.pop("ids"), inputs.pop("tokens")
    if inputs:
        raise ConfigError(
            f"context parallel: rows cannot be sharded whose model is given {', '.join(inputs)}, too"
        )
    layout, _ = choose_layout(model.spec.patterns, tokens, parallel.mesh.cp)  # type: ignore[arg-type, union-attr]
    context = ContextParallel(tokens, layout, parallel.exchange)
    local = {"ids": context.take(ids), "tokens": context.tokens, "context": context}
    return Batch(local, context.take(batch.targets))


def spread(task: Task[Any], parallel: Parallel) -> None:
    """Share the micro batches of each step among processes, which begin with the weights of the main one.

    Raises ConfigError where there are too few of them, where tokens of rows should be sharded that cannot be, and where
    the processes have not read the same data."""
    ranks = parallel.mesh.batches
    if parallel.mesh.ranks == 1:
        return
    if parallel.mesh.cp > 1 and not task.by_token:
        raise ConfigError(
            f"mesh {parallel.mesh}: the loss of this task is not a sum over the tokens of its rows, so that these "
            "cannot be sharded; leave cp out"
        )
    if parallel.mesh.ranks > parallel.mesh.dp and task.workers > 1:
        raise ConfigError(
            f"mesh {parallel.mesh}: {task.workers} micro batches side by side would mix up their messages; set "
            "workers=1"
        )
    task.spread(ranks)
    if (count := len(task.batches(0))) < ranks:
        raise ConfigError(
            f"{ranks} processes were to share the micro batches of a step, and a step has {count}: use fewer "
            "processes, larger steps, or a smaller micro_batch"
        )
    read = parallel.gather(dict(task.data))
    if other := [rank for rank, data in enumerate(read) if data != read[0]]:
        raise ConfigError(
            f"the processes have not read the same data: rank 0 has {read[0]}, rank {other[0]} has {read[other[0]]}; "
            "give all of them the same files"
        )
    parallel.take_from_main(t.data for t in chain(task.model.parameters(), task.model.buffers()))


def divide(task: Task[Any], parallel: Parallel, dtype: torch.dtype) -> Divided[Any] | None:
    """Leave of a task's model this process's part of it: of all weights its part, on the axis fsdp; of layers its
    heads and hidden units, on the axis tp; of experts its own, on the axis expert. Returns None where it has all.
    Weights of `dtype` compute.

    Raises ConfigError for a frozen model in 4 bits, of which there are no parts, and as `tensor_parallel.shard` and
    `shard_experts`."""
    model: nn.Module = task.model
    if parallel.mesh.fsdp * parallel.mesh.expert * parallel.mesh.tp == 1:
        return None
    divided = Divided(model)
    if parallel.tensor is not None:
        tensor_parallel.shard(task.model, parallel.tensor)
    if parallel.experts is not None:
        shard_experts(task.model, parallel.experts)
    if parallel.mesh.fsdp > 1:
        _shard_units(model, parallel, dtype)
    return divided


def _shard_units(model: nn.Module, parallel: Parallel, dtype: torch.dtype) -> None:
    if any(not isinstance(layer.kept, Plain) for layer in linears(model).values()):
        raise ConfigError(
            f"mesh {parallel.mesh}: a base in 4 bits cannot be sharded, and each process would have all of it; leave "
            "base out, so that it is in bf16 and sharded, or share the micro batches alone (dp)"
        )
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    across = [m.cross_attn for m in blocks if m.cross_attn is not None]
    early = [m for attn in across for m in (attn.k_proj, attn.v_proj, attn.k_norm) if m is not None]
    mesh = DeviceMesh.from_group(parallel.group("fsdp"), "cpu")
    shard_weights(model, [*early, *blocks], mesh, dtype)  # keys of memory are made before the blocks run
    if parallel.tensor is not None:  # by `local`, since the memory enters once
        for attn in across:
            for proj in (attn.k_proj, attn.v_proj):
                assert proj is not None
                register_fsdp_forward_method(proj, "local")


def added_up_by(task: Task[Any], parallel: Parallel) -> int:
    """The number of processes whose sums a step's gradient is the sum of, so that its bits depend on it: 1 where they
    are those of one process, since two micro batches of the same rows have one sum."""
    ranks = parallel.mesh.ranks
    return 1 if task.micro_batch is not None and len(task.batches(0)) <= 2 else ranks


def add_gradients(model: nn.Module, parallel: Parallel) -> None:
    """Make `.grad` of every parameter its sum over the processes; None where no process has one."""
    if parallel.mesh.ranks == 1:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    some = map(any, zip(*parallel.gather([p.grad is not None for p in trained]), strict=True))
    for p, present in zip(trained, some, strict=True):
        if present and p.grad is None:
            p.grad = torch.zeros_like(p)
    grads = {name: own_part(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    shards = tensor_parallel.shards_of(model)
    owned = () if shards is None else shards.owned
    parallel.add_up((gradient for name, gradient in grads.items() if name in owned), "dp", "cp")
    parallel.add_up((gradient for name, gradient in grads.items() if name not in owned), "dp", "expert", "cp")
    if shards is not None:
        with parallel.named():
            shards.add_up(grads)
