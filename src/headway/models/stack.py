"""Embedding, blocks and last norm: the stack that every decoder and every encoder consists of.

Legend: B rows, T slots of the call, N selected slots, M width of the model.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.attention import KeyValues
from headway.cache import BatchCache, PagedCache
from headway.errors import ConfigError, check_known
from headway.models.inputs import checked_types
from headway.models.mixers import Softmax, attention, kind_of, norm_of, order_of
from headway.models.spec import ModelSpec
from headway.nn import (
    AttentionLayer,
    Block,
    FeedForward,
    Linear,
    MixingLayer,
    MixtureOfExperts,
    PositionEmbedding,
    Scores,
    TokenEmbedding,
)
from headway.nn.altup import AlternatingUpdates, LaurelProduct, Streams
from headway.nn.block import CHECKPOINTING, Checkpointing
from headway.nn.mixers import SharedKeys
from headway.nn.per_layer import PerLayerEmbedding, PerLayerInput
from headway.nn.record import Record
from headway.nn.scale import scaled
from headway.parallel import ContextParallel
from headway.patterns import Full
from headway.positions import NoPositions, PositionScheme, Rotation
from headway.tokens import SlotSelection, Tokens


class TransformerStack(nn.Module):
    """A stack whose parts have the names of Hugging Face's LLaMA.

        x = norm((E[ids] * scale + types + positions)) W          norm and W if the spec has them
        x = block(x) for every layer                              between `Streams.split` and `.join` with several
                                                                  streams
        x = norm(x)                                               if `final_norm`

    In training mode there is dropout on the embedding before W, and on the last x with `final_dropout`.

    Args:
        spec: the architecture.
        backend: attention backend of every layer.
        embedding: False if another stack's embedding is used, which is then passed to `forward`.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto", *, embedding: bool = True) -> None:
        super().__init__()
        self.spec = spec
        norm = norm_of(spec)
        columns, positions = spec.columns, spec.positions
        together = positions.marks == "scores" and positions.shared
        self.embed_tokens = TokenEmbedding(spec.vocab, columns) if embedding else None
        self.embed_positions = PositionEmbedding(positions, columns)
        self.embed_types = nn.Embedding(spec.token_types, columns) if spec.token_types else None
        self.embed_norm = norm(columns) if spec.embedding_norm else None
        self.embed_proj = Linear(columns, spec.width) if columns != spec.width else None
        self.drop = nn.Dropout(spec.dropout)
        self.scores = Scores(positions.scores(spec.heads, spec.head_dim, not spec.causal) if together else ())
        mixing = _mixing(spec, NoPositions() if together else None, backend)
        sources = [layer.kv_from for layer in mixing if isinstance(layer, AttentionLayer)]
        self.shared_keys = {layer for layer in sources if layer is not None}
        columns_per_layer = spec.per_layer_embedding
        rows = spec.per_layer_vocab or spec.vocab
        self.per_layer = (
            PerLayerEmbedding(rows, spec.width, spec.layers, columns_per_layer, norm)
            if columns_per_layer
            else None
        )
        of_width, altup = partial(norm, spec.width), spec.altup
        self.streams = None if altup is None else Streams(altup, spec.width)
        self.layers = nn.ModuleList(
            Block(
                mixing[layer],
                _feed_forward(spec, layer),
                of_width,
                order_of(spec, spec.mixers[layer]),
                cross_attn=attention(spec, Full(), NoPositions(), backend, across=True)
                if spec.encoder
                else None,
                dropout=spec.dropout,
                residual_scale=spec.residual_scale,
                first_norm=spec.first_norm or layer > 0,
                per_layer=PerLayerInput(spec.width, columns_per_layer, spec.activation, of_width)
                if columns_per_layer
                else None,
                layer_scalar=spec.layer_scalar,
                laurel=LaurelProduct(spec.width, spec.laurel, of_width) if spec.laurel else None,
                altup=None if altup is None else AlternatingUpdates(altup, spec.width, of_width),
            )
            for layer in range(spec.layers)
        )
        self.shared_rotation = _shared_rotation(self.blocks)
        self.norm = norm(spec.width) if spec.final_norm else None

    def forward(
        self,
        ids: Tensor,
        tokens: Tokens,
        *,
        types: Tensor | None = None,
        cache: BatchCache | PagedCache | None = None,
        memory: Sequence[KeyValues] | None = None,
        embedding: TokenEmbedding | None = None,
        gradient_checkpointing: Checkpointing = "none",
        context: ContextParallel | None = None,
        slots: Tensor | None = None,
        record: Record | None = None,
    ) -> Tensor:
        """Returns the last states [B, T, M], or with `slots` only theirs, [B, N, M]: the last layer then computes
        everything but keys and values for these slots only.

        Args:
            ids: token ids [B, T]; ids in empty slots are ignored.
            tokens: [B|1, T].
            types: token types [B, T], all 0 if None; only if the spec has token types.
            cache: past keys and values, of the rows of ids or of sequences packed side by side.
            memory: cross-attention keys and values of an encoder's states, one set per layer.
            embedding: used instead of this stack's own.
            gradient_checkpointing: what the backward pass recomputes, in training and without a cache: "block", or in
                each block "attention" or "feed_forward".
            context: context parallelism: the rows of which ids are this rank's shard.
            slots: numbers [B, N] of the slots whose states are returned; all if None.
            record: receives the states between layers, and the inputs of attention.

        Raises ConfigError for an unknown `gradient_checkpointing`.
        """
        check_known(gradient_checkpointing, CHECKPOINTING, "there is no gradient_checkpointing")
        if isinstance(cache, BatchCache):
            return self._continue_rows(
                ids, tokens, types, cache, memory, slots, embedding=embedding, record=record
            )
        whole = None if context is None else context.whole
        x_BTM = self.embed(ids, tokens, types, embedding)
        score = self.scores() if self.scores.steps else ()
        redoes = cache is None and self.training and torch.is_grad_enabled()
        redo: Checkpointing = gradient_checkpointing if redoes else "none"
        rotations: dict[int | None, Rotation | None] = {None: None}
        if slots is not None and ids.shape[1] == slots.shape[1] == 1:
            slots = None  # in a decoding step the only slot is selected anyway
        selected = None if slots is None else SlotSelection.of(tokens, slots)
        early = selected if context is None and not redoes else None
        shared_keys: SharedKeys = dict.fromkeys(self.shared_keys)
        per_layer = None if self.per_layer is None else self.per_layer(ids, tokens, x_BTM)
        x_BTM = x_BTM if self.streams is None else self.streams.split(x_BTM)
        for i, block in enumerate(self.blocks):
            shared = self.shared_rotation[i]
            rotary = block.self_attn.rotary
            if shared not in rotations and rotary is not None:
                rotations[shared] = rotary(tokens, x_BTM.dtype, whole=whole)
            attends = isinstance(block.self_attn, AttentionLayer)
            options: dict[str, Any] = {
                "tokens": tokens,
                "rotation": rotations[shared],
                "score": () if rotary is None else score,
                "memory": None if memory is None else memory[i],
                "shared": shared_keys if shared_keys and attends else None,
                "per_layer": None if per_layer is None else per_layer[:, :, i],
                "context": context,
                "selected": early if block is self.layers[-1] else None,
                "record": record,
            }
            if record is not None:
                record.states.append(x_BTM[..., : self.spec.width])  # the first of several streams
            if redo == "block":
                x_BTM = checkpoint(block, x_BTM, use_reentrant=False, **options)
            else:
                x_BTM = block(x_BTM, cache=None if cache is None else cache[i], checkpointing=redo, **options)
        if selected is not None and early is None:
            x_BTM = selected.take(x_BTM)
        x_BTM = x_BTM if self.streams is None else self.streams.join(x_BTM)
        states: Tensor = x_BTM if self.norm is None else self.norm(x_BTM)
        states = self.drop(states) if self.spec.final_dropout else states
        if record is not None:
            record.states.append(states)
        return states

    def _continue_rows(
        self,
        ids: Tensor,
        tokens: Tokens,
        types: Tensor | None,
        cache: BatchCache,
        memory: Sequence[KeyValues] | None,
        slots: Tensor | None,
        **others: Any,
    ) -> Tensor:
        """Runs `forward` on rows with a past: their new tokens are packed side by side, as documents of one row."""
        count = ids.shape[1] if slots is None else slots.shape[1]
        with cache.step(tokens) as packed:
            if not packed.rows:
                return self.like.new_zeros(len(ids), count, self.spec.width)
            states = self.forward(
                packed.take(ids),
                packed.tokens,
                types=None if types is None else packed.take(types.expand_as(ids)),
                cache=cache.pages,
                memory=None if memory is None else [packed.side_by_side(keys) for keys in memory],
                slots=None if slots is None else packed.slots(slots, ids.shape[1]),
                **others,
            )
        return packed.put(states, *ids.shape) if slots is None else states.view(len(ids), count, -1)

    def embed(
        self,
        ids: Tensor,
        tokens: Tokens,
        types: Tensor | None = None,
        embedding: TokenEmbedding | None = None,
    ) -> Tensor:
        """Returns the input of the first layer, [B, T, M]."""
        table = self.embed_tokens if embedding is None else embedding
        assert table is not None
        x: Tensor = scaled(table(ids, tokens), self.spec.embedding_scale)
        if self.embed_types is not None:
            x = x + self.embed_types(checked_types(types, ids, self.spec.token_types))
        elif types is not None:
            raise ConfigError(
                "types are given, but this model has no token types (token_types=0); drop types="
            )
        x = self.embed_positions(x, tokens)
        x = x if self.embed_norm is None else self.embed_norm(x)
        x = self.drop(x) if self.training else x
        return x if self.embed_proj is None else self.embed_proj(x)

    @property
    def blocks(self) -> list[Block]:
        """The layers, from the first to the last."""
        return [block for block in self.layers if isinstance(block, Block)]

    @property
    def embedding(self) -> Tensor:
        """The embedding table, [V, columns], dequantized if it is quantized."""
        assert self.embed_tokens is not None
        return self.embed_tokens.matrix

    @property
    def like(self) -> Tensor:
        """A tensor with the dtype and device of the states."""
        assert self.embed_tokens is not None
        return self.embed_tokens.like


