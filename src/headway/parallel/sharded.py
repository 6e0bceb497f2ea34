"""Weights of which each process has a part: fully sharded data parallel by torch's `fully_shard` (Zhao et al. 2023).

Every parameter is cut along its first axis; of a layer that is shared by tensor parallel, each rank's own part is. The
parameters of a unit (a block, or all that lie in none) are gathered when its forward begins and again for its backward,
and dropped behind each; gradients are added up and cut at once.
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
    """A module of whose parameters this process keeps a part, and the means to make it whole.

    Args:
        model: as a whole, before it is cut in place.
    """

    def __init__(self, model: M) -> None:
        self.model, self._form = model, _form(model)

    def whole(self, *, here: bool = True) -> M | None:
        """A plain module with the weights of all parts; every process must call it. None where it is not wanted
        `here`."""
        state = whole(own_state(self.model), self.model, here=here)
        if not here:
            return None
        plain = copy.deepcopy(self._form, {id(b): b for b in self._form.buffers()})
        plain.load_state_dict(state, assign=True)
        return plain


def shard_weights(
    model: nn.Module, units: Iterable[nn.Module], mesh: DeviceMesh, dtype: torch.dtype = torch.float32
) -> None:
    """Leave of every parameter of `model` this process's part, in place.

    Args:
        model: with the same weights in every process of `mesh`.
        units: modules of it that are gathered one at a time, those within others before them.
        mesh: the processes that have a part of every weight each.
        dtype: of the weights that are gathered, where it is not float32; gradients are added up in float32.

    Gradients are summed over the processes of `mesh`, never averaged.
    """
    narrow = dtype != torch.float32
    policy = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
    how: dict[str, Any] = {"mesh": mesh, "mp_policy": policy if narrow else MixedPrecisionPolicy()}
    for unit in units:
        fully_shard(unit, **how)
    fully_shard(model, **how)
    # losses of each target are a view of their chunks, and nobody writes into them
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    for unit in model.modules():
        if isinstance(unit, FSDPModule):
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no product before the sum


def _form(model: M) -> M:
    """A copy of a module without the memory of its state dict; other buffers are the same."""
    state = model.state_dict(keep_vars=True)
    in_state = {id(value) for value in state.values()}
    memo = {id(b): torch.empty_like(b, device="meta") if id(b) in in_state else b for b in model.buffers()}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    return copy.deepcopy(model, memo)


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of a module, in its memory; a part of a parameter is a DTensor, however it was cut."""
    shards: Shards | None = getattr(model, "shards", None)
    state = model.state_dict()
    return state if shards is None else {name: shards.placed(name, value) for name, value in state.items()}


def whole(tensors: Mapping[str, Tensor], model: nn.Module, *, here: bool = True) -> dict[str, Tensor]:
    """The tensors of all parts of a model; every process must call it. None of them where they are not wanted
    `here`."""
    state, shards = {}, getattr(model, "shards", None)
    tensors = tensors if shards is None else shards.with_others(tensors)
    for name, value in tensors.items():
        full = _full(value) if isinstance(value, DTensor) else value
        if here:
            state[name] = full.detach()
    return state


@torch.no_grad()
def _full(value: DTensor) -> Tensor:
    """The whole tensor, gathered along one axis after the other, the last first: torch warns of both at once."""
    placements = [*value.placements]
    for axis in reversed(range(len(placements))):
        placements[axis] = Replicate()
        value = value.redistribute(placements=placements)
    return value.to_local()


def own_part(value: Tensor) -> Tensor:
    """The memory of a tensor that this process has; all of it where it is not sharded."""
    return value.to_local() if isinstance(value, DTensor) else value


@torch.no_grad()
def fill(target: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    """Copy a named tensor, which every process has, into one that may be sharded."""
    if isinstance(target, DTensor):
        part = local_parts({name: target})[name]
        part.value.copy_(lazy(tensors).part(name, part.slices))
    else:
        lazy(tensors).copy_into(name, target)


# The part of a state that this process has, and the one that it writes: as torch.distributed.checkpoint plans it.


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """The tensors of this process: of a DTensor its box, which is not copied, and others as they are."""
    planner = _planner(tensors)
    return _parts(planner, planner.create_local_plan())


def own_parts(tensors: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Part]:
    """The parts that this process writes of tensors that all have together: each box is written by one of those that
    have it, the one that writes least. A message among all."""
    planner = _planner(tensors)
    plans = parallel.gather(planner.create_local_plan())
    return _parts(planner, planner.create_global_plan(plans)[0][parallel.rank])


def _planner(tensors: Mapping[str, Tensor]) -> "DefaultSavePlanner":
    # takes a while, which few runs need
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
