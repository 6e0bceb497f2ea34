"""Score modifications: steps that change the scaled scores before the softmax; lse is computed after them.

Legend: B rows, H query heads, T queries, S keys, D per head.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from headway.errors import PatternError
from headway.tokens import Tokens


def distance(q: Tokens, k: Tokens) -> Tensor:
    """Returns k.position - q.position for every pair: int64 [B|1, T, S]."""
    return k.positions.unsqueeze(-2) - q.positions.unsqueeze(-1)


class Score(ABC):
    """One step of the list `score=` of `attend`; steps are applied in order.

    `by_slot` is True if the step depends on the slots of one call (a bias tensor), so that only backends that compute
    all T x S scores at once support it; `learned` names the field with the tensor that may need a gradient.
    """

    by_slot = False
    learned: ClassVar[str | None] = None

    @abstractmethod
    def apply(self, score: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens, scale: float) -> Tensor:
        """Maps scores [B, H, T, S] (already scaled) and q [B, H, T, D] to new scores, differentiably in all tensors."""

    @property
    def heads(self) -> int | None:
        """The number of query heads that the step has values for; None for any."""
        return None

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that may need gradients."""
        return () if self.learned is None else (getattr(self, self.learned),)

    def with_parameters(self, values: tuple[Tensor, ...]) -> "Score":
        """Returns the same step with other tensors for its `parameters`."""
        assert len(values) == len(self.parameters)
        return replace(self, **{str(self.learned): values[0]}) if values else self  # type: ignore[type-var]

    def select_heads(self, heads: Tensor) -> "Score":
        """Returns the step for these query heads only, in that order."""
        return self


def wrong_heads(step: Score, heads: int) -> str | None:
    """Returns why a step cannot be applied to `heads` query heads; None if it can."""
    right = step.heads in (None, heads)
    return None if right else f"{type(step).__name__} is for {step.heads} heads, the call has {heads}"


def check_heads(step: Score, heads: int) -> None:
    """Raises PatternError if a step has values for another number of query heads."""
    if reason := wrong_heads(step, heads):
        raise PatternError(reason)


def steps_of(score: Score | Sequence[Score]) -> tuple[Score, ...]:
    """Returns the value of `score=`, one step or several, as a tuple. Raises PatternError for anything else."""
    if isinstance(score, Score):
        return (score,)
    steps = tuple(score) if isinstance(score, Sequence) else (score,)
    for step in steps:
        if not isinstance(step, Score):
            is_class = isinstance(step, type)
            got = (
                f"the class {step.__name__}; use an instance of it"
                if is_class
                else f"a {type(step).__name__}"
            )
            raise PatternError(f"score: each step must be a Score such as SoftCap(30.0), got {got}")
    return steps


@dataclass(frozen=True)
class SoftCap(Score):
    """cap * tanh(score / cap). (Gemma 2 report, section 2, "Logit soft-capping".)"""

    cap: float

    def __post_init__(self) -> None:
        if not self.cap > 0:
            raise PatternError(f"SoftCap: cap must be greater than 0, got {self.cap}")

    def apply(self, score: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens, scale: float) -> Tensor:
        return torch.tanh(score / self.cap) * self.cap


