"""Calls of the gated delta rule: heads, tokens and the form that computes them.

Legend: B rows, K key heads, H value heads, T slots, D per key, E per value, G channels of a decay: 1 or D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.attention.call import check_axes
from headway.attention.delta.convolution import Convolved
from headway.attention.delta.forms import DeltaInputs, chunked, recurrent
from headway.attention.linear_attention.attend import exactly
from headway.attention.token_order import order_of
from headway.errors import BackendError, PatternError, check_known
from headway.heads import Heads
from headway.native import delta as native
from headway.partial import work_dtype
from headway.tokens import Tokens

FORMS = ("kernel", "chunked", "parallel", "recurrent")


class DeltaResult(NamedTuple):
    """The result out [B, H, T, E] in the dtype of the values, and the state [B, H, D, E] after the last token of
    each row, float32 or float64."""

    out: Tensor
    state: Tensor


@dataclass(frozen=True, eq=False)
class DeltaTransition:
    """The map S -> decay S + update that a run of tokens applies to any state before them.

        decay    product of (I - beta_t k_t k_t^T) diag(a_t), the last token's first      [B, H, D, D]
        update   the state after these tokens if the state before them is 0               [B, H, D, E]

    Transitions of consecutive runs compose, exactly and in any grouping (`then`), so that parts of a row can be
    computed separately. float32, or float64 for float64 keys.
    """

    decay: Tensor
    update: Tensor

    def then(self, later: "DeltaTransition") -> "DeltaTransition":
        """Returns the transition of these tokens followed by the `later` ones. Raises PatternError if the sizes
        differ."""
        if self.update.shape != later.update.shape or self.decay.dtype != later.decay.dtype:
            raise PatternError(
                f"DeltaTransition: updates of [batch, heads, D, E] = {[*self.update.shape]} in {self.update.dtype} and "
                f"{[*later.update.shape]} in {later.update.dtype} do not compose; both must be of one layer and batch"
            )
        return DeltaTransition(later.decay @ self.decay, later.apply(self.update))

    def apply(self, state: Tensor) -> Tensor:
        """Returns the state after these tokens, given the state [B, H, D, E] before them."""
        return self.decay @ state + self.update


def delta_attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    tokens: Tokens | None = None,
    past: Tensor | None = None,
    scale: float | None = None,
    unit_eps: float | None = None,
    erases: bool = True,
    form: str = "auto",
    sources: Sequence[Convolved] = (),
) -> DeltaResult:
    """Returns what queries read from a state that each token corrects:

        S_t = diag(a_t) S_(t-1) + beta_t k_t (v_t - k_t^T diag(a_t) S_(t-1))^T,      o_t = scale S_t^T q_t

    (Yang et al. 2024, "Gated Delta Networks", equation 10; with a decay per channel: Kimi Linear, 2025, equation 1),
    or, without `erases`, from one that each token only adds to, S_t = diag(a_t) S_(t-1) + beta_t k_t v_t^T (Dao and Gu
    2024, "Transformers are SSMs", section 7: k, v, q and beta are their B, x, C and step; with a decay per channel:
    Yang et al. 2023, "Gated Linear Attention", section 4).

    Args:
        q, k: [B, K, T, D];  v: [B, H, T, E]; key head i serves value heads i H/K .. (i+1) H/K - 1.
        log_decay: ln a_t <= 0 and finite: for each head [B, H, T], or for each channel of its keys [B, H, T, D].
        beta: strength of the correction, [B, H, T]; in [0, 1] for keys of length 1 (up to 2: eigenvalues down to -1).
        tokens: the tokens in the slots, by default numbered from 0. A document begins with a state of 0; empty slots
            change nothing and their result is 0.
        past: the state [B, H, D, E] before the first document of each row, by default 0.
        scale: factor on the queries, by default D^-0.5.
        unit_eps: if given, q and k are first divided by sqrt(x.x + unit_eps).
        erases: whether the state's prediction of a value is subtracted from it.
        form: "kernel" (the CPU kernels: float32 or bf16; memory linear in T, also with the backward), "chunked" (in
            blocks of slots: linear time), "parallel" (one block: all products), "recurrent" (token by token: the
            definition); "auto" takes "kernel" where it runs, otherwise "recurrent" for one token and "chunked" for
            more.
        sources: the convolutions that q, k and v are the results of, if they are. The backward of "kernel" then repeats
            the convolutions and keeps their inputs, which the convolutions keep anyway, instead of q, k and v (unless
            slots are empty or out of order).

    Computed in float32 (float64 for float64 inputs) and rounded once; "kernel" treats numbers below 2^-126 as 0. All
    forms have derivatives of any order; those of "kernel" beyond the first are those of "chunked".

    Raises:
        PatternError: if shapes, dtypes, devices or tokens do not fit together, or the form is unknown.
        BackendError: if form="kernel" and the kernels cannot run the call.
    """
    check_known(form, ("auto", *FORMS), "delta_attend: there is no form", error=PatternError)
    heads, tokens = _check(q, k, v, log_decay, beta, tokens, past)
    reason = native.unsupported_reason(q, k, v, log_decay, beta, past)
    if form == "kernel" and reason:
        raise BackendError(f'delta_attend: form="kernel" cannot run: {reason}; use form="auto"')
    if form == "auto":
        form = "recurrent" if reason and q.shape[2] == 1 else "chunked" if reason else "kernel"
    order = order_of(tokens)
    decays = log_decay if log_decay.dim() == 4 else log_decay.unsqueeze(-1)
    inputs = [order.arrange(order.zeroed(t)) for t in (q, k, v, decays, beta.unsqueeze(-1))]
    work = work_dtype(q.dtype)
    if past is None:  # expanded from one number, so that the backward keeps little
        past = q.new_zeros(1, dtype=work).expand(*v.shape[:2], q.shape[3], v.shape[3])
    scale = q.shape[3] ** -0.5 if scale is None else scale
    run = _Run(form, heads.group, native.Rule(order.begins, scale, unit_eps, erases))
    with exactly(q):
        if form == "kernel":
            inputs[3:] = (t.float() for t in inputs[3:])
            as_given = all(a is b for a, b in zip(inputs, (q, k, v), strict=False))
            out, state = _Native.apply(run, sources if as_given else (), *inputs, past)  # type: ignore[no-untyped-call]
        else:
            out, state = run(*inputs, past)
    return DeltaResult(order.zeroed(order.restore(out)), state)


def delta_transition(
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    *,
    tokens: Tokens | None = None,
    unit_eps: float | None = None,
    erases: bool = True,
    form: str = "auto",
) -> DeltaTransition:
    """Returns the transition that these tokens apply to any state before them, with one document per row. Arguments
    as in `delta_attend`. Raises PatternError for packed documents."""
    if tokens is not None and order_of(tokens).documents is not None:
        raise PatternError(
            "delta_transition: rows must hold one document each, but these tokens are packed; give each document its "
            "own row: Tokens.from_lengths instead of Tokens.packed"
        )
    rows, heads, _, value_dim = v.shape
    dim = k.shape[3]
    # Columns of a state do not interact: from the past [0, I] and the values [v, 0], the first E columns become the
    # update, and the last D columns decay I.
    values = torch.cat((v, v.new_zeros(*v.shape[:3], dim)), 3)
    work = work_dtype(v.dtype)
    zeros = v.new_zeros(rows, heads, dim, value_dim, dtype=work)
    identity = torch.eye(dim, dtype=work, device=v.device).expand(rows, heads, dim, dim)
    past = torch.cat((zeros, identity), 3)
    options: dict[str, Any] = {"tokens": tokens, "unit_eps": unit_eps, "erases": erases, "form": form}
    state = delta_attend(k, k, values, log_decay, beta, past=past, **options).state
    update, decay = state.split((value_dim, dim), 3)
    return DeltaTransition(decay, update)


class _Run(NamedTuple):
    """A call in torch's operations, for inputs in the order of their tokens."""

    form: str
    group: int
    rule: native.Rule

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Computes `DeltaResult` from q, k, v, log_decay [B, H, T, G], beta [B, H, T, 1] and past."""
        q, k, v = inputs[:3]
        rows, heads, count, value_dim = v.shape
        begins, scale, unit_eps, erases = self.rule
        q, k, values, log_decay, beta, state = (t.to(inputs[5].dtype) for t in inputs)
        if unit_eps is not None:
            q, k = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + unit_eps) for x in (q, k))
        q, k = (x.repeat_interleave(self.group, 1) for x in (q * scale, k))
        q, k, values, log_decay, beta = (t.flatten(0, 1) for t in (q, k, values, log_decay, beta))
        if begins is not None and len(begins) > 1:
            begins = begins.repeat_interleave(heads, 0)
        call = DeltaInputs(q, k, values, log_decay, beta, begins, state.flatten(0, 1), erases)
        if self.form == "recurrent":
            out, state = recurrent(call)
        else:
            out, state = chunked(call, max(count, 1) if self.form == "parallel" else None)
        return out.view(rows, heads, count, value_dim).to(v.dtype), state.view(rows, heads, -1, value_dim)


class _Native(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, sources: Sequence[Convolved], *inputs: Tensor) -> tuple[Tensor, Tensor]:
        ctx.run, ctx.heads = run, [source.heads for source in sources]
        kept = [t for source in sources for t in source[1:]] or inputs[:3]
        ctx.save_for_backward(*inputs[3:], *kept)
        ctx.set_materialize_grads(False)
        return native.forward(run.rule, *inputs)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_state: Tensor | None) -> tuple[Any, ...]:
        if d_out is None and d_state is None:
            return (None,) * 8
        saved, run = ctx.saved_tensors, ctx.run  # accessed only once, as activation checkpointing requires
        gates_and_past, qkv = saved[:3], saved[3:]
        if ctx.heads:
            qkv = [Convolved(heads, *qkv[5 * i : 5 * i + 5]).by_head() for i, heads in enumerate(ctx.heads)]
        inputs = (*qkv, *gates_and_past)
        if torch.is_grad_enabled():
            leaves = [t for t in inputs if t.requires_grad]
            results = run._replace(form="chunked")(*inputs)
            ends = [(y, dy) for y, dy in zip(results, (d_out, d_state), strict=True) if dy is not None]
            ys, dys = zip(*ends, strict=True)
            grads = iter(torch.autograd.grad(ys, leaves, dys, create_graph=True, allow_unused=True))
            return None, None, *(next(grads) if t.requires_grad else None for t in inputs)
        over = bool(ctx.heads)  # q, k and v were computed here: the kernels may overwrite them
        return None, None, *native.backward(run.rule, inputs, d_out, d_state, over)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    tokens: Tokens | None,
    past: Tensor | None,
) -> tuple[Heads, Tokens]:
    """Returns the heads and tokens of a call. Raises PatternError if its arguments do not fit together."""
    check_axes("delta_attend", q, k, v)
    heads = Heads.of(v.shape[1], k.shape[1])
    work = work_dtype(q.dtype)
    (rows, h, count, value_dim), dim = v.shape, k.shape[3]
    of_head = (rows, h, count)
    expected = {
        "q": (q, (k.shape,)),
        "k": (k, ((rows, k.shape[1], count, dim),)),
        "log_decay": (log_decay, (of_head, (*of_head, dim))),
        "beta": (beta, (of_head,)),
        **({} if past is None else {"past": (past, ((rows, h, dim, value_dim),))}),
    }
    for name, (t, shapes) in expected.items():
        if tuple(t.shape) not in [tuple(shape) for shape in shapes]:
            one_of = " or ".join(str([*shape]) for shape in shapes)
            raise PatternError(f"delta_attend: {name} must be {one_of} for v {[*v.shape]}, got {[*t.shape]}")
        if t.device != v.device or not t.is_floating_point():
            raise PatternError(
                f"delta_attend: {name} must be floating point on {v.device}, got {t.dtype} on {t.device}"
            )
    if {q.dtype, k.dtype} != {v.dtype} or (past is not None and past.dtype != work):
        raise PatternError(
            f"delta_attend: q, k and v must share a dtype, and past must be {work}; got {q.dtype}, {k.dtype}, {v.dtype}"
            + ("" if past is None else f" and {past.dtype}")
        )
    tokens = Tokens.range(count, device=v.device) if tokens is None else tokens
    if tokens.count != count or tokens.rows not in (1, rows) or tokens.device != v.device:
        raise PatternError(
            f"delta_attend: tokens describe {tokens.rows} rows of {tokens.count} slots on {tokens.device}, v holds "
            f"{rows} rows of {count} on {v.device}"
        )
    return heads, tokens
