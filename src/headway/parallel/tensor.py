"""Layers whose heads and hidden units are shared by ranks: the sums on the way in and out, and who has which part.

Each rank computes its own heads and hidden units for all tokens, as if the layer had no others. The layer's
output to the residual stream is a sum over ranks, and so is the gradient of its input (Shoeybi et al. 2019,
"Megatron-LM", section 3).
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
    """A rank's heads, units or experts, out of `count`. Raises ConfigError where ranks do not divide them."""
    if count % ranks:
        name = "tensor" if axis == "tp" else axis
        raise ConfigError(
            f"{name} parallel: {count} {what} cannot be shared evenly by {ranks} processes; {axis} must divide {count}"
        )
    each = count // ranks
    return range(rank * each, (rank + 1) * each)


class TensorParallel:
    """The ranks that share layers.

        h = enter(x)               x, whose gradient is the sum of those of all ranks
        y = leave(own(h))          the sum of the outputs of all ranks, whose gradient is each one's

    Both are linear, and each is the other's adjoint. `x` is the same on all ranks, and so is `y`, bit for bit; so is
    `join(part)`.
    """

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange

    def enter(self, x: Tensor) -> Tensor:
        """x; in the backward the sum over ranks."""
        y: Tensor = _Sum.apply(x, self.exchange, False)  # type: ignore[no-untyped-call]
        return y

    def leave(self, x: Tensor) -> Tensor:
        """The sum of x over ranks; the gradient stays as it is."""
        y: Tensor = _Sum.apply(x, self.exchange, True)  # type: ignore[no-untyped-call]
        return y

    def join(self, x: Tensor) -> Tensor:
        """The ranks' parts [..., N / ranks] joined to [..., N]; in the backward each has its part."""
        y: Tensor = _Join.apply(x, self.exchange)  # type: ignore[no-untyped-call]
        return y

    def share(self, count: int, what: str) -> range:
        """`share` of this rank."""
        return share(count, what, self.exchange.ranks, self.exchange.rank)

    def __deepcopy__(self, memo: object) -> "TensorParallel":
        return self  # replicas of a module talk to the same ranks


@dataclass(frozen=True, eq=False)
class Shards:
    """The parts of a model's parameters that each rank has.

    Attributes:
        tensor: the ranks.
        axes: by parameter of which each rank has a part: the axis that is cut, into equal parts in the order of
            ranks.
        summed: parameters that ranks have as a whole, but whose gradient on each is of its own heads alone: it is to
            be summed over ranks. The gradient of all others is the same on all ranks.
        owned: parameters that this rank alone has, whole (experts); with the names of those in their place on
            each rank, in the order of ranks.
    """

    tensor: TensorParallel
    axes: Mapping[str, int]
    summed: frozenset[str]
    owned: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def elsewhere(self) -> frozenset[str]:
        """Parameters that other ranks alone have."""
        return frozenset(name for names in self.owned.values() for name in names) - self.owned.keys()

    def is_part(self, name: str) -> bool:
        """Whether other ranks have something else in the place of a parameter, or another part of it."""
        return name in self.axes or name in self.owned

    @torch.no_grad()
    def with_others(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These tensors, by parameters or `PARAMETER/what`, and those that other ranks alone have. All call it."""
        result = dict(tensors)
        for name, local in tensors.items():
            parameter, slash, what = name.partition("/")
            names = self.owned.get(parameter, ())
            parts = self.tensor.exchange.gather(local) if names else []
            result |= {f"{other}{slash}{what}": part for other, part in zip(names, parts, strict=True)}
        return result

    def placed(self, name: str, local: Tensor) -> Tensor:
        """A tensor of the shape of a parameter (its moments, say) as a DTensor, in the memory of this rank's part; as
        it is where ranks have all of it. Ranks are processes. A part may be cut again, by the axis fsdp."""
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
        """A mesh of two axes, this one first: ranks are numbered evenly along each (`Mesh`)."""
        from torch.distributed.device_mesh import DeviceMesh

        outer = self._mesh
        ranks = outer.mesh[:, None] + inner.mesh - dist.get_rank()
        return DeviceMesh.from_group(
            [outer.get_group(), inner.get_group()], "cpu", ranks, mesh_dim_names=("tp", "fsdp")
        )

    @torch.no_grad()
    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Make the gradients that are to be summed over ranks their sum, in place; all ranks call it alike."""
        for name, gradient in gradients.items():
            if name in self.summed:
                gradient.copy_(self.tensor.exchange.sum(gradient))

    def __deepcopy__(self, memo: object) -> "Shards":
        return self


class _Sum(torch.autograd.Function):
    """The sum over ranks, forward or backward; nothing in the other direction."""

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
