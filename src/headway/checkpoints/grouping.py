"""Grouped keys and values written out for more heads: exact, at the price of a larger cache.

Legend: H query heads, K kv heads, D per head, M width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from headway.checkpoints.storage.lazy import Form, changed
from headway.errors import CheckpointError
from headway.models import ModelSpec

_KEYS_VALUES = re.compile(r"(?:^|\.)(k_proj|v_proj)\.(weight|bias)$")


def repeat_kv_heads(
    state: Mapping[str, Tensor], spec: ModelSpec, kv_heads: int
) -> tuple[Mapping[str, Tensor], ModelSpec]:
    """The same function with `kv_heads` key and value heads, each of the K there are repeated kv_heads / K times.

    Query head h reads kv head floor(h K / H); repetition puts a copy of that head at floor(h kv_heads / H). From
    GQA or MQA to MHA it is kv_heads = H. Rows of key and value weights [K*D, M] and biases [K*D] are repeated,
    lazily where the state is. Raises CheckpointError where `kv_heads` is no multiple of K or does not divide H:
    fewer heads, and other numbers, are no repetition and would be another function.
    """
    if kv_heads < 1 or kv_heads % spec.kv_heads or spec.heads % kv_heads:
        possible = [n for n in range(spec.kv_heads, spec.heads + 1, spec.kv_heads) if spec.heads % n == 0]
        raise CheckpointError(
            f"{spec.kv_heads} kv heads cannot become {kv_heads} by repetition under {spec.heads} query heads: possible "
            f"are {', '.join(map(str, possible))}; fewer heads are another function"
        )
    times = kv_heads // spec.kv_heads

    def repeated(name: str, value: Tensor) -> Tensor:
        if _KEYS_VALUES.search(name) is None or times == 1:
            return value
        heads = value.reshape(spec.kv_heads, spec.head_dim, *value.shape[1:])
        return heads.repeat_interleave(times, 0).flatten(0, 1)

    def form(name: str, given: Form) -> Form:
        if _KEYS_VALUES.search(name) is None:
            return given
        return Form((given.shape[0] * times, *given.shape[1:]), given.dtype)

    return changed(state, repeated, form), replace(spec, kv_heads=kv_heads)
