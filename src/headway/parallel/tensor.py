"""Tensor parallelism: layers whose heads and hidden units are sharded across ranks.

Each rank computes its own heads and hidden units for all tokens, as if the layer had no others. The layer's output to
the residual stream is a sum over ranks, and so is the gradient of its input (Shoeybi et al. 2019, "Megatron-LM",
section 3).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from headway.errors import ConfigError
from headway.parallel.exchange import DistributedExchange, Exchange

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def share(count: int, what: str, ranks: int, rank: int, axis: str = "tp") -> range:
    """Returns the indices of a rank's heads, units or experts, out of `count`. Raises ConfigError if `ranks` does not
    divide it."""
    if count % ranks:
        kind = "tensor" if axis == "tp" else axis
        raise ConfigError(
            f"{kind} parallel: {count} {what} cannot be shared evenly by {ranks} processes; {axis} must divide {count}"
        )
    size = count // ranks
    return range(rank * size, (rank + 1) * size)


class TensorParallel:
    """The ranks that share layers.

        h = enter(x)               x, whose gradient is the sum of those of all ranks
        y = leave(own(h))          the sum of the outputs of all ranks, whose gradient each rank gets unchanged

    Both are linear, and each is the adjoint of the other. `x` is bitwise equal on all ranks, and so are `y` and
    `join(part)`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def enter(self, x: Tensor) -> Tensor:
        """Returns x; the backward sums the gradient over ranks."""
        y: Tensor = _Sum.apply(x, self.exchange, False)  # type: ignore[no-untyped-call]
        return y

    def leave(self, x: Tensor) -> Tensor:
        """Returns the sum of x over ranks; the backward passes the gradient unchanged."""
        y: Tensor = _Sum.apply(x, self.exchange, True)  # type: ignore[no-untyped-call]
        return y

    def join(self, x: Tensor) -> Tensor:
        """Joins the ranks' parts [..., N / ranks] to [..., N]; the backward gives each rank its part of the
        gradient."""
        y: Tensor = _Join.apply(x, self.exchange)  # type: ignore[no-untyped-call]
        return y

    def share(self, count: int, what: str) -> range:
        """Returns `share` for this rank."""
        return share(count, what, self.exchange.ranks, self.exchange.rank)

    def __deepcopy__(self, memo: object) -> "TensorParallel":
        return self  # replicas of a module talk to the same ranks


@dataclass(frozen=True, eq=False)
class Shards:
    """The parts of a model's parameters that each rank has.

    Attributes:
        tensor: the ranks.
        axes: the axis along which each sharded parameter is split, into equal parts in the order of ranks.
        summed: parameters that every rank has as a whole, but whose gradient on each rank covers its own heads alone,
            so that it must be summed over ranks. The gradients of all others are the same on all ranks.
        owned: parameters that this rank alone has, whole (experts); with the names of their counterparts on each rank,
            in the order of ranks.
    """

    tensor: TensorParallel
    axes: Mapping[str, int]
    summed: frozenset[str]
    owned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """Names of the parameters that only other ranks have."""
        return frozenset(name for names in self.owned.values() for name in names) - self.owned.keys()

    def is_part(self, name: str) -> bool:
        """Returns whether other ranks have another part of a parameter, or another parameter in its place."""
        return name in self.axes or name in self.owned

    @torch.no_grad()
    def with_others(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns these tensors and those of other ranks' own parameters, by names `PARAMETER` or `PARAMETER/what`.

        All ranks must call it."""
        result = dict(tensors)
        for name, local in tensors.items():
            parameter, slash, suffix = name.partition("/")
            names = self.owned.get(parameter, ())
            parts = self.tensor.exchange.gather(local) if names else []
            result |= {
                f"{counterpart}{slash}{suffix}": part for counterpart, part in zip(names, parts, strict=True)
            }
        return result

    def placed(self, name: str, local: Tensor) -> Tensor:
        """Returns a tensor of a parameter's shape (its moments, say) as a DTensor that holds this rank's part, without
        copying.

        Unchanged if all ranks have the whole parameter. The part may be split again along the axis fsdp."""
        from torch.distributed.tensor import DTensor, Shard

        if name not in self.axes or not local.dim():
            return local
        outer = Shard(self.axes[name])
        if not isinstance(local, DTensor):
            return DTensor.from_local(local, self._mesh, [outer], run_check=False)
        shape = [n * (self.tensor.exchange.ranks if d == outer.dim else 1) for d, n in enumerate(local.shape)]
        placed: Tensor = DTensor.from_local(
            local.to_local(),
            self._mesh_beside(local.device_mesh),
            [outer, *local.placements],
            run_check=False,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )
        return placed

    @cached_property
    def _mesh(self) -> "DeviceMesh":
        from torch.distributed.device_mesh import DeviceMesh

        assert isinstance(self.tensor.exchange, DistributedExchange)
        assert self.tensor.exchange.group is not None
        return DeviceMesh.from_group(self.tensor.exchange.group, "cpu")

    def _mesh_beside(self, inner: "DeviceMesh") -> "DeviceMesh":
        """Returns a mesh of two axes, tensor parallel first: ranks are numbered evenly along each (`Mesh`)."""
        from torch.distributed.device_mesh import DeviceMesh

        outer = self._mesh
        # fsdp=2,tp=2 on rank 1: outer [0, 1], inner [1, 3], ranks [[0, 2], [1, 3]]
        ranks = outer.mesh[:, None] + inner.mesh - dist.get_rank()
        return DeviceMesh.from_group(
            [outer.get_group(), inner.get_group()], "cpu", ranks, mesh_dim_names=("tp", "fsdp")
        )

    @torch.no_grad()
    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Sums the gradients of the parameters in `summed` over ranks, in place; all ranks must call it alike."""
        for name, gradient in gradients.items():
            if name in self.summed:
                gradient.copy_(self.tensor.exchange.sum(gradient))

    def __deepcopy__(self, memo: object) -> "Shards":
        return self


class _Sum(torch.autograd.Function):
    """The sum over ranks in the forward or the backward; the identity in the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange, forward: bool) -> Tensor:
        ctx.exchange, ctx.back = exchange, not forward
        return exchange.sum(x) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Sum.apply(grads[0], ctx.exchange, ctx.back), None, None  # type: ignore[no-untyped-call]


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.first, ctx.count = exchange.rank * x.shape[-1], x.shape[-1]
        return torch.cat(exchange.gather(x), -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].narrow(-1, ctx.first, ctx.count), None
