"""The one decoder: every family is a spec of it.

Legend: B rows, T slots of the call, N slots whose logits are wanted, M width of the model, V vocab.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from headway.cache import DecoderCache
from headway.cache.choose import Kind
from headway.errors import ConfigError, DataError
from headway.nn import (
    Attention,
    Block,
    GatedFeedForward,
    PositionEmbedding,
    RMSNorm,
    TokenEmbedding,
    rotary_table,
)
from headway.tokens import Tokens

if TYPE_CHECKING:
    from headway.models.spec import ModelSpec


class Core(nn.Module):
    """Embedding, blocks and last norm, under the names that Hugging Face's LLaMA gives them."""

    def __init__(self, spec: ModelSpec, backend: str) -> None:
        super().__init__()
        norm = partial(RMSNorm, spec.width, spec.norm_eps)
        self.embed_tokens = TokenEmbedding(spec.vocab, spec.width)
        self.embed_positions = PositionEmbedding(spec.positions, spec.width)
        self.layers = nn.ModuleList(
            Block(
                Attention(
                    spec.width,
                    spec.heads,
                    spec.kv_heads,
                    head_dim=spec.head_dim,
                    pattern=pattern,
                    positions=spec.positions,
                    qkv_bias=spec.qkv_bias,
                    out_bias=spec.out_bias,
                    qk_norm=spec.qk_norm,
                    norm_eps=spec.norm_eps,
                    dropout=spec.attention_dropout,
                    backend=backend,
                ),
                GatedFeedForward(spec.width, spec.hidden, spec.activation, spec.mlp_bias),
                norm,
            )
            for pattern in spec.patterns
        )
        self.norm = norm()


