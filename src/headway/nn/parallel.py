"""Linear layers that ranks share, in each format of weights, with adapters and dropout of a rank's part.

Legend: I numbers in, O numbers out, R rank of an adapter.
"""

from __future__ import annotations

from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from headway.nn.linear import Linear, part_of
from headway.nn.lora import LoraLinear, LowRank
from headway.nn.nf4 import Nf4Linear
from headway.parallel import TensorParallel


class ColumnParallelLinear(Linear):
    """x W^T (+ b) of this rank's outputs: of W and b it has the rows of its heads or hidden units.

    The gradient of x is summed over ranks; layers of one x do that once (`headway.nn.quantized.products`)."""

    def __init__(self, layer: Linear, tensor: TensorParallel) -> None:
        nn.Module.__init__(self)
        own = tensor.share(layer.out_features, "outputs")
        self.tensor, self.in_features, self.out_features = tensor, layer.in_features, len(own)
        self.take(layer, 0, own)
        self.bias = None if layer.bias is None else part_of(layer.bias, 0, own)

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] -> [..., O / ranks]."""
        return self.local(self.enter(x))

    def enter(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.tensor.enter(x)

    def local(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return super().forward(x)


class RowParallelLinear(Linear):
    """x W^T (+ b), with x [.., I / ranks] this rank's heads or hidden units, of which it has the columns of W: the sum
    over ranks, to which b is added once."""

    def __init__(self, layer: Linear, tensor: TensorParallel) -> None:
        nn.Module.__init__(self)
        own = tensor.share(layer.in_features, "inputs")
        self.tensor, self.in_features, self.out_features = tensor, len(own), layer.out_features
        self.take(layer, 1, own)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., I / ranks] -> [..., O]."""
        return self.leave(self.local(x))

    def local(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return self.product(x)

    def leave(self, y: Tensor) -> Tensor:
        """See `Linear`."""
        y = self.tensor.leave(y)
        return y if self.bias is None else y + self.bias

    @property
    def local_bias(self) -> None:
        """See `Linear`."""
        return


class ColumnParallelNf4(ColumnParallelLinear, Nf4Linear):
    """The same of weights in 4 bits."""


class RowParallelNf4(RowParallelLinear, Nf4Linear):
    """The same of weights in 4 bits."""


class RowParallelLowRank(LowRank):
    """What an adapter of a `RowParallelLinear` adds to this rank's part of the sum: of A [R, I] it has the columns of
    its inputs, and B and m as a whole. The gradients of these are sums over ranks."""

    def __init__(self, whole: LowRank, tensor: TensorParallel) -> None:
        own = tensor.share(whole.lora_A.shape[1], "inputs")
        super().__init__(whole.lora, part_of(whole.lora_A, 1, own), whole.lora_B, whole.lora_magnitude_vector)
        self.tensor = tensor

    def dropped(self, x: Tensor) -> Tensor:
        """See `LowRank`."""
        return part_dropout(x, self.lora.dropout, self.tensor)

    def over_inputs(self, squares: Tensor) -> Tensor:
        """See `LowRank`."""
        return self.tensor.exchange.sum(squares)

    def row_norms(self, w: Tensor) -> Tensor:
        """See `LowRank`."""
        return self.over_inputs(w.square().sum(1)).sqrt()


class PartDropout(nn.Dropout):
    """Dropout of this rank's part of the last axis, as one process draws it for all of them."""

    def __init__(self, p: float, tensor: TensorParallel) -> None:
        super().__init__(p)
        self.tensor = tensor

    def forward(self, x: Tensor) -> Tensor:
        """[..., F / ranks] -> the same."""
        return part_dropout(x, self.p, self.tensor) if self.training else x


def part_dropout(x: Tensor, p: float, tensor: TensorParallel) -> Tensor:
    """Dropout of x [..., F / ranks]: each rank draws for the whole [..., F], and has its part of that."""
    own = tensor.share(x.shape[-1] * tensor.exchange.ranks, "units")
    drawn = F.dropout(x.new_ones(*x.shape[:-1], x.shape[-1] * tensor.exchange.ranks), p)
    return x * drawn[..., own.start : own.stop]


def share_adapters(layer: LoraLinear) -> list[LowRank]:
    """Leave this rank's parts of the adapters of a layer whose base is shared by ranks, in place; the parts."""
    for name, whole in list(layer.adapters.items()):
        layer.adapters[name] = _part(cast(LowRank, whole), layer.base).train(whole.training)
    return [cast(LowRank, part) for part in layer.adapters.values()]


def _part(whole: LowRank, base: Linear) -> LowRank:
    if isinstance(base, RowParallelLinear):
        return RowParallelLowRank(whole, base.tensor)
    assert isinstance(base, ColumnParallelLinear)
    own = base.tensor.share(whole.lora_B.shape[0], "outputs")
    magnitude = whole.lora_magnitude_vector
    m = None if magnitude is None else part_of(magnitude, 0, own)
    return LowRank(whole.lora, whole.lora_A, part_of(whole.lora_B, 0, own), m)
