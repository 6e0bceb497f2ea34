"""Mixtures of experts in place of a feed-forward: a router chooses a few of many experts for each token.

Legend: R rows (tokens), M width of the model, E experts, K of them for each row, F width of an expert's hidden layer.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headway.errors import ConfigError, check_known, check_whole
from headway.nn.expert_rows import expert_rows
from headway.nn.feedforward import FeedForward
from headway.nn.products import of_few_counts
from headway.parallel import ExpertParallel
from headway.tokens import Tokens

RouterScore = Literal["softmax", "sigmoid"]
TINY = 1e-20
"""Lower bound of the sum that weights are divided by, because sigmoids may all be 0."""


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a layer, and how they are chosen for a row x:

        s = score(x Wr + b)                                       E numbers: one softmax, or the sigmoid of each
        chosen = the `top` with the largest s + c                 c [E] affects the choice only, not the weights
        y = sum of w_e expert_e(x) over the chosen + shared(x)    w = `scale` s, or `scale` s / (sum of s of the chosen
                                                                  + `sum_eps`)

    (Shazeer et al. 2017, section 2.1; Jiang et al. 2024, "Mixtral of Experts", section 2.1; with c: DeepSeek-AI 2024,
    "DeepSeek-V3", section 2.1.2.) A softmax over the scores of the chosen experts alone (gpt-oss, Granite) equals a
    `normalized` one over all.

    Attributes:
        count: E. top: K.
        hidden: F; 0 stands for that of the model's dense layers (`ModelSpec.hidden`).
        shared: width of the hidden layer of a shared expert, which all rows pass through; several are equal to one of
            their total width. 0 means none.
        shared_gate: whether the output of the shared expert is multiplied by sigmoid(x Ws) (Qwen2-MoE).
        score: "softmax" or "sigmoid". normalized: whether the weights of the chosen experts sum to `scale`.
        router_bias: whether there is a b. choice_bias: whether there is a c.
        groups, top_groups: experts are chosen only from the best `top_groups` of `groups` equal groups of consecutive
            experts; a group is ranked by the sum of its two largest s + c.
        scale: factor on the weights.
        sum_eps: added to the sum that `normalized` weights are divided by, before `scale`.
        aux_loss_coef, z_loss_coef: factors on the losses that training adds (`headway.nn.router_losses`); 0 adds none.
    """

    count: int
    top: int
    hidden: int = 0
    shared: int = 0
    shared_gate: bool = False
    score: RouterScore = "softmax"
    normalized: bool = True
    router_bias: bool = False
    choice_bias: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    sum_eps: float = 0.0
    aux_loss_coef: float = 0.0
    z_loss_coef: float = 0.0

    def __post_init__(self) -> None:
        for name in ("count", "top", "hidden", "shared", "groups", "top_groups"):
            check_whole(f"Experts: {name}", getattr(self, name), 0 if name in ("hidden", "shared") else 1)
        check_known(self.score, get_args(RouterScore), "Experts: there is no score")
        size = self.count // self.groups
        wrong = {
            f"groups={self.groups} must divide {self.count} experts into groups of two or more": (
                self.groups > 1 and (self.count % self.groups > 0 or size < 2)
            ),
            f"top_groups={self.top_groups} is more than groups={self.groups}": self.top_groups > self.groups,
            f"top={self.top} is more than the {self.top_groups * size} experts of {self.top_groups} groups": (
                self.top > self.top_groups * size
            ),
            "shared_gate=True needs a shared expert, but shared=0": self.shared_gate and not self.shared,
            f"scale must be a finite number above 0, got {self.scale!r}": not 0 < self.scale < math.inf,
            **{
                f"{name} must be a finite number of at least 0, got {getattr(self, name)!r}": (
                    not 0 <= getattr(self, name) < math.inf
                )
                for name in ("sum_eps", "aux_loss_coef", "z_loss_coef")
            },
        }
        for what, is_so in wrong.items():
            if is_so:
                raise ConfigError(f"Experts: {what}")

    @property
    def units(self) -> int:
        """Number of hidden units that a row passes through."""
        return self.top * self.hidden + self.shared


class Routed(NamedTuple):
    """The output of a router for the rows of a layer: logits [R, E], and which rows are tokens [R], or None if all
    are."""

    experts: Experts
    logits: Tensor
    real: Tensor | None