class Decoder(nn.Module):
    """A causal language model. Parameter names are those of Hugging Face's LLaMA; when embedding and output
    layer are tied there is no `lm_head.weight`.

    Args:
        spec: what it is.
        backend: of attention, in every layer ("auto" chooses by layer and call).

    Attributes:
        checkpoint_blocks: in training, keep only each block's input and compute the rest again in the
            backward: less memory, one forward more.
    """

    def __init__(self, spec: ModelSpec, backend: str = "auto") -> None:
        super().__init__()
        self.spec = spec
        self.checkpoint_blocks = False
        self.model = Core(spec, backend)
        self.lm_head = None if spec.tied else nn.Linear(spec.width, spec.vocab, bias=False)

    def forward(
        self,
        ids: Tensor,
        *,
        tokens: Tokens | None = None,
        cache: DecoderCache | None = None,
        logits_for: Tensor | slice | None = None,
    ) -> Tensor:
        """Logits of the token that follows each slot.

        Args:
            ids: token ids [B, T]; those of empty slots are not looked at.
            tokens: [B|1, T]; unless given, every slot is a token, numbered from 0 or from where `cache`
                ended. Packed documents are Tokens.packed, padding is Tokens.from_lengths.
            cache: past keys and values (`make_cache`); this chunk is added.
            logits_for: slots whose logits are computed, all unless given: a slice of slots; slot numbers [N]
                for all rows, or [B, N] row by row; a bool mask [B, T].
        Returns:
            [B, N, V], or [number of True, V] for a mask.
        Raises:
            DataError: ids that are not in the vocab, or of a wrong shape. ConfigError: tokens that do not fit
            ids, rows beyond `max_context`, a wrong logits_for. CacheError: chunks that do not continue a cache.
        """
        hidden = self.hidden(ids, tokens=tokens, cache=cache)
        return self.logits(hidden if logits_for is None else select_slots(hidden, logits_for))

    def hidden(
        self, ids: Tensor, *, tokens: Tokens | None = None, cache: DecoderCache | None = None
    ) -> Tensor:
        """The states [B, T, M] that logits are computed from; arguments as in `forward`."""
        if tokens is None and ids.dim() == 2:
            count = ids.shape[1]
            tokens = Tokens.range(count, device=ids.device) if cache is None else cache.next_tokens(count)
        x_BTM = self.model.embed_tokens(ids, tokens)
        assert tokens is not None
        self._check(ids, tokens, cache)
        x_BTM = self.model.embed_positions(x_BTM, tokens)
        rotation = rotary_table(self.spec.positions, tokens, self.spec.head_dim, x_BTM.dtype)
        redo = self.checkpoint_blocks and cache is None and self.training and torch.is_grad_enabled()
        for i, block in enumerate(self.model.layers):
            if redo:
                x_BTM = checkpoint(block, x_BTM, tokens=tokens, rotation=rotation, use_reentrant=False)
            else:
                past = None if cache is None else cache[i]
                x_BTM = block(x_BTM, tokens=tokens, cache=past, rotation=rotation)
        hidden: Tensor = self.model.norm(x_BTM)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., M] -> [..., V]: the output layer, which is the embedding when they are tied."""
        weight = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return nn.functional.linear(hidden, weight)

    def make_cache(
        self, batch: int = 1, *, slack: int = 0, kind: Kind = "auto", dtype: torch.dtype | None = None
    ) -> DecoderCache:
        """An empty cache for `batch` rows, chosen layer by layer from the patterns; as in `make_cache` of
        `headway.cache`. `dtype` is the weights' unless given (autocast makes keys of another; torch.int8 rounds
        them)."""
        weight = self.model.embed_tokens.weight
        return DecoderCache.of(
            self.spec.patterns,
            batch=batch,
            kv_heads=self.spec.kv_heads,
            head_dim=self.spec.head_dim,
            dtype=weight.dtype if dtype is None else dtype,
            device=weight.device,
            slack=slack,
            kind=kind,
        )

    def _check(self, ids: Tensor, tokens: Tokens, cache: DecoderCache | None) -> None:
        if tokens.count != ids.shape[1] or tokens.rows not in (1, ids.shape[0]):
            raise ConfigError(
                f"Decoder: tokens describe {tokens.rows} rows of {tokens.count} slots, but ids are "
                f"{ids.shape[0]} rows of {ids.shape[1]}"
            )
        if tokens.device != ids.device:
            raise ConfigError(
                f"Decoder: tokens are on {tokens.device}, ids on {ids.device}; move them: tokens.to(ids.device)"
            )
        if cache is not None and (len(cache) != self.spec.layers or cache.batch != ids.shape[0]):
            raise ConfigError(
                f"Decoder: the cache is for {len(cache)} layers and {cache.batch} rows, the call has "
                f"{self.spec.layers} layers and {ids.shape[0]} rows; make one with decoder.make_cache({ids.shape[0]})"
            )
        limit = self.spec.context_limit
        if limit is not None and tokens.index.numel():
            longest = int(tokens.index.max()) + 1 if tokens.start is None else tokens.start + tokens.count
            if longest > limit:
                raise ConfigError(
                    f"Decoder: a row of {longest} tokens is longer than this model can take ({limit}); "
                    "shorten the input"
                )


def select_slots(x_BTM: Tensor, which: Tensor | slice) -> Tensor:
    """The slots that `logits_for` of `Decoder.forward` names: [B, N, M], or [n, M] for a bool mask.

    Raises DataError for a slot that is not there, or a tensor of a wrong kind."""
    if isinstance(which, slice):
        return x_BTM[:, which]
    batch, count, width = x_BTM.shape
    if which.dtype == torch.bool:
        if which.shape != (batch, count):
            raise DataError(
                f"logits_for: a mask must be [{batch}, {count}] like the ids, got {list(which.shape)}"
            )
        return x_BTM[which]
    rows_fit = which.dim() == 1 or (which.dim() == 2 and which.shape[0] == batch)
    if which.is_floating_point() or not rows_fit:
        raise DataError(
            f"logits_for: slot numbers [N] or [{batch}, N], a bool mask or a slice are needed, "
            f"got {which.dtype} {list(which.shape)}"
        )
    if which.numel() and not -count <= int(which.min()) <= int(which.max()) < count:
        raise DataError(f"logits_for: slots must lie in {-count}..{count - 1}, got {which.tolist()}")
    at = (which % count if count else which).expand(batch, -1)
    return x_BTM.gather(1, at.unsqueeze(-1).expand(-1, -1, width))


__all__ = ["Core", "Decoder", "select_slots"]
