"""Muon among processes: each matrix is orthogonalised by one of them, its owner.

Legend: O rows of a matrix, I its columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from headway.parallel import Parallel
from headway.parallel.sharded import own_part


class OwnedMuon(torch.optim.Muon):
    """`torch.optim.Muon`, bit for bit, of matrices that are whole or sharded by rows (Jordan et al. 2024).

    Momentum is kept as the matrices are. What it gives [O, I] is gathered at the owner in bfloat16, in which it is
    orthogonalised whole; its rows are sent back, and every process steps its own. Replicas share the matrices, and send
    each other what comes of them. Bits depend on the matrix alone, whoever owns it.

    Args:
        matrices: the same in every process, in the same order.
        parallel: the processes.
        options: those of `torch.optim.Muon`.
    """

    def __init__(self, matrices: Sequence[nn.Parameter], parallel: Parallel, **options: Any) -> None:
        super().__init__(matrices, **options)
        self.parallel = parallel

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """See `torch.optim.Muon`; every process steps at once. There is no closure."""
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
        made = self._orthogonal(matrices, parts, (group["ns_coefficients"], group["ns_steps"], group["eps"]))
        for p, part in zip(matrices, made, strict=True):
            own_part(p).mul_(1 - group["lr"] * group["weight_decay"])
            own_part(p).add_(part, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape))

    def _orthogonal(
        self, matrices: Sequence[nn.Parameter], parts: Sequence[Tensor], how: tuple[Any, ...]
    ) -> list[Tensor]:
        """This process's rows of the orthogonalised matrices, given those of the matrices."""
        parallel, mesh, place = self.parallel, self.parallel.mesh, self.parallel.place
        owners = _owners(matrices, mesh.dp * mesh.cp * mesh.fsdp)
        mine = [i for i, owner in enumerate(owners) if owner // mesh.fsdp == place.dp * mesh.cp + place.cp]
        found, whole = [p.contiguous() for p in parts], dict[int, Tensor]()
        with parallel.named():
            for i in mine:
                gathered = self._gathered(found[i], owners[i] % mesh.fsdp, len(matrices[i]))
                if gathered is not None:
                    whole[i] = gathered
            whole = {i: _zeropower_via_newtonschulz(x, *how) for i, x in whole.items()}
            for i in mine:
                found[i] = self._scattered(whole.get(i), found[i], owners[i] % mesh.fsdp, len(matrices[i]))
            for i, owner in enumerate(owners if mesh.dp * mesh.cp > 1 else ()):
                bits, group = found[i].view(torch.uint8), parallel.group("dp", "cp")
                dist.broadcast(bits, group=group, group_src=owner // mesh.fsdp)
        return found

    def _gathered(self, part: Tensor, owner: int, rows: int) -> Tensor | None:
        """The whole of a matrix, for its owner."""
        count, here = self.parallel.mesh.fsdp, self.parallel.place.fsdp == owner
        if count == 1:
            return part
        own = _padded(part, -(-rows // count))
        parts = [torch.empty_like(own) for _ in range(count)] if here else None
        dist.gather(own, parts, group=self.parallel.group("fsdp"), group_dst=owner)
        return None if parts is None else torch.cat(parts).view(torch.bfloat16)[:rows]

    def _scattered(self, whole: Tensor | None, part: Tensor, owner: int, rows: int) -> Tensor:
        """Of the whole of a matrix, which its owner has, the rows of `part`."""
        count = self.parallel.mesh.fsdp
        if count == 1:
            assert whole is not None
            return whole.contiguous()
        each = -(-rows // count)
        own = _padded(part, each)
        parts = None if whole is None else [*_padded(whole, count * each).split(each)]
        dist.scatter(own, parts, group=self.parallel.group("fsdp"), group_src=owner)
        return own.view(torch.bfloat16)[: len(part)]


def _padded(x: Tensor, rows: int) -> Tensor:
    """A copy with so many rows, as bytes."""
    return torch.cat((x, x.new_zeros(rows - len(x), x.shape[1]))).view(torch.uint8)


def _owners(matrices: Sequence[Tensor], count: int) -> list[int]:
    """Of `count` processes the one that has each matrix, about equal work each."""
    owners, load = [0] * len(matrices), [0] * count
    for i in sorted(range(len(matrices)), key=lambda i: -matrices[i].numel()):
        owners[i] = load.index(min(load))
        load[owners[i]] += matrices[i].numel() * min(matrices[i].shape)
    return owners
