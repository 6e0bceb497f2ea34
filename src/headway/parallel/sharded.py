"""Fully sharded data parallelism by torch's `fully_shard` (Zhao et al. 2023): each process has a part of every weight.

Every parameter is split along its first axis; of a layer that is sharded by tensor parallelism, each rank's own part
is. The parameters of a unit (a block, or all that are in none) are gathered when its forward begins and again for its
backward, and freed after each; gradients are reduced and scattered at once.
"""

import copy
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate

from headway.parallel.processes import Parallel
from headway.parallel.tensor import Shards
from headway.storage.lazy import lazy
from headway.storage.shards import Part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan

M = TypeVar("M", bound=nn.Module)


class Divided(Generic[M]):
    """A module with sharded parameters, and the means to gather it.

    Args:
        model: the whole module, before its parameters are sharded in place.
    """

    def __init__(self, model: M) -> None:
        self.model, self._form = model, _form(model)

    def whole(self, *, here: bool = True) -> M | None:
        """Returns a plain module with the gathered weights, or None unless it is wanted `here`; every process must call
        it."""
        state = whole(own_state(self.model), self.model, here=here)
        if not here:
            return None
        module = copy.deepcopy(self._form, {id(b): b for b in self._form.buffers()})
        module.load_state_dict(state, assign=True)
        return module


def shard_weights(
    model: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh, dtype: torch.dtype = torch.float32
) -> None:
    """Shards the parameters of `model` in place, so that each process keeps a part of every one.

    Args:
        model: with the same weights in every process of `mesh`.
        units: its modules that are gathered one at a time, inner ones before those that contain them.
        mesh: the processes that share the weights.
        dtype: of the gathered weights; gradients are summed in float32.

    Gradients are summed over the processes of `mesh`, never averaged.
    """
    narrow = dtype != torch.float32
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy if narrow else MixedPrecisionPolicy()}
    for unit in units:
        fully_shard(unit, **options)
    fully_shard(model, **options)
    # the per-target losses are views of their chunks, which nothing writes to
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor applied first


def _form(model: M) -> M:
    """Returns a copy of a module with the tensors of its state dict on the device meta; other buffers are shared."""
    state = model.state_dict(keep_vars=True)
    in_state = {id(value) for value in state.values()}
    memo = {id(b): torch.empty_like(b, device="meta") if id(b) in in_state else b for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """Returns the state dict of a module without copying; sharded parameters are DTensors, whether by FSDP or tensor
    parallelism."""
    shards: Shards | None = getattr(model, "shards", None)
    state = model.state_dict()
    return state if shards is None else {name: shards.placed(name, value) for name, value in state.items()}


def whole(tensors: Mapping[str, Tensor], model: nn.Module, *, here: bool = True) -> dict[str, Tensor]:
    """Returns the gathered tensors of a sharded model; empty unless they are wanted `here`. Every process must call
    it."""
    state, shards = {}, getattr(model, "shards", None)
    tensors = tensors if shards is None else shards.with_others(tensors)
    for name, value in tensors.items():
        full = _full(value) if isinstance(value, DTensor) else value
        if here:
            state[name] = full.detach()
    return state


@torch.no_grad()
def _full(value: DTensor) -> Tensor:
    """Returns the whole tensor, gathered along one mesh axis after another, the last first: torch warns if both are at
    once."""
    placements = [*value.placements]
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def own_part(value: Tensor) -> Tensor:
    """Returns the part of a tensor that this process holds; all of it if it is not sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def fill(target: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copies a named tensor, which every process has, into one that may be sharded."""
    if isinstance(target, DTensor):
        part = local_parts({name: target})[name]
        part.value.copy_(lazy(tensors).part(name, part.slices))
    else:
        lazy(tensors).copy_into(name, target)


# The parts of a state that this process holds, and those that it writes, as torch.distributed.checkpoint plans them.


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """Returns the parts that this process holds: the box of a DTensor, which is not copied; other tensors as they
    are."""
    planner = _planner(tensors)
    return _parts(planner, planner.create_local_plan())


def own_parts(tensors: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Part]:
    """Returns the parts of the processes' tensors that this process writes: each box is written by one of the processes
    that hold it, the one that writes least. All processes must call it."""
    planner = _planner(tensors)
    plans = parallel.gather(planner.create_local_plan())
    return _parts(planner, planner.create_global_plan(plans)[0][parallel.rank])


def _planner(tensors: Mapping[str, Tensor]) -> "DefaultSavePlanner":
    # imported here, since the import is slow and few runs need it
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    planner = DefaultSavePlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(tensors))
    return planner


def _parts(planner: "DefaultSavePlanner", plan: "SavePlan") -> dict[str, Part]:
    parts: dict[str, Part] = {}
    for item in plan.items:
        value, data = planner.resolve_data(item), item.tensor_data
        assert isinstance(value, Tensor), item
        assert data is not None, item
        assert item.index.fqn not in parts, "a process has one box of a tensor"
        parts[item.index.fqn] = Part(value.detach(), tuple(data.chunk.offsets), tuple(data.size))
    return parts
