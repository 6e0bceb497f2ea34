"""Pairings: which two coordinates are rotated together, and conversion between such choices.

The choice does not change what a model can express (any pairing gives the same scores once the rows of the query and
key projections are permuted to match), but a checkpoint that is read with the wrong one produces fluent nonsense.
"""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from headway.errors import ConfigError, check_known

Pairing = Literal["adjacent", "halves"] | tuple[tuple[int, int], ...]
"""
"adjacent"   (0, 1), (2, 3), ...           RoFormer, Meta's own LLaMA files, llama2.c
"halves"     (0, d/2), (1, d/2 + 1), ...   LLaMA as `transformers` stores it, GPT-NeoX
pairs        any partition of 0..d-1 into ordered pairs; pair i is rotated with frequency i
"""


def checked_pairing(pairing: object) -> Pairing:
    """Returns `pairing` in hashable form. Raises ConfigError for anything else."""
    names = ("adjacent", "halves")
    if isinstance(pairing, str):
        check_known(pairing, names, "unknown rotary pairing", are="give a tuple of pairs, or one of")
        return "adjacent" if pairing == "adjacent" else "halves"
    if not isinstance(pairing, Sequence):
        raise ConfigError(f'rotary pairing must be "adjacent", "halves" or a tuple of pairs, got {pairing!r}')
    pairs = []
    for pair in pairing:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not all(type(index) is int for index in pair):
            raise ConfigError(f"rotary pairing: every pair is two integers, got {pair!r}")
        pairs.append((pair[0], pair[1]))
    flat = sorted(index for pair in pairs for index in pair)
    if flat != list(range(len(flat))) or not flat:
        raise ConfigError(
            f"rotary pairing: the pairs must use every coordinate 0..d-1 exactly once, got {tuple(pairs)}"
        )
    return tuple(pairs)


def coordinate_pairs(pairing: Pairing, dims: int) -> tuple[tuple[int, int], ...]:
    """Returns the pairs that are rotated together among the first `dims` coordinates, in the order of their
    frequencies.

    Raises ConfigError if `dims` is odd or does not fit explicit pairs.
    """
    if dims < 2 or dims % 2:
        raise ConfigError(
            f"rotary dims must be even (coordinates are rotated in pairs) and at least 2, got {dims}"
        )
    half = dims // 2
    pairing = checked_pairing(pairing)
    if pairing == "adjacent":
        return tuple((2 * i, 2 * i + 1) for i in range(half))
    if pairing == "halves":
        return tuple((i, i + half) for i in range(half))
    if len(pairing) != half:
        raise ConfigError(
            f"rotary pairing lists {len(pairing)} pairs, but {dims} rotated dims are {half} pairs"
        )
    return tuple((a, b) for a, b in pairing)


def to_pairing(
    x: Tensor, *, heads: int, head_dim: int, frm: Pairing, to: Pairing, dims: int | None = None, dim: int = 0
) -> Tensor:
    """Converts `x`, whose axis `dim` is in the head basis of pairing `frm`, to the basis of pairing `to`.

    heads      number of heads *of this tensor*: query heads for W_q, key/value heads for W_k, 1 for a per-head norm
               gain
    head_dim   D; axis `dim` must be heads * head_dim long
    dims       rotated prefix of D (partial rotary); the coordinates behind it stay where they are

    Weights [H*D, M], biases [H*D], norm gains [D], adapter outputs [H*D, r], per-channel scales: the same call; for a
    weight stored as [M, H*D], dim=1. Values and output projections are not in this basis. The conversion is a
    permutation: exact, and undone by exchanging `frm` and `to`. Raises ConfigError if the sizes do not fit.
    """
    dims = head_dim if dims is None else dims
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"to_pairing: a tensor of shape {tuple(x.shape)} has no axis {dim}")
    if heads < 1 or x.shape[dim] != heads * head_dim:
        raise ConfigError(
            f"to_pairing: axis {dim} of shape {tuple(x.shape)} must be heads * head_dim = {heads} * "
            f"{head_dim} = {heads * head_dim} long; heads is this tensor's own count (kv heads for keys)"
        )
    if dims > head_dim:
        raise ConfigError(f"to_pairing: {dims} rotated dims do not fit a head of {head_dim}")
    source = torch.arange(head_dim)
    for old, new in zip(coordinate_pairs(frm, dims), coordinate_pairs(to, dims), strict=True):
        source[new[0]], source[new[1]] = old
    # adjacent (0, 1), (2, 3) to halves (0, 2), (1, 3): source [0, 2, 1, 3]
    index = (torch.arange(heads)[:, None] * head_dim + source).flatten()
    return x.index_select(dim, index.to(x.device))
