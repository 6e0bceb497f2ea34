"""What would fit where a model does not: plans of the same model with something changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from headway.models.cost.report import Report
from headway.models.quantize import KINDS

Again = Callable[..., Report]
"""The plan of the same model on the same machine, with some keyword arguments of `plan` replaced."""

CHUNK = 512
"""Tokens of a prompt that are read at a time: enough for products at full speed."""


def what_fits(found: Report, again: Again) -> Iterator[tuple[str, Report]]:
    """Options of `headway plan` with which a plan that does not fit does, and that plan: prompts in chunks, which
    change no result, fewer bits, one row, and the longest of a half, a quarter, ... of the context."""
    int8: dict[str, object] = {} if found.kind == "encoder" else {"kv_dtype": torch.int8}
    kv = " --kv-cache-dtype int8" if int8 else ""
    tries: dict[str, dict[str, object]] = {
        f"--prefill-chunk {CHUNK}": {"prefill_chunk": CHUNK} if found.kind == "decoder" else {},
        "--kv-cache-dtype int8": int8,
        "--batch 1": {} if found.batch == 1 else {"batch": 1},
        "--weights int8": {"quantized": KINDS["int8"]},
        "--weights int4": {"quantized": KINDS["int4"]},
        f"--weights int4{kv}": {"quantized": KINDS["int4"], **int8} if int8 else {},
    }
    for option, changed in tries.items():
        if changed and (other := again(**changed)).fits:
            yield option, other
    context = found.context // 2
    while context:
        if (other := again(context=context)).fits:
            yield f"--context {context}", other
            return
        context //= 2
