"""One block: attention, or another token mixer, and a feed-forward, each with its residual connection and its norm."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.attention import KeyValues
from headway.cache.paged_cache import LayerCache
from headway.errors import ConfigError, check_known
from headway.nn.altup import AlternatingUpdates, LaurelProduct
from headway.nn.attention_layer import AttentionLayer
from headway.nn.experts import MixtureOfExperts
from headway.nn.mixers import MixingLayer, SharedKeys
from headway.nn.norms import normed_sum
from headway.nn.per_layer import PerLayerInput
from headway.nn.record import Record
from headway.nn.scale import scaled
from headway.parallel import ContextParallel
from headway.positions import Rotation
from headway.scores import Score
from headway.tokens import SlotSelection, Tokens

Order = Literal["pre", "post", "parallel", "joint", "sandwich", "output"]
ORDERS: tuple[str, ...] = get_args(Order)
BESIDE = ("parallel", "joint")
"""Orders in which attention and feed-forward run in parallel."""
CROSSED = ("pre", "post")
"""Orders that support cross-attention, between the two."""
NORMS: Mapping[Order, tuple[tuple[str, ...], tuple[str, ...]]] = {
    **dict.fromkeys(("pre", "post", "parallel"), (("input",), ("post_attention",))),
    "joint": (("input",), ()),
    "sandwich": (("input", "post_attention"), ("pre_feedforward", "post_feedforward")),
    "output": (("post_attention",), ("post_feedforward",)),
}
"""The norms of attention and of the feed-forward in each order, by their names in `Block` without "_layernorm"."""
Checkpointing = Literal["none", "block", "attention", "feed_forward"]
"""What the backward recomputes instead of keeping its activations: nothing, whole blocks, or one of the two parts of
each block."""
CHECKPOINTING: tuple[str, ...] = get_args(Checkpointing)


class Block(nn.Module):
    """Attention and feed-forward around a residual stream.

        pre        x + attn(norm1(x)),  then  x + mlp(norm2(x))       (GPT-2, LLaMA)
        post       norm1(x + attn(x)),  then  norm2(x + mlp(x))       (Vaswani et al. 2017, section 3.1)
        parallel   x + attn(norm1(x)) + mlp(norm2(x))                 (Falcon 40B)
        joint      x + attn(norm1(x)) + mlp(norm1(x)), no norm2       (GPT-J, Falcon 7B)
        sandwich   x + norm2(attn(norm1(x))),  then  x + norm4(mlp(norm3(x)))       (Gemma 2)
        output     x + norm2(attn(x)),  then  x + norm4(mlp(x))       (OLMo 2, section 3.2)

    and after that, if configured, x + per_layer(x, p), and the result times `layer_scalar` (Gemma 4). With `laurel` the
    residual stream after attention is that of `LaurelProduct.join`; with `altup` x is the first of several streams,
    which are concatenated, and the output of `per_layer` is added to the others (Gemma 3n).

    With `cross_attn`, x + cross(norm(x), memory) or norm(x + cross(x, memory)) is computed between the two, as in
    section 3.2.3 of Vaswani et al. Parameters are the same in "pre" and "post". They have the names of Hugging
    Face's LLaMA and Gemma 2: input_layernorm (norm1), self_attn, cross_attn, cross_attention_layernorm,
    post_attention_layernorm (norm2), pre_feedforward_layernorm (norm3), mlp, post_feedforward_layernorm (norm4).

    Args:
        self_attn, mlp: the two sub-layers, of which the first mixes tokens. Without an mlp (None, not in orders
            "parallel" and "joint") its norms are absent, too.
        norm: makes one norm; called once for each.
        order: one of the above.
        cross_attn: attention to an encoder's states, in order "pre" or "post".
        dropout: probability for the output of the feed-forward, in training mode; attention has its own.
        residual_scale: factor on the sub-layers' outputs before they are added to x.
        first_norm: False omits norm1.
        per_layer: adds a token's embedding for this layer.
        layer_scalar: whether the output of the block is multiplied by a number: 1, or that of a checkpoint. It gets no
            gradient.
        laurel: a low-rank branch beside attention, in orders "pre" and "sandwich".
        altup: how the streams are predicted and corrected.
    """

    layer_scalar: Tensor | None

    def __init__(
        self,
        self_attn: MixingLayer,
        mlp: nn.Module | None,
        norm: Callable[[], nn.Module],
        order: Order = "pre",
        *,
        cross_attn: AttentionLayer | None = None,
        dropout: float = 0.0,
        residual_scale: float = 1.0,
        first_norm: bool = True,
        per_layer: PerLayerInput | None = None,
        layer_scalar: bool = False,
        laurel: LaurelProduct | None = None,
        altup: AlternatingUpdates | None = None,
    ) -> None:
        super().__init__()
        check_known(order, ORDERS, "Block: there is no order of norms")
        if cross_attn is not None and order not in CROSSED:
            raise ConfigError(f'Block: cross-attention needs order "pre" or "post", got {order!r}')
        if mlp is None and order in BESIDE:
            raise ConfigError(f'Block: order {order!r} needs a feed-forward (mlp=); without one, use "pre"')
        if not first_norm and order not in ("pre", "sandwich"):
            raise ConfigError(f'Block: first_norm=False needs order "pre" or "sandwich", got {order!r}')
        if laurel is not None and order not in ("pre", "sandwich"):
            raise ConfigError(f'Block: laurel needs order "pre" or "sandwich", got {order!r}')
        if altup is not None and layer_scalar:
            raise ConfigError("Block: altup and layer_scalar exclude each other; leave one of them out")
        of_attention, of_mlp = NORMS[order]
        names = {*of_attention[not first_norm :], *(() if mlp is None else of_mlp)}

        def named(name: str) -> nn.Module | None:
            return norm() if name in names else None

        self.order, self.residual_scale = order, residual_scale
        self.input_layernorm = named("input")
        self.self_attn = self_attn
        self.cross_attention_layernorm = norm() if cross_attn is not None else None
        self.cross_attn = cross_attn
        self.post_attention_layernorm = named("post_attention")
        self.pre_feedforward_layernorm = named("pre_feedforward")
        self.mlp = mlp
        self.post_feedforward_layernorm = named("post_feedforward")
        self.dropout, self.per_layer = dropout, per_layer
        self.laurel, self.altup = laurel, altup
        self.register_buffer("layer_scalar", torch.ones(1) if layer_scalar else None)

    @property
    def before(self) -> nn.Module | None:
        """The norm before the feed-forward, or in order "post" after it; None if absent."""
        return self.pre_feedforward_layernorm if self._norms_outputs else self.post_attention_layernorm

    @property
    def behind(self) -> tuple[nn.Module | None, nn.Module | None]:
        """The norms on the outputs of attention and of the feed-forward; None if absent."""
        if not self._norms_outputs:
            return None, None
        return self.post_attention_layernorm, self.post_feedforward_layernorm

    @property
    def _norms_outputs(self) -> bool:
        return self.order in ("sandwich", "output")

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
        shared: SharedKeys | None = None,
        per_layer: Tensor | None = None,
    ) -> Tensor:
        """Computes the block: [B, T, M] -> [B, T, M], or [B, N, M] for N selected slots; S M in place of M with S
        streams.

        `memory` is `cross_attn.keys(...)`, `per_layer` the input of `PerLayerInput`, [B, T, P]; the other arguments
        are those of `AttentionLayer`. Of `checkpointing` only the parts are handled here: whole blocks are
        checkpointed by the caller."""
        if (memory is None) != (self.cross_attn is None):
            what = (
                "cross_attn needs memory="
                if memory is None
                else "memory is given, but there is no cross_attn"
            )
            raise ConfigError(f"Block: {what}")
        if (per_layer is None) != (self.per_layer is None):
            what = (
                "needs per-layer embeddings"
                if per_layer is None
                else "is given, but this block has no per_layer"
            )
            raise ConfigError(f"Block: per_layer {what}")
        if context is not None:
            tokens = context.own(tokens, cache, memory)
        attend, feed = (partial(_part, checkpointing == part) for part in ("attention", "feed_forward"))
        options: dict[str, Any] = {"tokens": tokens, "cache": cache, "rotation": rotation, "score": score}
        options |= {"context": context, "selected": selected, "record": record}
        options |= {} if shared is None else {"shared": shared}  # only attention layers have this argument
        streams = (
            None if self.altup is None else self.altup.predict(x_BTM.unflatten(-1, (-1, self.altup.width)))
        )
        x_BTM = x_BTM if streams is None else streams[..., 0, :]
        y = self._sublayers(x_BTM, tokens, memory, options, attend, feed)
        add: Callable[[Tensor], Tensor] | None = None
        if self.per_layer is not None and per_layer is not None:
            add = partial(self.per_layer, p_BTP=per_layer if selected is None else selected.take(per_layer))
        if self.altup is not None and streams is not None:
            y = self.altup.correct(streams if selected is None else selected.take(streams), y)
            return (y if add is None else self.altup.add_to_others(y, add)).flatten(-2)
        y = y if add is None else y + add(y)
        return y if self.layer_scalar is None else y * self.layer_scalar

    def _sublayers(
        self,
        x_BTM: Tensor,
        tokens: Tokens | None,
        memory: KeyValues | None,
        options: Mapping[str, Any],
        attend: Callable[..., Tensor],
        feed: Callable[..., Tensor],
    ) -> Tensor:
        """Returns the residual stream after attention and feed-forward."""
        selected, record = options["selected"], options["record"]
        post, attn_norm, mlp_norm = self.order == "post", self.input_layernorm, self.before
        added = (partial(self._added, norm) for norm in self.behind)
        if self.order in BESIDE:
            assert attn_norm is not None
            normed, scale = attn_norm(x_BTM), self.residual_scale
            attended = scaled(attend(self.self_attn, normed, **options), scale)
            if selected is not None:
                x_BTM, normed, tokens = selected.take(x_BTM), selected.take(normed), selected.tokens
            fed = feed(self._feed_forward, normed if mlp_norm is None else mlp_norm(x_BTM), tokens=tokens)
            return x_BTM + attended + scaled(fed, scale)
        x = x_BTM if post or attn_norm is None else attn_norm(x_BTM)
        y = next(added)(attend(self.self_attn, x, **options))
        if selected is not None:
            x_BTM, tokens = selected.take(x_BTM), selected.tokens
        if self.laurel is not None:
            x_BTM, y = self.laurel.join(x_BTM, y, x if selected is None else selected.take(x))
        if self.cross_attn is not None:
            cross_norm = self.cross_attention_layernorm
            x, x_BTM = self._join(x_BTM, y, attn_norm if post else cross_norm)
            y = attend(self.cross_attn, x, tokens=tokens, memory=memory, record=record)
            y = scaled(y, self.residual_scale)
            attn_norm = cross_norm
        if self.mlp is None:
            return self._join(x_BTM, y, attn_norm if post else None)[1]
        x, x_BTM = self._join(x_BTM, y, attn_norm if post else mlp_norm)
        y = next(added)(feed(self._feed_forward, x, tokens=tokens))
        return self._join(x_BTM, y, mlp_norm if post else None)[1]

    def _added(self, norm: nn.Module | None, y: Tensor) -> Tensor:
        """Returns the output y of a sub-layer as it is added to the residual stream: normed and scaled."""
        return scaled(y if norm is None else norm(y), self.residual_scale)

    def _join(self, x: Tensor, y: Tensor, norm: nn.Module | None) -> tuple[Tensor, Tensor]:
        """Adds y to x. Returns the input of the next sub-layer and the residual stream: norm(x + y) and x + y; in
        order "post" norm(x + y) twice; without a norm x + y twice."""
        if norm is None:
            return (total := x + y), total
        normed, total = normed_sum(norm, x, y)
        return (normed, normed if self.order == "post" else total)

    def _feed_forward(self, x: Tensor, tokens: Tokens | None) -> Tensor:
        assert self.mlp is not None
        y: Tensor = self.mlp(x, tokens) if isinstance(self.mlp, MixtureOfExperts) else self.mlp(x)
        return nn.functional.dropout(y, self.dropout) if self.training else y

    def extra_repr(self) -> str:
        return f"order={self.order!r}"


def _part(redo: bool, module: Callable[..., Tensor], x: Tensor, **options: Any) -> Tensor:
    """Returns module(x, **options). With `redo` only x is kept for the backward, which computes the rest again."""
    y: Tensor = checkpoint(module, x, use_reentrant=False, **options) if redo else module(x, **options)
    return y
