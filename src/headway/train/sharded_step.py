"""Optimizer steps with several processes: Muon, where each matrix is orthogonalised by one process, its owner; and
torch's optimizers on shards of parameters, with the same bits as a step on whole parameters.

Legend: O rows of a matrix, I its columns.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from math import prod
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from headway.parallel import Parallel
from headway.parallel.sharded import own_part
from headway.parallel.tensor import share


class OwnedMuon(torch.optim.Muon):
    """`torch.optim.Muon` (Jordan et al. 2024), bit for bit, for matrices that are whole or sharded by rows, by columns,
    or both.

    Momentum is sharded like its matrix. The Nesterov update [O, I] is gathered at the matrix's owner in bfloat16 and
    orthogonalised there as a whole; its parts are scattered back, and every process updates its own part. Replicas
    (axes dp and cp) divide the matrices among them and broadcast the results. Bits do not depend on who owns a matrix.

    Args:
        matrices: the same in every process, in the same order.
        parallel: the processes.
        axes: for each matrix that is sharded by the axis tp, the axis that is split.
        options: options of `torch.optim.Muon`.
    """

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        parallel: Parallel,
        axes: Mapping[Tensor, int] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        super().__init__(matrices, **options)
        self.parallel, self.axes = parallel, axes

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Makes a step as `torch.optim.Muon` does. Collective: every process must call it. `closure` must be None."""
        assert closure is None
        (group,) = self.param_groups
        matrices = [p for p in group["params"] if p.grad is not None]
        parts = []
        for p in matrices:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
            gradient, momentum = own_part(p.grad), own_part(self.state[p]["momentum_buffer"])
            momentum.lerp_(gradient, 1 - group["momentum"])
            parts.append(gradient.lerp(momentum, group["momentum"]).bfloat16())
        orthogonal = self._orthogonal(
            matrices, parts, (group["ns_coefficients"], group["ns_steps"], group["eps"])
        )
        for p, part in zip(matrices, orthogonal, strict=True):
            own_part(p).mul_(1 - group["lr"] * group["weight_decay"])
            shape = self._shape(p)
            own_part(p).add_(part, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], torch.Size(shape)))

    def _orthogonal(
        self, matrices: Sequence[nn.Parameter], parts: Sequence[Tensor], how: tuple[Any, ...]
    ) -> list[Tensor]:
        """Returns this process's parts of the orthogonalised updates, given its parts of the updates; `how` are the
        arguments of torch's Newton-Schulz iteration."""
        parallel, mesh, place = self.parallel, self.parallel.mesh, self.parallel.place
        among = mesh.fsdp * mesh.tp  # number of processes that have parts of one matrix
        owners = owners_of([self._shape(p) for p in matrices], mesh.ranks)
        # with 2 replicas of 4 shards each, owner 6 is shard 6 % 4 = 2 of replica 6 // 4 = 1
        local = [i for i, owner in enumerate(owners) if owner // among == place.dp * mesh.cp + place.cp]
        results, wholes = [p.contiguous() for p in parts], dict[int, Tensor]()
        with parallel.named():
            for i in local:
                gathered = self._gathered(matrices[i], results[i], owners[i] % among)
                if gathered is not None:
                    wholes[i] = gathered
            wholes = {i: _zeropower_via_newtonschulz(x, *how) for i, x in wholes.items()}
            for i in local:
                results[i] = self._scattered(matrices[i], wholes.get(i), results[i], owners[i] % among)
            for i, owner in enumerate(owners if mesh.dp * mesh.cp > 1 else ()):
                bits, group = results[i].view(torch.uint8), parallel.group("dp", "cp")
                dist.broadcast(bits, group=group, group_src=owner // among)
        return results

    def _shape(self, p: nn.Parameter) -> tuple[int, ...]:
        """Returns the shape of the whole matrix, not split by tp."""
        axis = self.axes.get(p)
        return tuple(size * (self.parallel.mesh.tp if i == axis else 1) for i, size in enumerate(p.shape))

    def _boxes(self, p: nn.Parameter) -> list[tuple[slice, slice]]:
        """Returns the rows and columns of the whole matrix that each part covers, in the order of ranks of (fsdp, tp),
        the largest part first: the matrix is split by the axis tp, and each part by rows by the axis fsdp."""
        mesh, axis, boxes = self.parallel.mesh, self.axes.get(p), []
        for fsdp, tp in product(range(mesh.fsdp), range(mesh.tp)):
            sides = [range(n) for n in self._shape(p)]
            if axis is not None:
                sides[axis] = share(len(sides[axis]), "rows or columns", mesh.tp, tp)
            rows, columns = sides
            rows_each = -(-len(rows) // mesh.fsdp)
            rows = rows[fsdp * rows_each : (fsdp + 1) * rows_each]
            boxes.append((slice(rows.start, rows.stop), slice(columns.start, columns.stop)))
        return boxes

    def _is_whole(self, p: nn.Parameter) -> bool:
        """Returns whether every process has the whole of a matrix."""
        return self.parallel.mesh.fsdp == 1 and p not in self.axes

    def _gathered(self, p: nn.Parameter, part: Tensor, owner: int) -> Tensor | None:
        """Gathers the parts of a matrix at its owner; returns the whole matrix, or None in other processes. If all have
        the whole, returns it without communication."""
        if self._is_whole(p):
            return part
        place, boxes = self.parallel.place, self._boxes(p)
        padded = _padded(part, boxes)
        is_owner = place.fsdp * self.parallel.mesh.tp + place.tp == owner
        parts = [torch.empty_like(padded) for _ in boxes] if is_owner else None
        dist.gather(padded, parts, group=self.parallel.group("fsdp", "tp"), group_dst=owner)
        if parts is None:
            return None
        whole = part.new_empty(self._shape(p))
        for box, sent in zip(boxes, parts, strict=True):
            whole[box] = _unpadded(sent, whole[box])
        return whole

    def _scattered(self, p: nn.Parameter, whole: Tensor | None, part: Tensor, owner: int) -> Tensor:
        """Scatters the whole matrix from its owner; returns this process's part, in the shape of `part`."""
        if self._is_whole(p):
            assert whole is not None
            return whole.contiguous()
        boxes = self._boxes(p)
        parts = None if whole is None else [_padded(whole[box], boxes) for box in boxes]
        padded = _padded(part, boxes)
        dist.scatter(padded, parts, group=self.parallel.group("fsdp", "tp"), group_src=owner)
        return _unpadded(padded, part)


def _padded(part: Tensor, boxes: Sequence[tuple[slice, slice]]) -> Tensor:
    """Returns a copy of a part, padded to the size of the first (largest) box, as bytes."""
    rows, columns = boxes[0]
    numbers = (rows.stop - rows.start) * (columns.stop - columns.start)
    return torch.cat((part.flatten(), part.new_zeros(numbers - part.numel()))).view(torch.uint8)


def _unpadded(sent: Tensor, like: Tensor) -> Tensor:
    """Inverts `_padded`; returns bfloat16 in the shape of `like`."""
    return sent.view(torch.bfloat16)[: like.numel()].view(like.shape)


def owners_of(shapes: Sequence[Sequence[int]], count: int) -> list[int]:
    """Assigns each matrix to one of `count` processes or workers, with about equal work for each: the largest matrix
    first, to the one with the least work so far. Work is numel x the smaller side."""
    owners, load = [0] * len(shapes), [0] * count
    for i in sorted(range(len(shapes)), key=lambda i: -prod(shapes[i])):
        owners[i] = load.index(min(load))
        load[owners[i]] += prod(shapes[i]) * min(shapes[i])
    return owners


LANES = 16
"""Number of float32 values in the longest vector register, and in a cache line."""


class _Part:
    """A sharded parameter and its stand-in: a plain tensor in the memory of the local shard, or of the whole shape."""

    def __init__(self, p: DTensor) -> None:
        self.p, local = p, p.to_local()
        shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
        self.at = tuple(slice(first, first + size) for first, size in zip(offset, shape, strict=True))
        self.in_place = p.numel() % LANES == local.numel() % LANES == 0
        self.stand_in = nn.Parameter(self.plain(p))
        if p.grad is not None:
            assert isinstance(p.grad, DTensor)
            self.stand_in.grad = self.plain(p.grad)

    def plain(self, value: Tensor) -> Tensor:
        """Converts a tensor that is sharded like the parameter to the form of the stand-in; others are unchanged."""
        if not isinstance(value, DTensor):
            return value
        local = value.to_local().detach()
        if self.in_place:
            return local
        placed = local.new_zeros(self.p.shape)
        placed[self.at] = local
        return placed

    def sharded(self, value: Tensor) -> Tensor:
        """Inverts `plain`."""
        if value.shape != self.stand_in.shape:
            return value
        local = value if self.in_place else value[self.at].clone()
        p = self.p
        return DTensor.from_local(
            local, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
        )

    @torch.no_grad()
    def take_back(self) -> None:
        """Copies the values of the stand-in to the parameter, unless they share memory."""
        if not self.in_place:
            self.p.to_local().copy_(self.stand_in[self.at])


@contextmanager
def plain_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replaces the sharded parameters of an optimizer, their gradients and states by plain tensors while open.

    The last elements of a tensor, which do not fill a vector register, are computed by other instructions than the rest
    and may be rounded differently. So if the number of elements of a shard or of its parameter is no multiple of
    `LANES` (biases and the like), the shard is stepped at its place in a tensor of the whole shape."""
    parts: list[tuple[list[Any], int, _Part]] = []
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if not isinstance(p, DTensor):
                continue
            part = _Part(p)
            group["params"][i] = part.stand_in
            if p in optimizer.state:
                state = optimizer.state.pop(p)
                optimizer.state[part.stand_in] = {name: part.plain(value) for name, value in state.items()}
            parts.append((group["params"], i, part))
    yield
    for params, i, part in parts:
        params[i] = part.p
        part.take_back()
        if part.stand_in in optimizer.state:
            state = optimizer.state.pop(part.stand_in)
            optimizer.state[part.p] = {name: part.sharded(value) for name, value in state.items()}