class Router(nn.Linear):
    """Chooses the experts of each row, and their weights. Computed in float32 or wider, whatever the dtype of its
    matrix [E, M], because a rounded score may choose another expert.

    `e_score_correction_bias` is c, float32 in models of every dtype. It gets no gradient, and training leaves it
    unchanged. If `heard` is a list, outputs with gradients are appended to it."""

    e_score_correction_bias: Tensor | None
    heard: list[Routed] | None

    def __init__(self, experts: Experts, width: int) -> None:
        super().__init__(width, experts.count, bias=experts.router_bias)
        self.how, self.heard = experts, None
        bias = torch.zeros(experts.count) if experts.choice_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, real: Tensor | None = None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Returns the numbers of the chosen experts of x [R, M], and their weights, both [R, K], in descending order
        of s + c."""
        how, dtype = self.how, torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.to(dtype)
            logits = F.linear(x.to(dtype), self.weight.to(dtype), bias)
        if self.heard is not None and torch.is_grad_enabled():
            self.heard.append(Routed(how, logits, real))
        scores = logits.softmax(-1) if how.score == "softmax" else logits.sigmoid()
        choice = scores.detach()
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias
        if how.groups > 1:
            grouped = choice.unflatten(-1, (how.groups, -1))
            best = grouped.topk(2).values.sum(-1).topk(how.top_groups).indices
            is_rejected = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
            choice = grouped.masked_fill(is_rejected[..., None], -math.inf).flatten(-2)
        chosen = choice.topk(how.top).indices
        weights = scores.gather(-1, chosen)
        if how.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + how.sum_eps).clamp_min(TINY)
        return chosen, weights * how.scale

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        after = self.e_score_correction_bias
        if before is not None and after is not None:
            fresh = before.is_meta and not after.is_meta
            self.e_score_correction_bias = (
                torch.zeros(before.shape, device=after.device) if fresh else before.to(after.device)
            )
        return self


class MixtureOfExperts(nn.Module):
    """`Experts` as a layer: feed-forwards behind a `Router`. Arguments other than `experts` are those of `FeedForward`.

    Rows are sorted by expert, and each chosen expert runs once, on all of its rows: for a single row only the weights
    of K experts are read. The outputs of a row's experts are summed in the order of their scores (in float32 training
    in the order of their numbers, `headway.nn.expert_rows`), so that the sum does not depend on the other rows. If
    gradients are recorded, experts without rows run on empty inputs, too, so that their gradient is 0.

    Parameters have the names that most families use: gate (the router), experts.N, shared_expert, shared_expert_gate.
    """

    def __init__(
        self,
        experts: Experts,
        width: int,
        activation: str | None = None,
        bias: bool = False,
        dropout: float = 0.0,
        *,
        gated: bool = False,
    ) -> None:
        super().__init__()
        if not experts.hidden:
            raise ConfigError(
                "MixtureOfExperts: experts must have hidden of at least 1 here; hidden=0 is for ModelSpec only"
            )

        def feed_forward(hidden: int) -> FeedForward:
            return FeedForward(width, hidden, activation, bias, dropout, gated=gated)

        self.gate = Router(experts, width)
        self.experts = nn.ModuleList(feed_forward(experts.hidden) for _ in range(experts.count))
        self.shared_expert = feed_forward(experts.shared) if experts.shared else None
        self.shared_expert_gate = nn.Linear(width, 1, bias=False) if experts.shared_gate else None
        self.ranks: ExpertParallel | None = None

    def divide(self, ranks: ExpertParallel) -> range:
        """Keeps only the experts of a rank, which then exchanges rows with the other ranks; returns their numbers."""
        local = ranks.share(len(self.experts))
        for i in {*range(len(self.experts))} - {*local}:
            self.experts[i] = nn.Identity()
        self.ranks = ranks
        return local

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        """Computes the layer, [..., M] -> [..., M]. For router losses, the `tokens` of x [B, T, M] say which rows
        are tokens."""
        rows = x.reshape(-1, x.shape[-1])
        listens = tokens is not None and self.gate.heard is not None
        real = tokens.valid.expand(x.shape[:-1]).flatten() if tokens is not None and listens else None
        if self.ranks is not None and self.ranks.same_rows:
            y = self.ranks.of_parts(rows, self._routed)
        else:
            y = self._routed(rows, real)
        if self.shared_expert is not None:
            shared = self.shared_expert(rows)
            if self.shared_expert_gate is not None:
                shared = self.shared_expert_gate(rows).sigmoid() * shared
            y = y + shared
        return y.view(x.shape)

    def _routed(self, rows: Tensor, real: Tensor | None = None) -> Tensor:
        """Returns the weighted sum of the outputs of the chosen experts, for each row."""
        chosen, weights = self.gate(rows, real)
        order = chosen.flatten().argsort(stable=True)
        back = order.argsort()
        counts = chosen.flatten().bincount(minlength=len(self.experts))
        if self.ranks is None and (y := expert_rows(self.experts, rows, weights, order, counts)) is not None:
            return y
        xs: Tensor = _Reordered.apply(rows, order, back)  # type: ignore[no-untyped-call]
        ranks = self.ranks
        ys = self._each(xs, counts.tolist()) if ranks is None else ranks.apply(xs, counts, self._each)
        outs: Tensor = _Reordered.apply(ys, back, order)  # type: ignore[no-untyped-call]
        return torch.bmm(weights[:, None].to(outs.dtype), outs.view(*chosen.shape, rows.shape[-1]))[:, 0]

    def _each(self, rows: Tensor, counts: list[int]) -> Tensor:
        """Returns the outputs of this rank's experts, each applied to its own rows, concatenated."""
        local = [expert for expert in self.experts if not isinstance(expert, nn.Identity)]
        every = torch.is_grad_enabled() or not len(rows)
        parts = zip(local, rows.split(counts), strict=True)
        return torch.cat([of_few_counts(expert, part) for expert, part in parts if every or len(part)])


class _Reordered(torch.autograd.Function):
    """Rows x [R, N] in another order: row i of the result [K R, N] is row order[i] // K of x; `back` is the inverse
    of `order`. The gradient is gathered, not scattered, so that its sums have a fixed order."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(order, back)
        ctx.each = max(len(order) // max(len(x), 1), 1)
        return x.index_select(0, order // ctx.each)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        order, back = ctx.saved_tensors
        (dy,) = grads
        gathered: Tensor = _Reordered.apply(dy, back, order)  # type: ignore[no-untyped-call]
        return gathered.view(-1, ctx.each, dy.shape[-1]).sum(1), None, None
