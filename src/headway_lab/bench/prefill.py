"""The rows of `headway bench prefill`: reading a prompt by a whole model, beside transformers and llama.cpp.

From ids to the logits behind the last of them, into an empty cache. Its limit is the product in registers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from headway.generate import Reader
from headway.models import Decoder
from headway.models.cost import prefill_flops
from headway_lab.bench.cases import FORWARD
from headway_lab.bench.decode import APART, TRANSFORMERS, Say
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase
from headway_lab.bench.llama_cpp import NAME as LLAMA_CPP
from headway_lab.bench.llama_cpp import LlamaCpp, system_info
from headway_lab.bench.measure import Effort, drop_mismatches, timed
from headway_lab.bench.models import Written, available, check_memory, ids_of
from headway_lab.bench.rows import Row, machine
from headway_lab.bench.transformers_layers import transformers

BF16 = f"{OURS} bf16"
USUAL = Effort(repeats=5, least=3, seconds=60.0)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured: each of these models with each of these weights."""

    models: Sequence[str]
    weights: Sequence[str]
    tokens: int
    effort: Effort = USUAL


def prefill(request: Request, say: Say) -> Iterator[Row]:
    """Row by row, as they are measured."""
    for name in request.models:
        blanks = {weights: blank(f"{name} {weights} n={request.tokens}") for weights in request.weights}
        try:
            check_memory(name)
        except UnsupportedCase as why:
            where = machine("auto", [f"not measured: {why}"])
            yield from (replace(row, machine=where) for row in blanks.values())
            continue
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            written = Written(name, Path(folder))
            for weights, row in blanks.items():
                say(f"{name} {weights}, {request.tokens} tokens")
                yield measured(written, weights, row, request)


def blank(label: str) -> Row:
    """The row of a case before it is measured."""
    return Row("prefill", label, "bfloat16", machine=machine("auto"))


def measured(written: Written, weights: str, row: Row, request: Request) -> Row:
    """One row: the products of the model over its time, and tokens per second of every side."""
    prompt = ids_of(written.name, request.tokens)
    work = prefill_flops(written.spec, request.tokens)
    problem = Problem({OURS: ours(written.ours(weights), prompt)}, work, tolerance=APART[weights])
    with ExitStack() as stack:
        makers: dict[str, Callable[[], Side]] = {
            LLAMA_CPP: lambda: llama_cpp(written.gguf(weights), prompt, stack)
        }
        if weights == "bf16":
            makers[TRANSFORMERS] = lambda: of_transformers(written.transformers(), prompt)
        problem.sides |= available(makers, problem.notes)
        drop_mismatches(problem, row.dtype, FORWARD)
        if weights != "bf16":
            problem.sides[BF16] = ours(written.ours("bf16"), prompt)
        row = timed(row, problem, request.effort)
    assert row.ours_ms is not None
    speeds = {side: len(prompt) / ms * 1e3 for side, ms in row.peers.items()}
    row.extra.update(
        tokens_per_second=len(prompt) / row.ours_ms * 1e3, peers_tokens_per_second=speeds, flops=work
    )
    if LLAMA_CPP in row.peers:
        row.machine[LLAMA_CPP] = system_info()
    return row


def ours(model: Decoder, prompt: Sequence[int]) -> Side:
    """A prompt that is read."""

    def side() -> Sequence[torch.Tensor]:
        reader = Reader(model)
        return (reader.read([(reader.cache.open(), prompt)], [[len(prompt) - 1]]),)

    return side


def of_transformers(model: Any, prompt: Sequence[int]) -> Side:
    """A call of its model with an empty cache."""
    ids, empty = torch.tensor([prompt]), transformers().DynamicCache

    def side() -> Sequence[torch.Tensor]:
        with torch.inference_mode():
            return (model(input_ids=ids, past_key_values=empty(), logits_to_keep=1).logits[:, -1],)

    return side


def llama_cpp(path: Path, prompt: Sequence[int], stack: ExitStack) -> Side:
    """llama.cpp reading the prompt; `stack` closes it."""
    model = LlamaCpp(path, 1, len(prompt))
    stack.callback(model.close)
    return lambda: (model.read(prompt),)
