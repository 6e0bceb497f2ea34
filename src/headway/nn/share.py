"""The part of a layer that a rank has if ranks share layers (tensor parallelism), and dropout of its inputs."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.parallel import TensorParallel


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of a linear layer x W^T + b, W [O, I].

    axis 0: rows of W and b, which compute the outputs of the rank's heads, hidden units or ids. The gradient of x is
            summed over ranks; `joined` layers gather all outputs.
    axis 1: columns of W, for the inputs that the rank has. The outputs are summed over ranks, and b is added once.
    """

    tensor: TensorParallel
    axis: int
    joined: bool = False

    def part(self, size: int) -> range:
        """Returns this rank's part of `size` outputs (axis 0) or inputs (axis 1). Raises ConfigError if the ranks
        cannot divide them."""
        return self.tensor.share(size, "inputs" if self.axis else "outputs")

    def enter(self, x: Tensor) -> Tensor:
        """Returns the input of this rank's product."""
        return x if self.axis else self.tensor.enter(x)

    def leave(self, y: Tensor) -> Tensor:
        """Returns the output of the layer, given this rank's product."""
        if self.axis:
            return self.tensor.leave(y)
        return self.tensor.join(y) if self.joined else y


def dropped(x: Tensor, p: float, share: Share | None) -> Tensor:
    """Applies dropout to the input of a layer. If ranks share its columns, x is [..., F / ranks]: each rank draws
    the mask of the whole [..., F] and uses its part, so that the result is that of one process."""
    if share is None or not share.axis or p == 0:
        return F.dropout(x, p)
    units = x.shape[-1] * share.tensor.exchange.ranks
    part = share.part(units)
    drawn = F.dropout(x.new_ones(*x.shape[:-1], units), p)
    return x * drawn[..., part.start : part.stop]


def placed(ids: Tensor, local: range) -> tuple[Tensor, Tensor]:
    """Returns the positions of ids in a rank's `local` range, 0 for ids outside of it, and which ids are in it.

    Ids 7, 4 in the range 6..9: positions 1, 0; True, False."""
    at = ids - local.start
    is_local = (at >= 0) & (at < len(local))
    return torch.where(is_local, at, 0), is_local


def part_of(whole: Tensor, axis: int, rows: range) -> nn.Parameter:
    """Returns a new parameter with some rows (axis 0), columns (axis 1), ... of another."""
    part = whole.detach().narrow(axis, rows.start, len(rows)).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)
