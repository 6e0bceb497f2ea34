"""Attention over a subset of the keys, as a value that can be merged with others.

Shapes: out [..., D], lse [...] (natural log; float64 for float64 outputs, else float32).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of sums over numbers of `dtype`: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True, eq=False)
class Partial:
    """The attention output and log-sum-exp, (out, lse), of some queries over one set of keys.

    out = sum_j exp(s_j) v_j / sum_j exp(s_j)   [..., D]
    lse = ln sum_j exp(s_j)                     [...]

    Over disjoint key sets `merge` is associative and commutative; the empty set, (0, -inf), is its identity on either
    side; merging a partial with itself leaves `out` and adds ln 2 to `lse`. Proof in
    docs/algebra.md. (The running state of FlashAttention, Dao et al. 2022, section 3.1, as a value.)
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def empty_like(out: Tensor) -> "Partial":
        """Returns the partial of the empty key set, for outputs of the shape, dtype and device of `out`."""
        lse = torch.full(out.shape[:-1], float("-inf"), dtype=work_dtype(out.dtype), device=out.device)
        return Partial(torch.zeros_like(out), lse)

    def merge(self, other: "Partial") -> "Partial":
        """Returns the exact partial over the union of both key sets, which must be disjoint."""
        return merge_all([self, other])

    def with_sink(self, logit: Tensor) -> "Partial":
        """Returns the exact partial with one more key, whose score is `logit` [...] and whose value is 0:

            merge(Partial(0, logit)) = (sigmoid(lse - logit) out, ln(exp(lse) + exp(logit)))

        It allocates no zeros; differentiable in out, lse and logit. An empty row gives (0, logit).
        (The learned sinks of gpt-oss: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card", section 2.2.)
        """
        logit = logit.to(self.lse.dtype)
        minus_inf = float("-inf")
        excess = (self.lse - logit).masked_fill(self.lse == minus_inf, minus_inf)  # -inf - -inf is NaN
        out = (self.out * torch.sigmoid(excess).unsqueeze(-1)).to(self.out.dtype)
        return Partial(out, torch.logaddexp(self.lse, logit))


def merge_all(parts: Sequence[Partial]) -> Partial:
    """Returns the partial over the union of disjoint key sets.

    lse = ln sum_i exp(lse_i),   out = sum_i exp(lse_i - lse) out_i

    Computed in the dtype of `lse`; differentiable in every out_i and every finite lse_i. A row that is empty in all
    parts stays (0, -inf) and passes zero gradient.
    """
    assert len(parts), "merge_all needs at least one partial: the empty set has no shape of its own"
    if len(parts) == 1:
        return parts[0]
    lse = torch.stack([p.lse for p in parts])
    top = lse.amax(0).detach()
    top = torch.where(top == float("-inf"), torch.zeros_like(top), top)  # an empty row: -inf - -inf is NaN
    weight = torch.exp(lse - top)
    total = weight.sum(0)
    nonempty = total > 0
    divisor = torch.where(nonempty, total, torch.ones_like(total))
    out = torch.stack([p.out for p in parts])
    mixed = ((weight / divisor).unsqueeze(-1) * out.to(lse.dtype)).sum(0)
    minus_inf = torch.full_like(total, float("-inf"))
    return Partial(mixed.to(parts[0].out.dtype), torch.where(nonempty, torch.log(divisor) + top, minus_inf))
