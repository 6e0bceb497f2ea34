"""Validates the inputs of a model: ids, their tokens and types."""

import torch
from torch import Tensor

from headway.cache import BatchCache, PagedCache
from headway.errors import ConfigError, DataError
from headway.models.mixers import beside_layers
from headway.models.spec import ModelSpec
from headway.nn.embeddings import check_ids
from headway.parallel import ContextParallel
from headway.tokens import Tokens


def checked_types(types: Tensor | None, ids: Tensor, rows: int) -> Tensor:
    """Returns the token types [B, T] of `ids`, 0 if None. Raises DataError for types outside 0 .. rows - 1 or of a
    wrong shape."""
    if types is None:
        return torch.zeros_like(ids)
    if types.is_floating_point() or types.dtype == torch.bool or types.dim() != 2:
        raise DataError(
            f"token types must be whole numbers [batch, tokens], got {types.dtype} {[*types.shape]}"
        )
    if types.shape[1] != ids.shape[1] or types.shape[0] not in (1, ids.shape[0]):
        raise DataError(f"token types {[*types.shape]} must have the shape of ids {[*ids.shape]}, or one row")
    if types.numel() and not types.is_meta and not 0 <= int(types.min()) <= int(types.max()) < rows:
        raise DataError(f"token types must lie in 0..{rows - 1}, got {types.unique().tolist()[:8]}")
    return types


def checked_tokens(
    spec: ModelSpec,
    ids: Tensor,
    tokens: Tokens | None,
    cache: BatchCache | PagedCache | None = None,
    context: ContextParallel | None = None,
) -> Tokens:
    """Returns the tokens of `ids`. With `context` they are the rank's own; if None, every slot is a token, numbered
    from 0 or from where `cache` ended.

    Raises DataError unless ids are whole numbers [B, T]; ConfigError unless tokens and cache fit `ids`, and rows are
    within the context limit.
    """
    check_ids(ids)
    if context is not None:
        tokens = context.own(tokens, cache)
    if tokens is None:
        count = ids.shape[1]
        if isinstance(cache, PagedCache):
            raise ConfigError("a PagedCache numbers the tokens itself; pass tokens= from its begin()")
        tokens = Tokens.range(count, device=ids.device) if cache is None else cache.next_tokens(count)
    if tokens.count != ids.shape[1] or tokens.rows not in (1, ids.shape[0]):
        raise ConfigError(
            f"tokens describe {tokens.rows} rows of {tokens.count} slots, but ids are "
            f"{ids.shape[0]} rows of {ids.shape[1]}"
        )
    if tokens.device != ids.device:
        raise ConfigError(
            f"tokens are on {tokens.device}, ids on {ids.device}; move them: tokens.to(ids.device)"
        )
    layers = spec.layers + len(beside_layers(spec.mixers))
    if cache is not None and (len(cache) != layers or cache.batch != ids.shape[0]):
        raise ConfigError(
            f"the cache is for {len(cache)} layers and {cache.batch} rows, the call has "
            f"{layers} layers and {ids.shape[0]} rows; make one with make_cache({ids.shape[0]})"
        )
    limit, rows = spec.context_limit, tokens if context is None else context.whole
    if limit is not None and rows.index.numel():
        longest = int(rows.index.max()) + 1 if rows.start is None else rows.start + rows.count
        if longest > limit:
            raise ConfigError(
                f"a row of {longest} tokens is longer than this model can take ({limit}); shorten the input"
            )
    return tokens