def _shared_rotation(blocks: Sequence[Block]) -> tuple[int | None, ...]:
    """Returns, for each layer, the number of the first layer with the same rotation; None for a layer that rotates
    nothing, or trains its own angles."""
    first: dict[tuple[PositionScheme, int], int] = {}
    return tuple(
        first.setdefault((rotary.positions, rotary.head_dim), i)
        if rotary is not None and rotary.rotates and rotary.frequency_offset is None
        else None
        for i, rotary in enumerate(block.self_attn.rotary for block in blocks)
    )


def _mixing(spec: ModelSpec, positions: PositionScheme | None, backend: str) -> list[MixingLayer]:
    """Returns the token mixer of each layer, with `positions` instead of the layers' own if given."""
    layers: list[MixingLayer] = []
    for mixer, pattern, scheme in zip(spec.mixers, spec.patterns, spec.layer_positions, strict=True):
        arguments = pattern, scheme if positions is None else positions, backend
        if isinstance(mixer, Softmax) and mixer.kv_from is not None:
            layers.append(attention(spec, *arguments, mixer=mixer, kv_from=layers[mixer.kv_from]))
        else:
            layers.append(kind_of(mixer).layer(spec, mixer, *arguments))
    return layers


def _feed_forward(spec: ModelSpec, layer: int) -> FeedForward | MixtureOfExperts | None:
    """Returns the feed-forward or mixture of experts of one layer, or None."""
    common = spec.activation, spec.mlp_bias, spec.activation_dropout
    experts, hidden = spec.experts[layer], spec.hidden_of(layer)
    if experts is not None:
        return MixtureOfExperts(experts, spec.width, *common, gated=spec.gated)
    scales = spec.mlp_scale, spec.mlp_gate_scale
    sparsity = spec.mlp_sparsity[layer]
    if not hidden:
        return None
    return FeedForward(spec.width, hidden, *common, gated=spec.gated, scales=scales, sparsity=sparsity)


def make_output(spec: ModelSpec, width: int, stack: TransformerStack) -> Linear:
    """Returns the output layer, from states of `width` to logits; tied to the embedding of `stack` if the spec says
    so."""
    tied_to = stack.embed_tokens if spec.tied else None
    return Linear.output(width, spec.vocab, bias=spec.output_bias, tied_to=tied_to)
