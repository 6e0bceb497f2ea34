"""torch's scaled_dot_product_attention, with its signature and its semantics, computed by headway's attention.

Only this module and `headway.classic` align a causal mask to the top left, take masks as tensors and support additive
masks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from headway.attention import attend
from headway.patterns import Causal, Full
from headway.scores import Bias
from headway.tokens import Tokens


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Returns softmax(query key^T * scale + mask) value, as `torch.nn.functional.scaled_dot_product_attention` does.

    query [..., H, T, D], key [..., K, S, D], value [..., K, S, Dv] -> [..., H, T, Dv]; any number of leading axes,
    which broadcast; K = H unless `enable_gqa`, then K divides H.

    Args:
        attn_mask: broadcasts to [..., H, T, S]. bool: True if the query may attend to the key. Floating point: added to
            the scaled product (-inf masks); it receives a gradient if it requires one.
        dropout_p: always applied, as in torch; the dropped weights differ from torch's.
        is_causal: query slot i attends to key slots 0 .. i, also if T != S (aligned to the top left).
        scale: D ** -0.5 unless given.

    Two differences from torch: the output of a query that attends to nothing is 0 on every path, and keys and values
    that no query attends to have no influence, even if they are NaN. float16 on a CPU is computed in float32 and
    rounded back.

    Raises: the error that torch raises for the same invalid input.
    """
    query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
    if not _plain(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa):
        if dropout_p < 0:
            raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {dropout_p}")
        with torch.no_grad():  # torch's function on meta tensors: invalid input raises torch's own error
            q, k, v = (t.detach().to("meta") for t in (query, key, value))
            m = None if attn_mask is None else attn_mask.detach().to("meta")
            F.scaled_dot_product_attention(
                q, k, v, m, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    dtype = query.dtype
    if dtype == torch.float16 and query.device.type == "cpu":
        query, key, value = query.float(), key.float(), value.float()
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.float()
    shapes = [key.shape[:-2], value.shape[:-2]]
    lead = torch.broadcast_shapes(query.shape[:-2], *([] if enable_gqa else shapes))
    heads = lead[-1] if lead else 1
    batch = torch.broadcast_shapes(lead[:-1], key.shape[:-3], value.shape[:-3])
    kv_heads = _heads(key) if _heads(key) == _heads(value) else heads
    key, value = (_repeated(t, kv_heads) for t in (key, value))
    q, k, v = (_rows(t, batch, n) for t, n in ((query, heads), (key, kv_heads), (value, kv_heads)))
    mask = None if attn_mask is None else _mask_rows(attn_mask, batch)
    keep = mask if mask is not None and mask.dtype == torch.bool else None
    positive = scale is None or scale > 0
    fused = keep is not None and dropout_p == 0 and positive and q.shape[-1] == v.shape[-1]
    out = attend(
        q,
        k,
        v,
        Causal() if is_causal else Full(),
        q_tokens=Tokens.range(q.shape[2], device=q.device),
        k_tokens=Tokens.range(k.shape[2], device=q.device),
        keep=keep,
        score=() if mask is None or keep is not None else Bias(mask),
        scale=scale if query.shape[-1] else 1.0,
        dropout=dropout_p if dropout_p < 1 else 0.0,
        backend="sdpa" if fused else "auto",
    )
    if dropout_p == 1:
        out = out.masked_fill(torch.ones((), dtype=torch.bool, device=out.device), 0.0)
    return out.reshape(*batch, *lead[-1:], *out.shape[-2:]).to(dtype)


def _plain(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, gqa: bool
) -> bool:
    """Returns whether the arguments are certainly valid: four axes, and nothing but the mask broadcasts.

    All other calls are checked by torch itself."""
    q, k, v = query.shape, key.shape, value.shape
    if not (len(q) == len(k) == len(v) == 4) or k[1] == 0:
        return False
    return (
        0 <= dropout <= 1
        and query.is_floating_point()
        and query.dtype == key.dtype == value.dtype
        and q[0] == k[0] == v[0]
        and k[1:3] == v[1:3]
        and q[3] == k[3]
        and (q[1] % k[1] == 0 if gqa else q[1] == k[1])
        and (mask is None or (not causal and _mask_fits(mask, query.dtype, (*q[:3], k[2]))))
    )


def _mask_fits(mask: Tensor, dtype: torch.dtype, pairs: tuple[int, ...]) -> bool:
    sizes = zip(mask.shape[::-1], pairs[::-1], strict=False)
    broadcasts = 2 <= mask.dim() <= 4 and all(n in (1, m) for n, m in sizes)
    return broadcasts and mask.dtype in (torch.bool, dtype)


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns the tensors in autocast's dtype if `torch.autocast` is enabled, as torch's function casts them.

    float64 and bool tensors are unchanged."""
    device = query.device.type
    if not torch.is_autocast_enabled(device):
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(device)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype != torch.float64 else t

    return cast(query), cast(key), cast(value), None if mask is None else cast(mask)


def _heads(t: Tensor) -> int:
    return t.shape[-3] if t.dim() > 2 else 1


def _repeated(t: Tensor, kv_heads: int) -> Tensor:
    """Repeats the heads of a key or value to `kv_heads`: torch allows different numbers of key and value heads."""
    return t if _heads(t) in (1, kv_heads) else t.repeat_interleave(kv_heads // _heads(t), -3)


def _rows(t: Tensor, batch: torch.Size, heads: int) -> Tensor:
    """Reshapes [..., heads or 1, N, D] to [rows, heads, N, D], as a view if possible."""
    tail = t.shape[-2:]
    return t.expand(*batch, heads, *tail).reshape(math.prod(batch), heads, *tail)


def _mask_rows(mask: Tensor, batch: torch.Size) -> Tensor:
    """Reshapes a mask to [rows or 1, H or 1, T or 1, S or 1]."""
    if mask.dim() < 3:
        mask = mask.reshape(1, *(1,) * (2 - mask.dim()), *mask.shape)
    if math.prod(mask.shape[:-3]) == 1:
        return mask.reshape(1, *mask.shape[-3:])
    return _rows(mask, batch, mask.shape[-3])
