"""Attention as the formula says it, with scores, dropout, the logsumexp and gradients, in the dtype of its inputs."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.attention.dropout import keep_scale
from headway.partial import Partial
from headway.patterns import Pattern, visible
from headway.scores import Score
from headway.tokens import Tokens

NAMES = ("out", "lse", "dq", "dk", "dv", "dtable")


@dataclass(frozen=True)
class Problem:
    """Tensors, tokens and everything else of one call; `split` says where the keys are cut into sets."""

    q: Tensor
    k: Tensor
    v: Tensor
    pattern: Pattern
    q_tokens: Tokens
    k_tokens: Tokens
    more: dict[str, Any] = field(default_factory=dict)
    split: int | None = None

    @staticmethod
    def random(
        pattern: Pattern,
        q_tokens: Tokens,
        k_tokens: Tokens,
        dtype: torch.dtype = torch.float32,
        rows: int = 2,
        heads: tuple[int, int] = (4, 2),
        dims: tuple[int, int] = (16, 16),
        split: int | None = None,
        **more: Any,
    ) -> "Problem":
        sizes = (heads[0], q_tokens, dims[0]), (heads[1], k_tokens, dims[0]), (heads[1], k_tokens, dims[1])
        q, k, v = (torch.randn(rows, h, t.count, d).to(dtype) for h, t, d in sizes)
        return Problem(q, k, v, pattern, q_tokens, k_tokens, more, split)

    def to(self, dtype: torch.dtype) -> "Problem":
        q, k, v = (t.to(dtype) for t in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v)

    @property
    def visible(self) -> Tensor:
        """bool [B, H, T, S]"""
        mask = visible(self.pattern, self.q_tokens, self.k_tokens)
        return mask.expand(*self.q.shape[:3], self.k.shape[2])

    @property
    def kept(self) -> Tensor:
        """The factors of dropout, float64 [B, H, T, S]."""
        rows, heads, queries, keys = (torch.arange(n) for n in (*self.q.shape[:3], self.k.shape[2]))
        p, seed = self.more["dropout"], self.more["seed"]
        return keep_scale(seed, p, rows, heads, queries[None], keys[None], torch.float64)

    def formula(self) -> Partial:
        """softmax(scores) v and logsumexp(scores), every product and sum in the dtype of the inputs."""
        q, group = self.q, self.q.shape[1] // self.k.shape[1]
        k, v = (t.repeat_interleave(group, 1) for t in (self.k, self.v))
        scale = self.more.get("scale")
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = q @ k.transpose(-1, -2) * scale
        for step in self.scores:
            scores = step.apply(scores, q, self.q_tokens, self.k_tokens, scale)
        mask = self.visible
        some = mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask & some, float("-inf"))
        weights = torch.softmax(scores, -1).masked_fill(~mask, 0.0)
        lse = torch.logsumexp(scores, -1).masked_fill(~some.squeeze(-1), float("-inf"))
        if self.more.get("dropout"):
            weights = weights * self.kept.to(weights.dtype)
        return Partial(weights @ v, lse)

    @property
    def scores(self) -> Sequence[Score]:
        score = self.more.get("score", ())
        return (score,) if isinstance(score, Score) else score

    def run(self, backend: str = "native") -> Partial:
        """The same by a backend, over one or two sets of keys."""
        cuts = [0, self.k.shape[2]] if self.split is None else [0, self.split, self.k.shape[2]]
        keys = [
            KeyValues(self.k[:, :, a:b], self.v[:, :, a:b], self.k_tokens.slice(a, b))
            for a, b in pairwise(cuts)
        ]
        more = {"scale": None, **self.more}
        return attend_keys(self.q, self.q_tokens, keys, self.pattern, backend=backend, **more)


def results(problem: Problem, how: str, d_out: Tensor, d_lse: Tensor) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and of the tables of the scores, by "formula" or a backend."""
    leaves = [t.detach().clone().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    steps, tables = [], []
    for step in problem.scores:
        own = tuple(t.detach().to(problem.q.dtype).requires_grad_() for t in step.parameters)
        steps.append(step.with_parameters(own))
        tables += own
    q, k, v = leaves
    asked = replace(problem, q=q, k=k, v=v, more={**problem.more, "score": tuple(steps)})
    part = asked.formula() if how == "formula" else asked.run(how)
    some = part.lse > float("-inf")
    loss = (part.out * d_out.to(part.out.dtype)).sum()
    loss = loss + (part.lse.masked_fill(~some, 0.0) * d_lse.to(part.lse.dtype)).sum()
    grads = torch.autograd.grad(loss, [*leaves, *tables], allow_unused=True, materialize_grads=True)
    return [part.out.detach(), part.lse.detach(), *grads]


def check(problem: Problem, how: str = "native") -> None:
    """Output, logsumexp and all gradients err at most twice as much as the formula in the dtype of the inputs.

    Beyond that: the rounding, in float32, of sums of as many terms (its square root in ulps), that of exp(score),
    whose relative error is that of the score (its largest value in ulps), and one ulp for a result in bfloat16.
    """
    q, k = problem.q, problem.k
    d_out = torch.randn(*q.shape[:3], problem.v.shape[-1])
    d_lse = torch.randn(q.shape[:3])
    exact = results(problem.to(torch.float64), "formula", d_out, d_lse)
    low = results(problem, "formula", d_out, d_lse)
    got = results(problem, how, d_out, d_lse)
    some = problem.visible.any(-1)
    assert torch.equal(got[1] > float("-inf"), some)
    count = max(k.shape[2], q.shape[2] * q.shape[1] // k.shape[1], q.shape[3], problem.v.shape[3])
    top = exact[1][some].abs().max().item() if some.any() else 0.0
    steep = max(1.0, 3.0 * abs(problem.more.get("scale") or 0.0))
    more = {"dq": steep, "dk": steep, "dtable": q.shape[2] ** 0.5}
    for name, a, b, c in zip(NAMES, got, exact, low, strict=False):
        if name == "lse":
            a, b, c = a[some], b[some], c[some]
        assert a.dtype == (torch.float32 if name == "lse" else q.dtype), name
        assert torch.isfinite(a).all(), f"{name}: not finite"
        if not a.numel():
            continue
        terms = problem.v.shape[-1] ** 0.5 * more.get(name, 1.0)
        size = max(b.abs().max().item(), terms)
        ulps = torch.finfo(torch.float32).eps * (count**0.5 + top)
        ulps += torch.finfo(torch.bfloat16).eps if a.dtype == torch.bfloat16 else 0.0
        error, allowed = ((t.double() - b).abs().max().item() for t in (a, c))
        assert error <= 2 * allowed + ulps * size, (
            f"{name}: error {error:.3g}, reference {allowed:.3g}, slack {ulps * size:.3g}"
        )
