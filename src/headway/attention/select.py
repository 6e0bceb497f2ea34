"""Which kernel runs, and why: the table of what each backend can do, and the choice among them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch

from headway.attention import autograd, call_cache
from headway.attention.backends import banded, dense, diagonal, flex, sdpa
from headway.attention.backends.native import backend as native
from headway.attention.backends.native import torch_op as native_op
from headway.attention.backends.triton import backend as split_decode
from headway.attention.call import Call
from headway.attention.key_values import KeyValues
from headway.choice import Choice
from headway.errors import BackendError, did_you_mean
from headway.heads import Heads
from headway.partial import Partial
from headway.patterns import Pattern
from headway.scores import Score
from headway.tokens import Tokens


@dataclass(frozen=True)
class Capabilities:
    """What a backend can do: `choose` and its errors read this, and then what the backend itself says.

    `devices` it runs on, those on which it returns a logsumexp (`lse`) and those on which it can be
    differentiated (`gradient`); `lse_gradient` says that the logsumexp can be, too.
    """

    devices: tuple[str, ...] = ("cpu", "cuda")
    gradient: tuple[str, ...] = ("cpu", "cuda")
    dropout: bool = True
    scores: bool = True
    slot_scores: bool = False
    keep: bool = False
    value_width: bool = True
    lse: tuple[str, ...] = ("cpu", "cuda")
    lse_gradient: bool = True


CAPABILITIES = {
    "dense": Capabilities(slot_scores=True, keep=True),
    "sdpa": Capabilities(
        dropout=False, scores=False, keep=True, value_width=False, lse=("cpu",), lse_gradient=False
    ),
    "native": Capabilities(devices=("cpu",), gradient=("cpu",), lse=("cpu",)),
    "banded": Capabilities(),
    "diagonal": Capabilities(dropout=False, scores=False),
    "flex": Capabilities(dropout=False, gradient=("cuda",)),
    "triton": Capabilities(dropout=False, scores=False, devices=("cuda",), gradient=()),
}

OBSTACLES = {
    "sdpa": sdpa.unsupported_reason,
    "native": native.unsupported_reason,
    "diagonal": diagonal.unsupported_reason,
    "triton": split_decode.unsupported_reason,
}
"""What a backend says of a call beside its abilities (flex is also told the device)."""

BLOCKED = {"native": native, "banded": banded, "diagonal": diagonal}
"""Backends that compute block by block, differentiated by `autograd.run`."""

FEW_PRODUCTS = 2**18
"""Products of q and k (B H T S D) up to which torch's kernel is taken: an estimate, to be measured (docs/log.md)."""

MASK_PAIRS = 2**16
"""Pairs of a row up to which torch's kernel with a mask is quicker than planning blocks (docs/log.md)."""

DENSE_SCORES = 2**20
"""Score elements up to which the whole matrix at once is quicker than planning blocks."""


def unsupported_reason(name: str, call: Call, lse: bool, device: str | None = None) -> str | None:
    """Why backend `name` cannot run this call (`lse`: the logsumexp is asked for); None if it can.

    `device` is where it would run: that of its tensors, unless they only stand for others (meta).
    """
    ability, device = CAPABILITIES[name], _device(call, device)
    wide = any(part.k.shape[-1] != part.v.shape[-1] for part in call.keys)
    needs_lse = lse or len(call.keys) > 1
    checks = (
        (device not in ability.devices, f"it runs on {' and '.join(ability.devices)}, not on {device}"),
        (call.needs_grad and device not in ability.gradient, f"it has no backward on {device}"),
        (call.dropout > 0 and not ability.dropout, "it has no dropout keyed by place"),
        (bool(call.score) and not ability.scores, f"it knows no scores such as {_names(call)}"),
        (any(s.by_slot for s in call.score) and not ability.slot_scores, "it takes no bias tied to slots"),
        (call.keep is not None and not ability.keep, "it takes no `keep` mask"),
        (wide and not ability.value_width, "it needs values as wide as keys"),
        (needs_lse and device not in ability.lse, f"it returns no logsumexp on {device}"),
        (needs_lse and call.needs_grad and not ability.lse_gradient, "its logsumexp has no gradient"),
    )
    for failed, reason in checks:
        if failed:
            return reason
    if name == "flex":
        return flex.unsupported_reason(call, device)
    return OBSTACLES[name](call) if name in OBSTACLES else None


def _device(call: Call, device: str | None) -> str:
    """The type of device of a call: "cpu" for tensors without any, unless `device` says more."""
    found = call.q.device.type
    return device or ("cpu" if found == "meta" else found)


def _names(call: Call) -> str:
    return ", ".join(type(s).__name__ for s in call.score)


