"""Which part of a state this process has, and which it writes: as torch.distributed.checkpoint plans it."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from headway.parallel.processes import Parallel
from headway.storage.shards import Part

if TYPE_CHECKING:
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.planner import SavePlan


def local_parts(tensors: Mapping[str, Tensor]) -> dict[str, Part]:
    """What is in this process: of a DTensor its box, which is not copied, and other tensors as they are."""
    planner = _planner(tensors)
    return _parts(planner, planner.create_local_plan())


def own_parts(tensors: Mapping[str, Tensor], parallel: Parallel) -> dict[str, Part]:
    """What this process writes of tensors that all of them have together: each box is written by one of those that have
    it, the one that writes least. A message among all."""
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
    found: dict[str, Part] = {}
    for item in plan.items:
        value, data = planner.resolve_data(item), item.tensor_data
        assert isinstance(value, Tensor), item
        assert data is not None, item
        assert item.index.fqn not in found, "a process has one box of a tensor"
        found[item.index.fqn] = Part(value.detach(), tuple(data.chunk.offsets), tuple(data.size))
    return found
