"""Multi-query attention with the fused projection, as LLM Foundry's class in the document has it."""

import torch
from torch import Tensor, nn

from headway.classic.masking import causal_mask, masked_softmax


class MultiQueryAttention(nn.Module):
    """n_heads query heads, one key head and one value head shared by all of them; weights load from LLM
    Foundry.

    d_model   width, a multiple of n_heads
    n_heads   query heads; head_dim = d_model // n_heads
    device    where the weights are made

    `Wqkv` (d_model -> d_model + 2 head_dim) makes queries, the key and the value at once, split as [d_model,
    head_dim, head_dim]; 768 wide with 8 heads it has 960 outputs. Both linear maps have a bias, as listed.
    Raises ValueError when n_heads does not divide d_model.
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
        """(out (b, s, d_model), attn_weights (b, n_heads, s, n + s) or None, past_key_value or None).

        x               (b, s, d_model)
        past_key_value  None: no cache, None comes back. () starts one; (key, value), each (b, n, head_dim),
                        goes on: both give back (key, value) of n + s tokens
        attn_bias       added to the scores, broadcast to (b, n_heads, s, n + s): ALiBi, or a mask of -inf
        is_causal       token i sees the cache and tokens 0 .. i (what LLM Foundry's class passes on; the
                        listing leaves it out)
        needs_weights   return the attention weights as well
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
            pairs = zip(reversed(attn_bias.shape), reversed(scores.shape), strict=False)
            fits = attn_bias.dim() <= 4 and all(n in (1, m) for n, m in pairs)
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
