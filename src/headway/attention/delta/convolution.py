"""What a token takes from the few before it.

Legend: B rows, T slots, C channels, W tokens that are seen.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.errors import PatternError


def short_convolution(
    x: Tensor, weight: Tensor, *, begins: Tensor | None = None, past: Tensor | None = None
) -> Tensor:
    """y_t = sum over w < W of weight[:, W - 1 - w] x_(t - w), channel by channel, within the document of t: [B, T, C].

    Args:
        x: [B, T, C], slots in the order of their tokens;  weight: [C, W].
        begins: bool [B|1, T], where another document begins than that of the slot before; nowhere unless given.
        past: [B, W - 1, C], what stands before the first slot; zeros unless given.

    Raises PatternError for shapes that do not fit together. (Gu and Dao 2023, section 3.4; Yang et al. 2024.)
    """
    (batch, count, channels), before = x.shape, weight.shape[1] - 1
    if weight.shape[0] != channels or (past is not None and tuple(past.shape) != (batch, before, channels)):
        raise PatternError(
            f"short_convolution: x {[*x.shape]} needs a weight of [{channels}, W] and a past of [{batch}, W - 1, "
            f"{channels}]; got {[*weight.shape]}" + ("" if past is None else f" and {[*past.shape]}")
        )
    if not count:
        return x
    past = x.new_zeros(batch, before, channels) if past is None else past
    if begins is None:
        return _convolved(torch.cat((past, x), 1), weight)
    # each document behind W - 1 zeros of its own
    rank = begins.cumsum(1)
    place = (torch.arange(count, device=x.device) + before * (rank + 1)).expand(batch, -1).unsqueeze(-1)
    room = count + before * (int(rank.max()) + 1)
    spread = torch.cat((past, x.new_zeros(batch, room - before, channels)), 1)
    spread = spread.scatter(1, place.expand(-1, -1, channels), x)
    return _convolved(spread, weight).gather(1, (place - before).expand(-1, -1, channels))


def _convolved(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(x.mT, weight.unsqueeze(1), groups=weight.shape[0]).mT
