"""Multi-head masked self-attention with grouped heads, a padding mask and a KV cache, as printed in the document."""

import torch
from torch import Tensor, nn

from headway.classic.masking import MaskedSoftmax, causal_mask, padding_scores
from headway.classic.rotary import apply_rotary_emb


class MultiHeadMaskedSelfAttention(nn.Module):
    """output = Dropout_output[W_o(Dropout_attention[softmax(Q K^T / sqrt(d_k) + Mask)] V)],  d_k = d / h.

    Symbols: b batch size, s new tokens, n cached tokens, d model width, h query heads, g key/value heads.

    d                  model width, a multiple of h
    h                  number of query heads
    g                  number of key/value heads: g = h is MHA, g = 1 MQA, anything between GQA. Here g counts the
                       groups; another document calls the size of a group g. The query heads are grouped, not the
                       input: each query head attends on its own, with the keys and values of its group; scores are not
                       summed over a group
    max_len            size of the causal mask that is built in advance; longer inputs grow it
    dropout_attention  probability of dropping an attention weight, after the softmax and before the product with V
    dropout_output     probability of dropping an output element, after W_o

    W_q (d, d), W_k and W_v (g * d/h, d), W_o (d, d) have no bias. The buffer `mask` (1, 1, max_len, max_len) is
    neither trained nor saved. Raises ValueError if h does not divide d, if g does not divide h, or if the head width
    d/h is odd.
    """

    mask: Tensor

    def __init__(
        self,
        d: int,
        h: int,
        g: int,
        max_len: int,
        dropout_attention: float = 0.0,
        dropout_output: float = 0.0,
    ) -> None:
        super().__init__()
        if h < 1 or d % h:
            raise ValueError(f"the width d = {d} must be a multiple of the h = {h} query heads")
        if g < 1 or h % g:
            raise ValueError(
                f"h = {h} query heads cannot share g = {g} key/value heads evenly; g must divide h"
            )
        if (d // h) % 2:
            raise ValueError(
                f"rotary embedding turns pairs: the head width d // h must be even, got {d // h}"
            )
        self.d, self.h, self.g, self.head_dim = d, h, g, d // h
        self.W_q = nn.Linear(d, d, bias=False)
        self.W_k = nn.Linear(d, g * self.head_dim, bias=False)
        self.W_v = nn.Linear(d, g * self.head_dim, bias=False)
        self.W_o = nn.Linear(d, d, bias=False)
        self.split_q = nn.Unflatten(-1, (h, self.head_dim))
        self.split_kv = nn.Unflatten(-1, (g, self.head_dim))  # the document prints (h/g, d/h)
        self.repeat_kv = RepeatHeads(h // g)
        self.softmax = MaskedSoftmax()
        self.dropout_attention = nn.Dropout(dropout_attention)
        self.dropout_output = nn.Dropout(dropout_output)
        self.register_buffer("mask", causal_mask(max_len), persistent=False)

    def forward(
        self,
        x: Tensor,
        freqs_cis: Tensor,
        use_kv_cache: bool = False,
        cache_k: Tensor | None = None,
        cache_v: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns (output (b, s, d), cache_k, cache_v).

        x                 (b, s, d), the new tokens
        freqs_cis         complex (s, d // h // 2), the rows for the positions of the new tokens: after n cached
                          tokens, precompute_freqs_cis(d // h, end)[n : n + s]. Cached keys have already been rotated
        use_kv_cache      True: the returned caches are the given ones with the new keys and values appended. False:
                          the caches are returned unchanged
        cache_k, cache_v  (b, n, g, d/h) each, or None. The new tokens attend to them in either case
        padding_mask      (b, n + s): bool, True = real token; or additive, 0 = real token and -inf = padding. The
                          document prints the opposite convention (see `padding_scores`)

        Token i of x attends to the cached tokens and to tokens 0 .. i of x. For a token that may attend to nothing,
        the input of W_o and the gradients are zero. Raises ValueError if shapes do not fit.
        """
        if x.dim() != 3 or x.shape[2] != self.d:
            raise ValueError(f"x must be (b, s, {self.d}), got {tuple(x.shape)}")
        b, s, _ = x.shape
        if not freqs_cis.is_complex() or tuple(freqs_cis.shape) != (s, self.head_dim // 2):
            raise ValueError(
                f"freqs_cis must be complex ({s}, {self.head_dim // 2}) = (s, d // h // 2), the rows of the new "
                f"tokens' positions; got {freqs_cis.dtype} {tuple(freqs_cis.shape)}"
            )
        xq, xk, xv = self.split_q(self.W_q(x)), self.split_kv(self.W_k(x)), self.split_kv(self.W_v(x))
        xq, xk = apply_rotary_emb(xq, xk, freqs_cis)
        if cache_k is not None or cache_v is not None:
            cache_k, cache_v = self._checked(cache_k, cache_v, b)
            xk, xv = torch.cat((cache_k, xk), dim=1), torch.cat((cache_v, xv), dim=1)
        if use_kv_cache:
            cache_k, cache_v = xk, xv
        keys = xk.shape[1]

        q = xq.transpose(1, 2)  # (b, h, s, d/h)
        k = self.repeat_kv(xk).transpose(1, 2)  # (b, h, n + s, d/h)
        v = self.repeat_kv(xv).transpose(1, 2)
        scores = q @ k.transpose(2, 3) / self.head_dim**0.5 + self._causal(keys, s).to(q.dtype)
        if padding_mask is not None:
            scores = scores + padding_scores(padding_mask, b, keys).to(q.dtype)
        weights = self.dropout_attention(self.softmax(scores))  # (b, h, s, n + s)
        output = self.W_o((weights @ v).transpose(1, 2).reshape(b, s, self.d))
        return self.dropout_output(output), cache_k, cache_v

    def _causal(self, keys: int, s: int) -> Tensor:
        """Returns the mask of the last `s` of `keys` tokens, (1, 1, s, keys): new tokens are at the end."""
        if keys > self.mask.shape[-1]:
            self.mask = causal_mask(max(keys, 2 * self.mask.shape[-1]), self.mask.device)
        return self.mask[:, :, keys - s : keys, :keys]

    def _checked(self, cache_k: Tensor | None, cache_v: Tensor | None, b: int) -> tuple[Tensor, Tensor]:
        if cache_k is None or cache_v is None:
            raise ValueError("one of cache_k and cache_v is None; pass both, or neither")
        n = cache_k.shape[1] if cache_k.dim() == 4 else "n"
        if cache_k.shape != cache_v.shape or tuple(cache_k.shape) != (b, n, self.g, self.head_dim):
            raise ValueError(
                f"caches must be (b, n, g, d // h) = ({b}, n, {self.g}, {self.head_dim}) each, "
                f"got {tuple(cache_k.shape)} and {tuple(cache_v.shape)}"
            )
        return cache_k, cache_v


class RepeatHeads(nn.Module):
    """Repeats each key/value head `times` = h/g times, once for each query head of its group: (b, s, g, d/h) -> (b, s,
    h, d/h).
    """

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Repeats axis 2; query head i reads key/value head i // times."""
        return x.repeat_interleave(self.times, dim=2) if self.times > 1 else x
