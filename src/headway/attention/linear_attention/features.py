"""Feature maps, and queries and keys as the sums see them.

Legend: B rows, H query heads, K kv heads, T queries, S keys, D per head, F features, E per value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.tokens import Tokens

FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: F.elu(x).add_(1),
    "relu": torch.relu,
    "square": torch.square,
    "exp": torch.exp,
    "softmax": lambda x: torch.softmax(x, -1),
}
"""phi by name; every one is >= 0.

"elu+1"     elu(x) + 1 > 0 (Katharopoulos et al. 2020, equation 7)
"relu"      max(x, 0)
"square"    x^2
"exp"       e^x, which overflows float32 beyond x = 88
"softmax"   over the features of each query or key by itself (queries of Shen et al. 2018, section 3.3)
"""

COSINE = "cosine"
"""(1, x / |x|): the product of two is 1 + their cosine, in [0, 2]; a zero vector has cosine 0 with everything."""

TOKENS = "softmax over tokens"
"""Keys: each feature's softmax over all keys of the document (Shen et al. 2018, section 3.3; Su, "Does attention
need a softmax?", 2020). Later keys change earlier ones, so it is bidirectional. With "softmax" on the queries every
denominator is 1."""


class Rotation(Protocol):
    """Turns queries and keys [B, H, T, D] by the positions of their tokens (`RotaryTable`)."""

    def apply(self, x_BHTD: Tensor) -> Tensor: ...


Pair = tuple[Tensor, Tensor]


def marked(x: Tensor, feature: str, rotary: str, rotation: Rotation | None, tokens: Tokens) -> Pair:
    """Features of queries or keys [B, H, T, D] for (numerator, denominator), each [B, H, T, F]; the same tensor
    where both see the same."""
    if feature == COSINE:
        unit = F.normalize(x, dim=-1)
        unit = unit if rotation is None else rotation.apply(unit)
        both = torch.cat((torch.ones_like(unit[..., :1]), unit), -1)
        return both, both
    plain = over_tokens(x, tokens) if feature == TOKENS else FEATURES[feature](x)
    if rotation is None:
        return plain, plain
    turned = rotation.apply(plain)
    return turned, turned if rotary == "both" else plain


def over_tokens(k: Tensor, tokens: Tokens) -> Tensor:
    """e^k over its sum over the keys of the same document, feature by feature: [B, K, S, D]."""
    documents = torch.where(tokens.valid, tokens.documents, -1)
    found, number = documents.unique(return_inverse=True)
    at = number[:, None, :, None].expand(k.shape)
    shape = (*k.shape[:2], len(found), k.shape[3])
    known = tokens.valid[:, None, :, None]
    most = k.new_full(shape, -torch.inf).scatter_reduce(
        2, at, k.detach().masked_fill(~known, -torch.inf), "amax"
    )
    powers = torch.exp(k - most.nan_to_num(neginf=0.0).gather(2, at)) * known
    return powers / k.new_zeros(shape).scatter_add(2, at, powers).clamp_min(1).gather(2, at)
