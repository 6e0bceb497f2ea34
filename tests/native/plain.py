"""Attention by the formula, with scores, dropout, the logsumexp and gradients, in the dtype of its inputs."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from headway.attention import KeyValues, attend_keys
from headway.attention.dropout import keep_scale
from headway.native import loader
from headway.partial import Partial
from headway.patterns import Pattern, visible
from headway.scores import Score
from headway.tokens import Tokens
from tests.native.conftest import OF_PAIRS
from tests.tolerance import assert_rounded_once, assert_unbiased, assert_within_reference

NAMES = ("out", "lse", "dq", "dk", "dv", "dtable")


@dataclass(frozen=True)
class Problem:
    """Tensors, tokens and all options of one call; `split` is where the keys are cut into two sets."""

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
        """Computes softmax(scores) v and logsumexp(scores), every product and sum in the dtype of the inputs."""
        weights, lse = self.weights()
        return Partial(weights @ self._of_heads(self.v), lse)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Returns the factors of the values [B, H, T, S], with dropout, and the logsumexp [B, H, T]."""
        q, k = self.q, self._of_heads(self.k)
        scores = q @ k.transpose(-1, -2) * self.scale
        for step in self.scores:
            scores = step.apply(scores, q, self.q_tokens, self.k_tokens, self.scale)
        mask = self.visible
        sees_any = mask.any(-1, keepdim=True)
        scores = scores.masked_fill(~mask & sees_any, float("-inf"))
        weights = torch.softmax(scores, -1).masked_fill(~mask, 0.0)
        lse = torch.logsumexp(scores, -1).masked_fill(~sees_any.squeeze(-1), float("-inf"))
        return weights * self.kept.to(weights.dtype) if self.more.get("dropout") else weights, lse

    def _of_heads(self, t: Tensor) -> Tensor:
        return t.repeat_interleave(self.q.shape[1] // self.k.shape[1], 1)

    @property
    def scale(self) -> float:
        scale = self.more.get("scale")
        return float(self.q.shape[-1] ** -0.5 if scale is None else scale)

    @property
    def scores(self) -> Sequence[Score]:
        score = self.more.get("score", ())
        return (score,) if isinstance(score, Score) else score

    def run(self, backend: str = "native") -> Partial:
        """Computes the same by a backend, over one or two sets of keys."""
        cuts = [0, self.k.shape[2]] if self.split is None else [0, self.split, self.k.shape[2]]
        keys = [
            KeyValues(self.k[:, :, a:b], self.v[:, :, a:b], self.k_tokens.slice(a, b))
            for a, b in pairwise(cuts)
        ]
        options = {"scale": None, **self.more}
        return attend_keys(self.q, self.q_tokens, keys, self.pattern, backend=backend, **options)


def results(problem: Problem, method: str, d_out: Tensor, d_lse: Tensor) -> list[Tensor]:
    """Returns out, lse and the gradients of q, k, v and of the tables of the scores, by "formula" or a backend."""
    leaves = [t.detach().clone().requires_grad_() for t in (problem.q, problem.k, problem.v)]
    steps, tables = [], []
    for step in problem.scores:
        parameters = tuple(t.detach().to(problem.q.dtype).requires_grad_() for t in step.parameters)
        steps.append(step.with_parameters(parameters))
        tables += parameters
    q, k, v = leaves
    copied = replace(problem, q=q, k=k, v=v, more={**problem.more, "score": tuple(steps)})
    part = copied.formula() if method == "formula" else copied.run(method)
    sees_any = part.lse > float("-inf")
    loss = (part.out * d_out.to(part.out.dtype)).sum()
    loss = loss + (part.lse.masked_fill(~sees_any, 0.0) * d_lse.to(part.lse.dtype)).sum()
    grads = torch.autograd.grad(loss, [*leaves, *tables], allow_unused=True, materialize_grads=True)
    return [part.out.detach(), part.lse.detach(), *grads]


def terms(problem: Problem, lse: Tensor) -> list[Tensor | float]:
    """Returns the magnitude of each result's terms where they cancel, for standard normal q, k, v and gradients, as
    `terms` of `assert_within_reference`. A weight errs relatively as its score does absolutely, by ulps of the
    logsumexp."""
    square = (problem.to(torch.float64).weights()[0] * lse.abs().clamp_min(1.0).unsqueeze(-1)).square()
    of_query, of_head = (square.sum(n).sqrt().unsqueeze(-1) for n in (-1, -2))
    of_key = of_head.square().unflatten(1, (problem.k.shape[1], -1)).sum(2).sqrt()
    width = problem.v.shape[3] ** 0.5
    steep = width * abs(problem.scale)
    tables = [problem.q.shape[2] ** 0.5 * width] * sum(len(step.parameters) for step in problem.scores)
    return [of_query, 1.0, steep * of_query, steep * of_key, of_key, *tables]


@dataclass(frozen=True)
class Reference:
    """The references of a problem: in float64, in the dtype of its inputs, and the magnitudes of the terms."""

    exact: list[Tensor]
    low: list[Tensor]
    terms: list[Tensor | float]

    @staticmethod
    def of(problem: Problem, d_out: Tensor, d_lse: Tensor) -> "Reference":
        exact = results(problem.to(torch.float64), "formula", d_out, d_lse)
        low = results(problem, "formula", d_out, d_lse)
        if problem.q.dtype != torch.float32:  # the logsumexp is float32 in any case
            low[1] = problem.to(torch.float32).formula().lse
        return Reference(exact, low, terms(problem, exact[1].masked_fill(exact[1] == float("-inf"), 0.0)))


known: dict[bytes, Reference] = {}
"""References of recent problems: the next level has the same ones, and the formula takes longer than the kernels."""


def reference(problem: Problem, d_out: Tensor, d_lse: Tensor) -> Reference:
    sides = (problem.q_tokens, problem.k_tokens)
    tensors = (problem.q, problem.k, problem.v, d_out, d_lse, *(t for s in sides for t in vars(s).values()))
    tensors += tuple(t for step in problem.scores for t in step.parameters)
    digest = hashlib.sha256(f"{problem.pattern} {problem.more} {problem.q.dtype}".encode())
    for t in tensors:
        digest.update(
            t.contiguous().flatten().view(torch.uint8).numpy() if isinstance(t, Tensor) else str(t).encode()
        )
    key = digest.digest()
    if key not in known:
        if len(known) == 24:
            del known[next(iter(known))]
        known[key] = Reference.of(problem, d_out, d_lse)
    return known[key]


def check(problem: Problem, method: str = "native") -> None:
    """Checks that output, logsumexp and gradients err no more than the formula in the dtype of the inputs allows."""
    dtype = problem.q.dtype
    rounded = (step.with_parameters(tuple(t.to(dtype) for t in step.parameters)) for step in problem.scores)
    problem = replace(problem, more={**problem.more, "score": tuple(rounded)})
    d_out = torch.randn(*problem.q.shape[:3], problem.v.shape[-1]).to(dtype)
    d_lse = torch.randn(problem.q.shape[:3])
    expected = reference(problem, d_out, d_lse)
    results_of_method = results(problem, method, d_out, d_lse)
    sees_any = problem.visible.any(-1)
    assert torch.equal(results_of_method[1] > float("-inf"), sees_any)
    for name, actual, exact, low, size in zip(
        NAMES, results_of_method, expected.exact, expected.low, expected.terms, strict=False
    ):
        if name == "lse":
            actual, exact, low = (t[sees_any].unsqueeze(-1) for t in (actual, exact, low))
        assert actual.dtype == (torch.float32 if name == "lse" else dtype), name
        assert_within_reference(actual, exact, low, name, size, f"attention {str(dtype)[6:]} {name}")
        if dtype == torch.bfloat16 and name in ("out", "dv"):
            assert_rounded(actual, exact, size, problem, method)


def assert_rounded(
    actual: Tensor, exact: Tensor, size: Tensor | float, problem: Problem, method: str
) -> None:
    """Checks that sums in float32 are rounded once, except those over each of several sets. If weights are rounded
    before, that is unbiased, too, unless they are alike or all multiplied by the same factor first."""
    if method == "native" and problem.split is None and loader.search().library.level not in OF_PAIRS:
        assert_rounded_once(actual, exact, str(problem.pattern), size)
    elif problem.scale and not problem.more.get("dropout"):
        assert_unbiased(actual, exact, str(problem.pattern))
