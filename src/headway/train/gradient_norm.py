"""The norm that gradients are clipped by.

    |g| = sqrt(sum of g_i^2)            over all numbers of all parameters, in float64

Each row of a parameter's first axis is summed by itself, and all of these sums are added exactly (`math.fsum`: one
rounding), so that the bits depend neither on how parameters are sharded, nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from headway.parallel import Parallel
from headway.parallel.processes import ALONE

PIECE = 4096
"""Numbers of a row that are summed at once: fewer than torch shares among threads."""
SCRATCH = 1 << 17
"""Numbers in float64 that are squared at once: they stay in the cache, in memory that a norm asks for once."""


def gradient_norm(
    parts: Iterable[Tensor], parallel: Parallel = ALONE, wholes: Iterable[Tensor] = ()
) -> Tensor:
    """Of what this process has of the gradients, and the others of the axes fsdp and tp of the rest; `wholes` are those
    that all of the axis tp have alike."""
    own, mesh = (_squares(parts), _squares(wholes)), parallel.mesh
    found = parallel.gather(own) if mesh.fsdp * mesh.tp > 1 else [own]
    squares = [found[rank][0] for rank in mesh.groups("fsdp", "tp")[0]]
    squares += [found[rank][1] for rank in mesh.groups("fsdp")[0]]
    return torch.tensor(math.sqrt(math.fsum(torch.cat(squares).tolist())), dtype=torch.float64)


def _squares(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.float64), *map(row_squares, gradients)])


@torch.no_grad()
def row_squares(x: Tensor) -> Tensor:
    """The sum of squares of each row of the first axis, in float64, [rows]."""
    rows = x.flatten(1) if x.dim() > 1 else x.reshape(-1, 1)
    found = torch.zeros(rows.shape[0], dtype=torch.float64)
    scratch = torch.empty(min(SCRATCH, rows.numel()), dtype=torch.float64)
    for pieces in rows.split(PIECE, 1):
        at_once = max(1, SCRATCH // max(1, pieces.shape[1]))
        for sums, piece in zip(found.split(at_once), pieces.split(at_once), strict=True):
            squares = scratch[: piece.numel()].view(piece.shape).copy_(piece)
            sums += squares.square_().sum(1)
    return found
