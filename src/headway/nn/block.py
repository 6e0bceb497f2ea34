"""One layer: attention and feed-forward, each with its residual and its norm."""

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from headway.cache import Cache
from headway.errors import ConfigError
from headway.nn.attention import Attention
from headway.positions import RotaryTable
from headway.tokens import Tokens

Order = Literal["pre", "post"]


class Block(nn.Module):
    """Attention and feed-forward around a residual stream, with the norm before or after.

        pre    x + attn(norm1(x)),  then  x + mlp(norm2(x))       (GPT-2, LLaMA)
        post   norm1(x + attn(x)),  then  norm2(x + mlp(x))       (Vaswani et al. 2017, section 3.1)

    Parameters are the same in both orders. They bear the names of Hugging Face's LLaMA: input_layernorm
    (norm1), self_attn, post_attention_layernorm (norm2), mlp.

    Args:
        self_attn, mlp: the two sub-layers.
        norm: makes one norm; called twice.
        order: "pre" or "post".
    """

    def __init__(
        self, self_attn: Attention, mlp: nn.Module, norm: Callable[[], nn.Module], order: Order = "pre"
    ) -> None:
        super().__init__()
        if order not in ("pre", "post"):
            raise ConfigError(f'Block: order is "pre" or "post" (where the norm stands), got {order!r}')
        self.order = order
        self.input_layernorm = norm()
        self.self_attn = self_attn
        self.post_attention_layernorm = norm()
        self.mlp = mlp

    def forward(
        self,
        x_BTM: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: Cache | None = None,
        rotation: RotaryTable | None = None,
    ) -> Tensor:
        """[B, T, M] -> [B, T, M]; the arguments are those of `Attention`."""
        pre = self.order == "pre"
        x = self.input_layernorm(x_BTM) if pre else x_BTM
        x = x_BTM + self.self_attn(x, tokens=tokens, cache=cache, rotation=rotation)
        if not pre:
            x = self.input_layernorm(x)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x) if pre else x)
        return y if pre else self.post_attention_layernorm(y)

    def extra_repr(self) -> str:
        return f"order={self.order!r}"
