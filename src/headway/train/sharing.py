"""Distributing the steps and evaluations of a run over its processes."""

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
    """A pool that distributes items over processes: each computes its own ones on `pool`, and all get all results."""

    def __init__(self, pool: MicrobatchPool, parallel: Parallel) -> None:
        super().__init__(pool.count)
        self.pool, self.parallel = pool, parallel

    def map(self, run: Callable[[T], R], items: Iterable[T]) -> Iterable[R]:
        return self.parallel.map(lambda part: self.pool.map(run, part), items)


def own_batch(batch: Any, model: nn.Module, parallel: Parallel) -> Any:
    """Returns the slots of a micro-batch that this process computes under context parallelism; else the whole batch.

    Raises ConfigError for a batch with inputs other than ids and tokens."""
    if parallel.exchange is None:
        return batch
    inputs = dict(batch.inputs)
    ids, tokens = inputs.pop("ids"), inputs.pop("tokens")
    if inputs:
        raise ConfigError(
            f"mesh {parallel.mesh}: rows with {', '.join(inputs)} cannot be sharded; leave cp out"
        )
    layout, _ = choose_layout(model.spec.patterns, tokens, parallel.mesh.cp)  # type: ignore[arg-type, union-attr]
    context = ContextParallel(tokens, layout, parallel.exchange)
    local = {"ids": context.take(ids), "tokens": context.tokens, "context": context}
    return Batch(local, context.take(batch.targets))


def spread(task: Task[Any], parallel: Parallel) -> None:
    """Prepares a task for several processes, which share the micro-batches of each step: checks it, and copies the
    weights of the main process to all others.

    Raises ConfigError if a step has fewer micro-batches than there are processes to share them, if cp is used for a
    task that is not `by_token`, for several `workers` unless dp is the only axis, and if processes have read different
    data."""
    ranks = parallel.mesh.batches
    if parallel.mesh.ranks == 1:
        return
    if parallel.mesh.cp > 1 and not task.by_token:
        raise ConfigError(
            f"mesh {parallel.mesh}: the loss of this task is not a sum over tokens, so its rows cannot be sharded; "
            "leave cp out"
        )
    if parallel.mesh.ranks > parallel.mesh.dp and task.workers > 1:
        raise ConfigError(
            f"mesh {parallel.mesh}: {task.workers} micro batches in parallel would mix up their messages; set "
            "workers=1"
        )
    task.spread(ranks)
    if (count := len(task.batches(0))) < ranks:
        raise ConfigError(
            f"{ranks} processes share the micro batches of a step, but a step has only {count}; use fewer processes, "
            "larger steps, or a smaller micro_batch"
        )
    read = parallel.gather(dict(task.data))
    if other := [rank for rank, data in enumerate(read) if data != read[0]]:
        raise ConfigError(
            f"the processes have read different data: rank 0 has {read[0]}, rank {other[0]} has {read[other[0]]}; "
            "give all of them the same files"
        )
    parallel.take_from_main(t.data for t in chain(task.model.parameters(), task.model.buffers()))


def divide(task: Task[Any], parallel: Parallel, dtype: torch.dtype) -> Divided[Any] | None:
    """Shards a task's model in place, so that this process keeps: its shard of all weights (axis fsdp), its heads and
    hidden units of each layer (axis tp), its experts (axis expert). Returns the means to gather the model; None if it
    is not sharded. Gathered weights are cast to `dtype`.

    Raises ConfigError for a frozen model in 4 bits, which cannot be sharded, and as `tensor_parallel.shard` and
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
            f"mesh {parallel.mesh}: a base model in 4 bits cannot be sharded; leave base out, or share the micro "
            "batches only (dp)"
        )
    blocks = [m for m in model.modules() if isinstance(m, Block)]
    across = [m.cross_attn for m in blocks if m.cross_attn is not None]
    early = [m for attn in across for m in (attn.k_proj, attn.v_proj, attn.k_norm) if m is not None]
    mesh = DeviceMesh.from_group(parallel.group("fsdp"), "cpu")
    shard_weights(model, [*early, *blocks], mesh, dtype)  # `early` runs before the blocks
    if parallel.tensor is not None:  # these are called by `local`, which FSDP must know as a forward
        for attn in across:
            for proj in (attn.k_proj, attn.v_proj):
                assert proj is not None
                register_fsdp_forward_method(proj, "local")


def added_up_by(task: Task[Any], parallel: Parallel) -> int:
    """Returns the number of processes whose partial sums add up to a step's gradient, on which its bits depend. It
    counts as 1 for at most two micro-batches of a fixed size: two numbers have one sum, whoever adds them."""
    ranks = parallel.mesh.ranks
    return 1 if task.micro_batch is not None and len(task.batches(0)) <= 2 else ranks


def add_gradients(model: nn.Module, parallel: Parallel) -> None:
    """Replaces `.grad` of every parameter by its sum over the processes; None if no process has a gradient for it."""
    if parallel.mesh.ranks == 1:
        return
    trained = [p for p in model.parameters() if p.requires_grad]
    present_anywhere = map(any, zip(*parallel.gather([p.grad is not None for p in trained]), strict=True))
    for p, present in zip(trained, present_anywhere, strict=True):
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
