"""The gated delta rule in torch's operations, in two ways: token by token, and by blocks of tokens.

Legend: N rows times heads, T slots, C slots of a block, D per key, E per value, G channels of a decay: 1 or D.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SIZE = {1: 64, 0: 16}
"""Slots of a block: at 1 for one decay of a whole head, at 0 for a decay of each channel, where a pair of slots has
D numbers."""


@dataclass(frozen=True, eq=False)
class DeltaInputs:
    """The inputs of a form, in the order of tokens, with zeros in empty slots.

    q, k        queries, already scaled, and keys          [N, T, D]
    v           values                                     [N, T, E]
    log_decay   ln a_t <= 0; 0 in empty slots               [N, T, G]
    beta        0 in empty slots                             [N, T, 1]
    begins      where another document begins, whose state is reset to 0; None if nowhere        bool [N|1, T]
    state       before the first token                       [N, D, E]
    erases      whether the state's prediction is subtracted from v
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor
    begins: Tensor | None
    state: Tensor
    erases: bool = True


Result = tuple[Tensor, Tensor]


def recurrent(at: DeltaInputs) -> Result:
    """Returns the results of the queries [N, T, E], and the state after the last token [N, D, E], by the definition:

    S_t = diag(a_t) S_(t-1) + beta_t k_t (v_t - k_t^T diag(a_t) S_(t-1)),        o_t = q_t^T S_t

    Without `erases`, the term subtracted from v_t is left out.
    """
    state, out = at.state, []
    decay = at.log_decay.exp().unsqueeze(-1)
    for t in range(at.q.shape[1]):
        if at.begins is not None:
            state = state.masked_fill(at.begins[:, t, None, None], 0.0)
        state, k = decay[:, t] * state, at.k[:, t].unsqueeze(-1)
        value = at.v[:, t].unsqueeze(1) - k.mT @ state if at.erases else at.v[:, t].unsqueeze(1)
        state = state + k @ (at.beta[:, t].unsqueeze(-1) * value)
        out.append(at.q[:, t].unsqueeze(1) @ state)
    return torch.cat(out, 1) if out else at.v, state


def chunked(at: DeltaInputs, size: int | None = None) -> Result:
    """Returns the same in blocks of `size` slots, in O(T) time; with a single block it is the parallel form.

    With c_i the sum of log decays up to slot i of a block, S the state before it and u_i = beta_i (v_i - the state's
    prediction), a triangular system is solved (the UT transform; Yang et al. 2024, sections 3.2 and 3.3):

        u_i = beta_i (v_i - (k_i e^(c_i))^T S) - sum_(j < i) beta_i (sum_d k_id k_jd e^(c_id - c_jd)) u_j
        o_i = (q_i e^(c_i))^T S + sum_(j <= i) (sum_d q_id k_jd e^(c_id - c_jd)) u_j
        S'  = diag(e^(c_C)) S + sum_j (k_j e^(c_C - c_j)) u_j^T

    and without erasing u_i = beta_i v_i. No exponent is above 0, however strong the decay.
    """
    size = size or SIZE[at.log_decay.shape[-1] == 1]
    state, out = at.state, []
    for begin in range(0, at.q.shape[1], size):
        q, k, v, log_decay, beta = (
            t[:, begin : begin + size] for t in (at.q, at.k, at.v, at.log_decay, at.beta)
        )
        begins = None if at.begins is None else at.begins[:, begin : begin + size]
        read, state = _block(DeltaInputs(q, k, v, log_decay, beta, begins, state, at.erases))
        out.append(read)
    return torch.cat(out, 1) if out else at.v, state


def _block(at: DeltaInputs) -> Result:
    q, k, state, count = at.q, at.k, at.state, at.q.shape[1]
    earlier = torch.ones(count, count, dtype=torch.bool, device=q.device).tril()
    if at.begins is None:
        c = at.log_decay.cumsum(1)
        head = tail = whole = None
    else:
        document = at.begins.cumsum(1)  # 0: the document that the state before the block belongs to
        earlier = earlier & (document[:, :, None] == document[:, None, :])
        c = earlier.to(q.dtype) @ at.log_decay
        head, tail = (document[..., None] == end for end in (0, document[:, -1, None, None]))
        whole = head[:, -1:]
    last = c[:, -1:]
    into, onwards, through = (_power(x, seen) for x, seen in ((c, head), (last - c, tail), (last.mT, whole)))
    rows = (q, k) if at.erases else (q,)
    if c.shape[-1] == 1:
        between = _power(c - c.mT, earlier)
        pairs = [(x @ k.mT) * between for x in rows]
    else:
        between = _power(c.unsqueeze(2) - c.unsqueeze(1), earlier.unsqueeze(-1)) * k.unsqueeze(1)
        pairs = [(between @ x.unsqueeze(-1)).squeeze(-1) for x in rows]
    u = at.beta * (at.v - (k * into) @ state if at.erases else at.v)
    if at.erases:
        system = at.beta * pairs[1].tril(-1) + torch.eye(count, dtype=q.dtype, device=q.device)
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    return (q * into) @ state + pairs[0] @ u, through * state + (k * onwards).mT @ u


def _power(x: Tensor, seen: Tensor | None) -> Tensor:
    """Returns e^x where `seen`, 0 elsewhere."""
    return torch.exp(x if seen is None else x.masked_fill(~seen, -torch.inf))
