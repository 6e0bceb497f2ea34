"""The part of a layer that a rank has, where ranks share layers, and dropout of such a part."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.parallel import TensorParallel


@dataclass(frozen=True, eq=False)
class Share:
    """A rank's part of a linear layer x W^T + b, W [O, I].

    axis 0: rows of W and b, so the outputs of its heads, hidden units or ids. The gradient of x is summed over ranks;
            `joined` layers gather all outputs.
    axis 1: columns of W, for the inputs that the rank has. The outputs are summed over ranks, and b is added once.
    """

    tensor: TensorParallel
    axis: int
    joined: bool = False

    def part(self, size: int) -> range:
        """This rank's part of `size` outputs (axis 0) or inputs (axis 1). Raises ConfigError where ranks do not divide
        them."""
        return self.tensor.share(size, "inputs" if self.axis else "outputs")

    def enter(self, x: Tensor) -> Tensor:
        """The input of this rank's product."""
        return x if self.axis else self.tensor.enter(x)

    def leave(self, y: Tensor) -> Tensor:
        """The output of the layer, from this rank's product."""
        if self.axis:
            return self.tensor.leave(y)
        return self.tensor.join(y) if self.joined else y


def dropped(x: Tensor, p: float, share: Share | None) -> Tensor:
    """Dropout of the input of a layer. Where ranks share its columns, x is [..., F / ranks]: each rank draws the mask
    of the whole [..., F], and uses its part."""
    if share is None or not share.axis or p == 0:
        return F.dropout(x, p)
    units = x.shape[-1] * share.tensor.exchange.ranks
    part = share.part(units)
    drawn = F.dropout(x.new_ones(*x.shape[:-1], units), p)
    return x * drawn[..., part.start : part.stop]


def placed(ids: Tensor, local: range) -> tuple[Tensor, Tensor]:
    """Returns positions of ids in a rank's `local` range, 0 for others; and which ids are in it. 7, 4 in 6..9: 1, 0."""
    at = ids - local.start
    here = (at >= 0) & (at < len(local))
    return torch.where(here, at, 0), here


def part_of(whole: Tensor, axis: int, rows: range) -> nn.Parameter:
    """A parameter of its own with some rows, columns, .. of another."""
    part = whole.detach().narrow(axis, rows.start, len(rows)).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(part, requires_grad=whole.requires_grad)
