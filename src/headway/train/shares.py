"""What a run does where processes share heads and hidden units of its model: parts in training, wholes in folders."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import ConfigError
from headway.models.tensor_parallel import own_part, shard, shards_of
from headway.parallel import Parallel
from headway.train.callbacks import Callback
from headway.train.optimizer import Optimizer
from headway.train.tasks.base import Task


def share_layers(task: Task[Any], callbacks: Sequence[Callback], parallel: Parallel) -> None:
    """Where processes share heads and hidden units, leave the task's model those of this one.

    Raises ConfigError for callbacks, which need the whole model, and as `shard`."""
    if parallel.tensor is None:
        return
    if callbacks:
        raise ConfigError(
            f"mesh {parallel.mesh}: callbacks and sample prompts are given a whole model, which no process has; leave "
            "them out, or leave tp out"
        )
    shard(task.model, parallel.tensor)


@torch.no_grad()
def total_norm(gradients: Mapping[str, Tensor], model: nn.Module) -> Tensor:
    """The norm of all gradients, by torch; where processes share parameters the norm of the whole ones, in float64: the
    root of their summed squares."""
    shards = shards_of(model)
    if shards is None:
        return nn.utils.get_total_norm(gradients.values())
    squares = {True: torch.zeros((), dtype=torch.float64), False: torch.zeros((), dtype=torch.float64)}
    for name, gradient in gradients.items():
        squares[name in shards.axes] += gradient.double().square().sum()
    return (squares[False] + shards.tensor.exchange.sum(squares[True])).sqrt()


def whole_moments(optimizer: Optimizer, model: nn.Module, parallel: Parallel) -> dict[str, Tensor]:
    """The optimizer's state of whole parameters, on the main process, to which those that share them send parts."""
    tensors, shards = optimizer.state_tensors(), shards_of(model)
    if shards is None or parallel.rank >= parallel.mesh.tp:
        return tensors
    found = dict[str, Tensor]()
    with parallel.named():
        for key, own in tensors.items():
            whole = shards.whole(key.rpartition("/")[0], own)
            if parallel.is_main:
                found[key] = whole
    return found


@contextmanager
def whole_weights(model: nn.Module, parallel: Parallel) -> Iterator[None]:
    """While open, the main process's model has whole parameters, of which those that share them sent parts."""
    shards, own = shards_of(model), dict[nn.Parameter, Tensor]()
    if shards is not None and parallel.rank < parallel.mesh.tp:
        with parallel.named():
            for name, p in model.named_parameters():
                whole = shards.whole(name, p.data)
                if parallel.is_main:
                    own[p], p.data = p.data, whole
    try:
        yield
    finally:
        for p, part in own.items():
            p.data = part


def own_moments(tensors: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The inverse of `whole_moments`, on every process."""
    return {key: own_part(model, key.rpartition("/")[0], whole) for key, whole in tensors.items()}
