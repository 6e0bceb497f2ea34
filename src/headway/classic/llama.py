"""RMSNorm and rotary embedding as in the LLaMA code of `transformers` that the document lists."""

import torch
from torch import Tensor, nn


class LlamaRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (+ bias), computed in float32 and cast back: T5's layer norm.

    Dividing by the root of the mean square re-scales and does not re-centre. (The documents say that norms divide by
    the variance; it is its square root.)

    hidden_size         size of the last axis
    eps                 keeps the divisor away from 0
    bias                whether to add a learnable bias, which LLaMA does not have
    cast_before_weight  False: (weight * normed).to(dtype), as in the listed code; one rounding in half precision.
                        True: weight * normed.to(dtype), as in `transformers` 5; two roundings. No difference in
                        float32
    """

    def __init__(
        self, hidden_size: int, eps: float = 1e-6, bias: bool = False, cast_before_weight: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None
        self.variance_epsilon = eps
        self.cast_before_weight = cast_before_weight

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Returns the normalized states, in the shape (any whose last axis is hidden_size) and dtype of the input."""
        input_dtype = hidden_states.dtype
        wide = hidden_states if input_dtype == torch.float64 else hidden_states.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        if self.cast_before_weight:
            normed = normed.to(input_dtype)
        out = self.weight * normed
        if self.bias is not None:
            out = out + self.bias
        return out if self.cast_before_weight else out.to(input_dtype)


class LlamaRotaryEmbedding(nn.Module):
    """Tables cos and sin (1, 1, seq, dim) of m * theta_i, theta_i = base^(-2i/dim), each angle twice: [C C].

    dim                      width of one head
    max_position_embeddings  rows that are built in advance; a longer seq_len rebuilds the tables
    base, device             base of the angles theta_i, and device of the tables

    The listed code stores a rebuilt table in the dtype of the input that asked for it, and builds angles in the
    module's dtype, so that one half-precision call beyond the maximum, or `.half()`, spoils all later calls. Here the
    tables stay float32, whatever the module or its inputs are cast to, and only the returned slices are cast.
    """

    def __init__(
        self,
        dim: int,
        max_position_embeddings: int = 2048,
        base: float = 10000,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if dim < 2 or dim % 2:
            raise ValueError(
                f"rotary embedding turns coordinates in pairs: dim must be even and at least 2, got {dim}"
            )
        self.dim, self.base = dim, base
        self._build(max_position_embeddings, torch.device(device or "cpu"))

    def _build(self, seq_len: int, device: torch.device) -> None:
        self.max_seq_len_cached = seq_len
        self.inv_freq = 1.0 / (self.base ** (torch.arange(0, self.dim, 2, device=device).float() / self.dim))
        freqs = torch.outer(torch.arange(seq_len, device=device).float(), self.inv_freq)
        emb = torch.cat((freqs, freqs), dim=-1)
        self.cos_cached, self.sin_cached = emb.cos()[None, None], emb.sin()[None, None]

    def forward(self, x: Tensor, seq_len: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin, (1, 1, seq_len, dim) each, in the dtype of x (b, heads, s, head_dim)."""
        if seq_len > self.max_seq_len_cached or self.cos_cached.device != x.device:
            self._build(max(seq_len, self.max_seq_len_cached), x.device)
        return self.cos_cached[:, :, :seq_len].to(x.dtype), self.sin_cached[:, :, :seq_len].to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    """Returns (-x2, x1) for the two halves (x1, x2) of the last axis."""
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def apply_rotary_pos_emb(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns q and k (b, heads, s, head_dim), rotated by rows `position_ids` (b, s) of cos and sin (1, 1, seq,
    head_dim).

    q * cos + rotate_half(q) * sin: coordinate i is paired with i + head_dim/2. In the printed formula C has width d/2
    and [Y1 Y2] width d; C must be repeated there, [C C], as in the tables. Raises ValueError if a position is outside
    the tables.
    """
    if position_ids.numel() and not 0 <= int(position_ids.min()) <= int(position_ids.max()) < cos.shape[2]:
        raise ValueError(
            f"position_ids {int(position_ids.min())}..{int(position_ids.max())} lie outside tables of "
            f"{cos.shape[2]} rows; call LlamaRotaryEmbedding with seq_len = largest position + 1"
        )
    cos = cos.squeeze(1).squeeze(0)[position_ids].unsqueeze(1)  # (b, 1, s, head_dim)
    sin = sin.squeeze(1).squeeze(0)[position_ids].unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
