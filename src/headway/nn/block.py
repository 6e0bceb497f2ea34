"""One layer: attention and feed-forward, each with its residual and its norm."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.attention import KeyValues
from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError, check_known
from headway.nn.attention import AttentionLayer
from headway.nn.norms import normed_sum
from headway.nn.record import Record
from headway.parallel import ContextParallel
from headway.positions import Rotation
from headway.scores import Score
from headway.tokens import SlotSelection, Tokens

Order = Literal["pre", "post", "parallel", "joint"]
ORDERS: tuple[str, ...] = get_args(Order)
Checkpointing = Literal["none", "block", "attention", "feed_forward"]
"""What is computed again in the backward, from its input, instead of kept: nothing, whole blocks, or in each block one
of its parts."""
CHECKPOINTING: tuple[str, ...] = get_args(Checkpointing)


class Block(nn.Module):
    """Attention and feed-forward around a residual stream.

        pre        x + attn(norm1(x)),  then  x + mlp(norm2(x))       (GPT-2, LLaMA)
        post       norm1(x + attn(x)),  then  norm2(x + mlp(x))       (Vaswani et al. 2017, section 3.1)
        parallel   x + attn(norm1(x)) + mlp(norm2(x))                 (Falcon 40B)
        joint      x + attn(norm1(x)) + mlp(norm1(x)), no norm2       (GPT-J, Falcon 7B)

    With `cross_attn`, x + cross(norm3(x), memory) or norm3(x + cross(x, memory)) stands between the two, as in
    section 3.2.3 of Vaswani et al. Parameters are the same in "pre" and "post". They bear the names of Hugging
    Face's LLaMA: input_layernorm (norm1), self_attn, cross_attn, cross_attention_layernorm (norm3),
    post_attention_layernorm (norm2), mlp.

    Args:
        self_attn, mlp: the two sub-layers; without an mlp (None; order "pre" or "post") there is no norm2 either.
        norm: makes one norm; called once for each.
        order: one of the above.
        cross_attn: attention to an encoder's states.
        dropout: probability for the output of the feed-forward, in training mode; attention has its own.
    """

    def __init__(
        self,
        self_attn: AttentionLayer,
        mlp: nn.Module | None,
        norm: Callable[[], nn.Module],
        order: Order = "pre",
        *,
        cross_attn: AttentionLayer | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_known(order, ORDERS, "Block: there is no order of norms")
        if cross_attn is not None and order not in ("pre", "post"):
            raise ConfigError(f'Block: cross-attention stands in order "pre" or "post", got {order!r}')
        if mlp is None and order not in ("pre", "post"):
            raise ConfigError(
                f'Block: order {order!r} has a feed-forward beside attention; without one, use "pre"'
            )
        self.order = order
        self.input_layernorm = norm()
        self.self_attn = self_attn
        self.cross_attention_layernorm = norm() if cross_attn is not None else None
        self.cross_attn = cross_attn
        self.post_attention_layernorm = norm() if order != "joint" and mlp is not None else None
        self.mlp = mlp
        self.dropout = dropout

    def forward(
        self,
        x_BTM: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: LayerCache | None = None,
        rotation: Rotation | None = None,
        score: Sequence[Score] = (),
        memory: KeyValues | None = None,
        checkpointing: Checkpointing = "none",
        context: ContextParallel | None = None,
        selected: SlotSelection | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """[B, T, M] -> [B, T, M], or [B, N, M] of N selected slots.

        `memory` is `cross_attn.keys(...)`, the others are those of `AttentionLayer`. `checkpointing` is looked at for
        parts: all of a block is checkpointed by who calls it."""
        if (memory is None) != (self.cross_attn is None):
            what = "no memory" if memory is None else "memory, but has no cross_attn"
            raise ConfigError(f"Block: cross-attention and memory come together; this block is given {what}")

        if context is not None:
            tokens = context.own(tokens, cache, memory)
        attend, feed = (partial(_part, checkpointing == part) for part in ("attention", "feed_forward"))
        given: dict[str, Any] = {"tokens": tokens, "cache": cache, "rotation": rotation, "score": score}
        given |= {"context": context, "selected": selected, "record": record}
        pre, first, last = self.order == "pre", self.input_layernorm, self.post_attention_layernorm
        if self.order in ("parallel", "joint"):
            normed = first(x_BTM)
            attended = attend(self.self_attn, normed, **given)
            if selected is not None:
                x_BTM, normed = selected.take(x_BTM), selected.take(normed)
            return x_BTM + attended + feed(self._feed_forward, normed if last is None else last(x_BTM))
        x = first(x_BTM) if pre else x_BTM
        y = attend(self.self_attn, x, **given)
        if selected is not None:
            x_BTM, tokens = selected.take(x_BTM), selected.tokens
        if self.cross_attn is not None:
            across = self.cross_attention_layernorm
            assert across is not None
            x, x_BTM = self._join(x_BTM, y, across if pre else first)
            y = attend(self.cross_attn, x, tokens=tokens, memory=memory, record=record)
            first = across
        if last is None:
            return x_BTM + y if pre else normed_sum(first, x_BTM, y)[0]
        x, x_BTM = self._join(x_BTM, y, last if pre else first)
        y = feed(self._feed_forward, x)
        return x_BTM + y if pre else normed_sum(last, x_BTM, y)[0]

    def _join(self, x: Tensor, y: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
        """What the next sub-layer is given, and the residual stream, after y is added to x: norm(x + y) and x + y in
        order "pre", norm(x + y) twice in order "post"."""
        normed, total = normed_sum(norm, x, y)
        return (normed, total) if self.order == "pre" else (normed, normed)

    def _feed_forward(self, x: Tensor) -> Tensor:
        assert self.mlp is not None
        y: Tensor = self.mlp(x)
        return nn.functional.dropout(y, self.dropout) if self.training else y

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def _part(redo: bool, module: Callable[..., Tensor], x: Tensor, **given: Any) -> Tensor:
    """module(x, **given); with `redo` x alone is kept for the backward, which computes the rest again."""
    y: Tensor = checkpoint(module, x, use_reentrant=False, **given) if redo else module(x, **given)
    return y
