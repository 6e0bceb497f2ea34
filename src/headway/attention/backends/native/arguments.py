"""A call of the kernels as the structure of their C interface, with everything that must live as long as it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from headway.attention.backends.native.plan_arrays import plan_arrays
from headway.attention.call import Call
from headway.native import interface as c
from headway.native import threads
from headway.scores import ALiBi, RelativeBias, Score, SoftCap, alibi_slopes


class Arguments:
    """One key set of a call as the structure `struct`, to which the caller adds where results go. With
    `gradient`, there is room for the gradients of the scores' tables."""

    def __init__(self, call: Call, number: int, gradient: bool = False) -> None:
        part = call.keys[number]
        q, k, v = contiguous_rows(call.q), contiguous_rows(part.k), contiguous_rows(part.v)
        at = plan_arrays(call.pattern, call.q_tokens, part.tokens)
        self.steps = [_step(score, q.shape[1], gradient) for score in call.score]
        scores = (c.ScoreStruct * max(1, len(self.steps)))(*(step.ref for step in self.steps))
        ids = None if call.head_ids is None else call.head_ids.long().contiguous()
        k_scale, v_scale = (None if t is None else t.contiguous() for t in (part.k_scale, part.v_scale))
        self.plan, self.tensors = at, (q, k, v, ids, k_scale, v_scale)
        self.struct = c.CallStruct(
            abi=c.ABI,
            threads=threads(),
            batch=q.shape[0],
            heads=q.shape[1],
            kv_heads=k.shape[1],
            dim=q.shape[3],
            dim_v=v.shape[3],
            type=c.TYPES[q.dtype],
            kv_type=c.TYPES[k.dtype],
            q=c.TensorStruct.of(q),
            k=c.TensorStruct.of(k),
            v=c.TensorStruct.of(v),
            k_scale=None if k_scale is None else k_scale.data_ptr(),
            v_scale=None if v_scale is None else v_scale.data_ptr(),
            scale=call.scale,
            queries=at.queries,
            keys=at.keys,
            plan=at.plan,
            program=at.program,
            instructions=len(at.program) // 4,
            scores=scores,
            score_count=len(self.steps),
            dropout=call.dropout,
            seed=call.seed,
            first_key=call.slots[number],
            head_ids=None if ids is None else ids.data_ptr(),
        )


def contiguous_rows(t: Tensor) -> Tensor:
    """The tensor itself where its last dimension is contiguous."""
    return t if t.stride(-1) == 1 or t.shape[-1] == 1 else t.contiguous()


@dataclass(frozen=True, eq=False)
class Step:
    """A score with the array that the kernels read: a constant, or a number for each head and distance."""

    score: Score
    ref: c.ScoreStruct
    values: Tensor
    gradient: Tensor | None


def _step(score: Score, heads: int, gradient: bool) -> Step:
    reach = 0
    if isinstance(score, RelativeBias):
        kind, reach = c.DISTANCE, score.max_distance
        values = score.table.detach().float()[_buckets(score)].t().contiguous()
    else:
        assert isinstance(score, SoftCap | ALiBi)
        kind, values = _constants(score, heads)
    total = torch.zeros_like(values) if gradient and score.parameters else None
    at = c.ScoreStruct(kind, reach, values.data_ptr(), None if total is None else total.data_ptr())
    return Step(score, at, values, total)


@lru_cache(maxsize=64)
def _constants(score: SoftCap | ALiBi, heads: int) -> tuple[int, Tensor]:
    if isinstance(score, SoftCap):
        return c.SOFT_CAP, torch.tensor([score.cap])
    return c.SLOPE, torch.tensor(alibi_slopes(heads) if score.slopes is None else score.slopes)


def _buckets(score: RelativeBias) -> Tensor:
    """The bucket of each distance from -max_distance to max_distance; those beyond share the last ones."""
    return score.bucket(torch.arange(-score.max_distance, score.max_distance + 1))


def table_gradient(step: Step) -> Tensor:
    """The gradient of a table, from those of the distances that each of its buckets stands for."""
    score, by_distance = step.score, step.gradient
    assert isinstance(score, RelativeBias)
    assert by_distance is not None
    total = torch.zeros_like(score.table, dtype=torch.float32)
    return total.index_add_(0, _buckets(score), by_distance.t())
