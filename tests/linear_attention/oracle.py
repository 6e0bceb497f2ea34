"""Linear attention by its definition: loops over pairs of tokens in float64, with rotation matrices."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from headway.positions import Rotary, RotaryTable
from headway.tokens import Tokens
from headway_lab.explain.rotary_forms import rotation_matrix

FEATURES: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": lambda x: torch.where(x > 0, x + 1, torch.exp(x)),
    "relu": lambda x: x * (x > 0),
    "square": lambda x: x * x,
    "exp": lambda x: math.e**x,
    "softmax": lambda x: torch.exp(x) / torch.exp(x).sum(),
}


def weights(
    q: Tensor,
    k: Tensor,
    feature: str,
    rotary: str,
    sees: Tensor,
    positions: Tensor,
    key_feature: str | None = None,
) -> Tensor:
    """Returns weights [B, H, T, S], pair by pair. `positions` [B, N] hold for both sides; `rotary` may be "none"."""
    b, h, t, d = q.shape
    group = h // k.shape[1]
    out = torch.zeros(b, h, t, k.shape[2], dtype=torch.float64)
    turn = {int(p): rotation_matrix(int(p), d) for p in positions.unique()} if rotary != "none" else {}
    for row in range(b):
        for head in range(h):
            for i in range(t):
                den = 0.0
                for j in sees[row % len(sees), i].nonzero()[:, 0].tolist():
                    x, y = q[row, head, i].double(), k[row, head // group, j].double()
                    if feature == "cosine":
                        x, y = x / x.norm(), y / y.norm()
                    else:
                        x, y = FEATURES[feature](x), FEATURES[key_feature or feature](y)
                    r = x, y
                    if rotary != "none":
                        r = turn[int(positions[row, i])] @ x, turn[int(positions[row, j])] @ y
                    extra = 1.0 if feature == "cosine" else 0.0
                    out[row, head, i, j] = extra + float(r[0] @ r[1])
                    den += extra + float(x @ y if rotary == "numerator" else r[0] @ r[1])
                out[row, head, i] /= den or 1.0
    return out


def table(positions: Tensor, dims: int, dtype: torch.dtype = torch.float64) -> RotaryTable:
    """Returns the rotation table that rotates like the matrices of `rotation_matrix`."""
    return Rotary(pairing="adjacent").rotation(positions, dims, dtype=dtype)


def sees(tokens: Tokens, causal: bool) -> Tensor:
    """Returns which keys each query sees, bool [B|1, N, N], from the definition of tokens."""
    both = tokens.valid[:, :, None] & tokens.valid[:, None, :]
    both = both & (tokens.documents[:, :, None] == tokens.documents[:, None, :])
    return both & (tokens.index[:, :, None] >= tokens.index[:, None, :]) if causal else both


def tensors(
    seed: int, tokens: int, *, batch: int = 2, heads: int = 4, kv_heads: int = 2, d: int = 6, e: int = 5
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns q, k and v in float64, requiring gradients."""
    noise = torch.Generator().manual_seed(seed)
    shapes = ((heads, d), (kv_heads, d), (kv_heads, e))
    q, k, v = (
        torch.randn(batch, h, tokens, w, dtype=torch.float64, generator=noise).requires_grad_()
        for h, w in shapes
    )
    return q, k, v
