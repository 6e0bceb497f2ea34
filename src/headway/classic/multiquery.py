"""Multi-query attention with a fused QKV projection, as in LLM Foundry's class that the document lists."""

import torch
from torch import Tensor, nn

from headway.classic.masking import causal_mask, masked_softmax


class MultiQueryAttention(nn.Module):
    """n_heads query heads that share one key head and one value head; loads weights from LLM Foundry.

    d_model   model width, a multiple of n_heads
    n_heads   number of query heads; head_dim = d_model // n_heads
    device    device of the weights

    `Wqkv` (d_model -> d_model + 2 head_dim) computes queries, the key and the value in one product, split as [d_model,
    head_dim, head_dim]; at width 768 with 8 heads it has 960 outputs. Both linear layers have a bias, as listed.
    Raises ValueError if n_heads does not divide d_model.
    """

    def __init__(self, d_model: int, n_heads: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        if n_heads < 1 or d_model % n_heads:
            raise ValueError(f"d_model = {d_model} must be a multiple of n_heads = {n_heads}")
        self.d_model, self.n_heads, self.head_dim = d_model, n_heads, d_model // n_heads
        self.Wqkv = nn.Linear(d_model, d_model + 2 * self.head_dim, device=device)
        self.out_proj = nn.Linear(d_model, d_model, device=device)
        setattr(self.out_proj, "_is_residual", True)  # noqa: B010  (LLM Foundry scales its initial values)

    def forward(
        self,
        x: Tensor,
        past_key_value: tuple[Tensor, Tensor] | tuple[()] | None = None,
        attn_bias: Tensor | None = None,
        is_causal: bool = True,
        needs_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, tuple[Tensor, Tensor] | None]:
        """Returns (out (b, s, d_model), attn_weights (b, n_heads, s, n + s) or None, past_key_value or None).

        x               (b, s, d_model)
        past_key_value  None: no cache, and None is returned. (): starts a cache; (key, value), each (b, n, head_dim):
                        continues it. Both return (key, value) of n + s tokens
        attn_bias       added to the scores, broadcast to (b, n_heads, s, n + s): ALiBi, or a mask of -inf
        is_causal       whether token i attends to the cache and tokens 0 .. i only (LLM Foundry's class passes this
                        on; the listing omits it)
        needs_weights   whether to return the attention weights as well

        Raises ValueError if x or attn_bias does not fit.
        """
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise ValueError(f"x must be (b, s, {self.d_model}), got {tuple(x.shape)}")
        b, s, _ = x.shape
        query, key, value = self.Wqkv(x).split([self.d_model, self.head_dim, self.head_dim], dim=2)
        if past_key_value:
            key = torch.cat((past_key_value[0], key), dim=1)
            value = torch.cat((past_key_value[1], value), dim=1)
        if past_key_value is not None:
            past_key_value = (key, value)
        keys = key.shape[1]

        q = query.unflatten(-1, (self.n_heads, self.head_dim)).transpose(1, 2)  # (b, heads, s, head_dim)
        scores = q @ key[:, None].transpose(2, 3) / self.head_dim**0.5
        if attn_bias is not None:
            sizes = zip(reversed(attn_bias.shape), reversed(scores.shape), strict=False)
            fits = attn_bias.dim() <= 4 and all(n in (1, m) for n, m in sizes)
            if not fits or attn_bias.dtype == torch.bool:
                raise ValueError(
                    f"attn_bias is added to scores {tuple(scores.shape)}: give floats that broadcast to it "
                    f"(-inf hides a key), got {attn_bias.dtype} {tuple(attn_bias.shape)}"
                )
            scores = scores + attn_bias
        if is_causal:
            scores = scores + causal_mask(keys, x.device)[:, :, keys - s :].to(scores.dtype)
        weights = masked_softmax(scores)
        out = self.out_proj((weights @ value[:, None]).transpose(1, 2).reshape(b, s, self.d_model))
        return out, weights if needs_weights else None, past_key_value