def choose_for(call: Call, lse: bool = False, device: str | None = None) -> Choice:
    """The backend that `auto` takes for a call whose heads share one pattern (`device` as in `unsupported_reason`)."""
    rejected = []
    device, scores = _device(call, device), _scores(call)
    products, no_native = scores * call.q.shape[3], unsupported_reason("native", call, lse, device)
    if device == "cpu":
        if no_native is None and products > FEW_PRODUCTS:
            return Choice("native", "compiled for this CPU, blocks outside the pattern are skipped")
        rejected.append(("native", no_native or f"torch's kernel is sooner done with {products} products"))
    splits = unsupported_reason("triton", call, lse, device)
    fused = _fused(call, lse, device, splits)
    if isinstance(fused, Choice):
        return replace(fused, rejected=tuple(rejected))
    if no_native is None:
        why = f"compiled for this CPU; it has few products ({products}), but torch's kernel cannot do them"
        return Choice("native", why, rejected=(("sdpa", fused),))
    rejected.append(("sdpa", fused))
    if device == "cuda":
        if splits is None:
            why = "few queries: the keys are split over the device, each is read once"
            return Choice("triton", why, rejected=tuple(rejected))
        rejected.append(("triton", splits))
    if device == "cuda" and scores > DENSE_SCORES:
        reason = unsupported_reason("flex", call, lse, device)
        if reason is None:
            why = "one compiled kernel, tiles outside the pattern are skipped"
            return Choice("flex", why, rejected=tuple(rejected))
        rejected.append(("flex", reason))
    reason = unsupported_reason("banded", call, lse, device)
    if reason is not None:
        rejected.append(("banded", reason))
        return Choice(
            "dense", "only the full score matrix can do it", bytes=4.0 * scores, rejected=tuple(rejected)
        )
    if scores <= DENSE_SCORES:
        rejected.append(("banded", "planning blocks costs more than it saves"))
        why = f"the whole score matrix is small ({scores} elements)"
        return Choice("dense", why, bytes=4.0 * scores, rejected=tuple(rejected))
    rejected.append(("dense", f"its score matrix has {scores} elements"))
    return Choice(
        "banded", "blocks outside the pattern are skipped, memory is linear", rejected=tuple(rejected)
    )


def _scores(call: Call) -> int:
    """Elements of the whole score matrix."""
    return call.q.shape[0] * call.q.shape[1] * call.q.shape[2] * sum(p.k.shape[2] for p in call.keys)


def _fused(call: Call, lse: bool, device: str, splits: str | None) -> Choice | str:
    """torch's kernel where it computes little in vain, or why not; `splits` says why the keys cannot be split."""
    reason = unsupported_reason("sdpa", call, lse, device)
    if reason is not None:
        return reason
    forms = [sdpa.form(call, part) for part in call.keys]
    chunks = device == "cpu" and not call.needs_grad
    if all(f in ("full", "causal") or (f == "chunk" and chunks) for f in forms):
        return Choice("sdpa", f"torch's fused kernel takes it as {' + '.join(forms)}")
    pairs = call.q.shape[2] * sum(p.k.shape[2] for p in call.keys)
    if pairs <= MASK_PAIRS and not lse and len(call.keys) == 1 and splits is not None:
        return Choice("sdpa", f"torch's fused kernel takes it with a mask of only {pairs} pairs")
    return "it would build a mask of queries x keys"


def choose(
    pattern: Pattern,
    *,
    queries: int,
    keys: int,
    heads: int,
    kv_heads: int | None = None,
    head_dim: int = 64,
    batch: int = 1,
    dtype: torch.dtype = torch.float32,
    start: int | None = None,
    score: tuple[Score, ...] = (),
    dropout: float = 0.0,
    gradient: bool = False,
    in_order: bool = True,
    device: str = "cpu",
) -> Choice:
    """Which backend `auto` takes for calls of these shapes, and why; nothing is computed.

    `queries` follow `keys - queries` earlier ones unless `start` says where they begin. `in_order=False` says
    that the keys stand in no known order, as in a ring cache that has wrapped. `device` is "cpu" or "cuda".
    Patterns of `PerHead` run one by one; the choice is for the first of them.
    """
    if device not in ("cpu", "cuda"):
        raise BackendError(
            f"choose: device is 'cpu' or 'cuda', got {device!r}{did_you_mean(device, ('cpu', 'cuda'))}"
        )
    layout = Heads.of(heads, kv_heads)
    start = keys - queries if start is None else start
    q = torch.empty(batch, heads, queries, head_dim, dtype=dtype, device="meta", requires_grad=gradient)
    k = torch.empty(batch, layout.kv_heads, keys, head_dim, dtype=dtype, device="meta")
    ordered = Tokens.range(keys)
    part = KeyValues(k, k, ordered if in_order else Tokens(ordered.index))
    at = Tokens.range(queries, start)
    call = Call(q, at, (part,), pattern.heads[0], layout, 1.0, score, dropout=dropout)
    return choose_for(call, device=device)


def run(call: Call, backend: str, lse: bool, form: Hashable | None = None) -> Partial:
    """Runs one call on `backend` ("auto": on the chosen one); never on another than was asked for. Calls of its
    `form` are remembered."""
    if torch.compiler.is_compiling() and backend in ("auto", "native") and native_op.takes(call):
        return native_op.run(call)
    if backend == "auto":
        backend = choose_for(call, lse).what
    elif backend not in CAPABILITIES:
        raise BackendError(
            f"unknown backend {backend!r}{did_you_mean(backend, CAPABILITIES)}; known: auto, {', '.join(CAPABILITIES)}"
        )
    else:
        reason = unsupported_reason(backend, call, lse)
        if reason is not None:
            raise BackendError(
                f'backend="{backend}" cannot run this call: {reason}; backend="auto" would take '
                f"{choose_for(call, lse).what}"
            )
    if backend == "native" and form is not None:
        return call_cache.remember(form, call).run(call.q, call.keys[0])
    if backend != "native":
        call = call.dequantized()
    if backend == "dense":
        return dense.run(call)
    if backend == "sdpa":
        return sdpa.run(call, with_lse=lse)
    if backend == "flex":
        return flex.run(call, with_lse=lse)
    if backend == "triton":
        return split_decode.run(call)
    return autograd.run(backend, BLOCKED[backend], call)