@dataclass(frozen=True)
class ALiBi(Score):
    """score - slope_h * |distance|. (Press et al. 2021, "Train short, test long", section 3.)

    Without `slopes`, head h of H (a power of two) has 2^(-8 (h + 1) / H); for any other H the published rule applies:
    the slopes of the next smaller power of two, then every second slope of twice that power.
    """

    slopes: tuple[float, ...] | None = None

    def of_heads(self, heads: int) -> tuple[float, ...]:
        """Returns the slopes of a call with `heads` query heads. Raises PatternError if the step has slopes for another
        number."""
        check_heads(self, heads)
        return alibi_slopes(heads) if self.slopes is None else self.slopes

    def apply(self, score: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens, scale: float) -> Tensor:
        slope = torch.tensor(self.of_heads(score.shape[1]), dtype=score.dtype, device=score.device)
        return score - slope.view(1, -1, 1, 1) * distance(at_q, at_k).abs().unsqueeze(1).to(score.dtype)

    @property
    def heads(self) -> int | None:
        return None if self.slopes is None else len(self.slopes)

    def select_heads(self, heads: Tensor) -> Score:
        if self.slopes is None:
            raise PatternError(
                "ALiBi: selecting some heads needs the slopes of all; pass slopes=alibi_slopes(heads)"
            )
        return ALiBi(tuple(self.slopes[h] for h in heads.tolist()))


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Returns the default slopes of `ALiBi` for a number of heads: 1/16, 1/256 and 1/4 for 3."""
    power = 2 ** int(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    extra = [2 ** (-4 * (h + 1) / power) for h in range(0, 2 * (heads - power), 2)]
    return tuple(slopes + extra)


@dataclass(frozen=True, eq=False)
class RelativeBias(Score):
    """score + table[bucket(distance), h]; table [buckets, H]. (T5: Raffel et al. 2019, section 2.1.)

    Half of the buckets (of each direction, if `bidirectional`) hold one distance each; the widths of the others grow
    logarithmically up to `max_distance`, as in the T5 code.

    Raises PatternError unless `max_distance` is beyond the distances that have a bucket of their own.
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128
    learned = "table"

    def __post_init__(self) -> None:
        rows = self.table.shape[0]
        exact = rows // (4 if self.bidirectional else 2)
        if not 0 < exact < self.max_distance:
            raise PatternError(
                f"RelativeBias: {rows} buckets hold {exact} single distances per direction, which must be at least 1 "
                f"and below max_distance={self.max_distance}; change the number of buckets or max_distance"
            )

    def bucket(self, away: Tensor) -> Tensor:
        """Returns the bucket of each distance k - q, int64 of the same shape."""
        buckets = self.table.shape[0]
        offset = torch.zeros_like(away)
        if self.bidirectional:
            buckets //= 2
            offset = (away > 0) * buckets
            away = away.abs()
        else:
            away = (-away).clamp(min=0)
        exact = buckets // 2
        ratio = torch.log(away.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return offset + torch.where(away < exact, away, far)

    def buckets(self) -> Tensor:
        """Returns the buckets of the distances -max_distance .. max_distance; all distances beyond share the last
        ones."""
        far = self.max_distance
        return self.bucket(torch.arange(-far, far + 1, device=self.table.device))

    def apply(self, score: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens, scale: float) -> Tensor:
        check_heads(self, score.shape[1])
        bias = self.table[self.bucket(distance(at_q, at_k))]
        return score + bias.permute(0, 3, 1, 2).to(score.dtype)

    @property
    def heads(self) -> int:
        return self.table.shape[1]

    def select_heads(self, heads: Tensor) -> Score:
        return replace(self, table=self.table[:, heads])


@dataclass(frozen=True, eq=False)
class RelativeKey(Score):
    """score + scale * q . table[clip(distance)]; table [2 * clip + 1, D]. (Shaw et al. 2018, equation 5.)

    `fixed`: the table is a constant, not a trainable parameter."""

    table: Tensor
    fixed: bool = False
    learned = "table"

    def apply(self, score: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens, scale: float) -> Tensor:
        clip = self.clip(q.shape[-1])
        at = distance(at_q, at_k).clamp(-clip, clip) + clip
        products = (q.to(score.dtype) @ self.table.to(score).T) * scale
        return score + products.gather(-1, at.unsqueeze(1).expand(score.shape))

    def clip(self, width: int) -> int:
        """Returns the largest distance with a row of its own. Raises PatternError if the table does not fit queries of
        `width`."""
        rows, columns = self.table.shape
        if rows % 2 == 0 or columns != width:
            raise PatternError(
                f"RelativeKey: table must be [2 * clip + 1, {width}] (odd number of rows), got [{rows}, {columns}]"
            )
        return rows // 2

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return () if self.fixed else (self.table,)


@dataclass(frozen=True, eq=False)
class Bias(Score):
    """score + tensor, which broadcasts to [B, H, T, S]; it is tied to the slots of one call."""

    tensor: Tensor
    by_slot = True
    learned = "tensor"

    def apply(self, score: Tensor, q: Tensor, at_q: Tokens, at_k: Tokens, scale: float) -> Tensor:
        try:
            return score + self.tensor.to(score.dtype).expand(score.shape)
        except RuntimeError:
            raise PatternError(
                f"Bias: a tensor of shape {tuple(self.tensor.shape)} does not broadcast to the scores "
                f"{tuple(score.shape)} = [batch, heads, queries, keys]"
            ) from None

    def select_heads(self, heads: Tensor) -> Score:
        shared = self.tensor.dim() < 3 or self.tensor.shape[-3] == 1
        return self if shared else replace(self, tensor=self.tensor.index_select(-3, heads))
