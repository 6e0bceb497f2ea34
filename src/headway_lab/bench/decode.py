"""The rows of `headway bench decode`: one more token of each text, by a whole model, beside transformers and llama.cpp.

A step takes ids and gives logits; it is done again and again at the same place, behind `context - 1` tokens that are
read before. Its limit is reading: every weight and every key once.

Legend: B rows, V vocab.
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
from headway.models.cost import kv_bytes_read
from headway.nn import linears
from headway_lab.bench.cases import FORWARD
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase
from headway_lab.bench.llama_cpp import NAME as LLAMA_CPP
from headway_lab.bench.llama_cpp import LlamaCpp, system_info
from headway_lab.bench.measure import THOROUGH, Effort, drop_mismatches, timed
from headway_lab.bench.models import WEIGHTS, Written, available, check_memory, ids_of
from headway_lab.bench.rows import Row, machine
from headway_lab.bench.transformers_layers import transformers

TRANSFORMERS = "transformers"
ONE_ROW = f"{OURS} one row"
APART = {**dict.fromkeys(WEIGHTS, 0.1), "bf16": 0.05, "compressed": 0.05}
"""How far logits of a side may be from ours, relative to their norm: the rounding of 22 layers in bfloat16, and beside
codes that of inputs to 8 bits. Another token's logits differ by some 1.4."""

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be measured: each of these models with each of these weights and numbers of rows."""

    models: Sequence[str]
    weights: Sequence[str]
    rows: Sequence[int]
    context: int
    effort: Effort = THOROUGH


def decode(request: Request, say: Say) -> Iterator[Row]:
    """Row by row, as they are measured."""
    for name in request.models:
        with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder:
            labels = [f"{name} {weights} rows={rows}" for weights in request.weights for rows in request.rows]
            try:
                check_memory(name)
            except UnsupportedCase as why:
                yield from (replace(blank(label, request.context), machine=_why(why)) for label in labels)
                continue
            say(f"{name}: {request.context} tokens are read before each step")
            written = Written(name, Path(folder))
            for weights in request.weights:
                model = written.ours(weights)
                theirs = _transformers(written) if weights == "bf16" else None
                for rows in request.rows:
                    steps = Reader(model).steps
                    say(f"{name} {weights}, {rows} {'row' if rows == 1 else 'rows'}, decoding: {steps}")
                    yield measured(written, model, theirs, weights, rows, request)


def _why(why: object) -> dict[str, Any]:
    return machine("auto", [f"not measured: {why}"])


def _transformers(written: Written) -> Any:
    try:
        return written.transformers()
    except UnsupportedCase as why:
        return why


def blank(label: str, context: int) -> Row:
    """The row of a case before it is measured."""
    return Row("decode", f"{label} context={context}", "bfloat16", machine=machine("auto"))


def measured(written: Written, model: Decoder, theirs: Any, weights: str, rows: int, request: Request) -> Row:
    """One row: the bytes of a step over its time, and tokens per second of every side."""
    prompt = ids_of(written.name, request.context - 1)
    row = blank(f"{written.name} {weights} rows={rows}", request.context)
    work = float(step_bytes(model, request.context, rows))
    problem = Problem({OURS: ours(model, prompt, rows)}, work, "reads", tolerance=APART[weights])
    with ExitStack() as stack:
        makers: dict[str, Callable[[], Side]] = {
            LLAMA_CPP: lambda: llama_cpp(written.gguf(weights), prompt, rows, stack)
        }
        if theirs is not None:
            makers[TRANSFORMERS] = lambda: of_transformers(theirs, prompt, rows)
        problem.sides |= available(makers, problem.notes)
        drop_mismatches(problem, row.dtype, FORWARD)
        if rows > 1:
            problem.sides[ONE_ROW] = ours(model, prompt, 1)
            problem.scale[ONE_ROW] = rows
        row = timed(row, problem, request.effort)
    assert row.ours_ms is not None
    speeds = {side: rows / ms * 1e3 for side, ms in row.peers.items()}
    row.extra.update(tokens_per_second=rows / row.ours_ms * 1e3, peers_tokens_per_second=speeds, bytes=work)
    if LLAMA_CPP in row.peers:
        row.machine[LLAMA_CPP] = system_info()
    return row


def step_bytes(model: Decoder, context: int, rows: int) -> int:
    """Bytes that a step reads: all weights once, of an embedding that is not the output layer the ids' rows alone; and
    the keys and values of all rows."""
    spec, table = model.spec, model.model.embed_tokens
    assert table is not None
    layers = [table, *linears(model).values()]
    weights = sum(p.nbytes for p in model.parameters()) + sum(m.nbytes for m in layers if m.weight is None)
    if not spec.tied:
        weights -= table.nbytes * (spec.vocab - rows) // spec.vocab
    return weights + kv_bytes_read(spec, context, table.like.dtype, rows)


def ours(model: Decoder, prompt: Sequence[int], rows: int) -> Side:
    """Steps of texts that each have keys of their own."""
    reader = Reader(model, slack=1)
    tables = [reader.cache.open() for _ in range(rows)]
    for table in tables:
        reader.read([(table, prompt)], [[len(prompt) - 1]])
        reader.end()
    chunks = [(table, [prompt[-1]]) for table in tables]

    def side() -> Sequence[torch.Tensor]:
        logits = reader.read(chunks, [[0]] * rows)
        for table in tables:
            reader.trim(table, 1)
        reader.end()
        return (logits,)

    return side


def of_transformers(model: Any, prompt: Sequence[int], rows: int) -> Side:
    """Calls of its model with its cache, which is cropped after each. Raises UnsupportedCase where there is none."""
    if isinstance(model, UnsupportedCase):
        raise model
    past = transformers().DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt]), past_key_values=past, logits_to_keep=1)
        past.batch_repeat_interleave(rows)
    ids = torch.tensor([[prompt[-1]]] * rows)

    def side() -> Sequence[torch.Tensor]:
        with torch.inference_mode():
            logits = model(input_ids=ids, past_key_values=past, use_cache=True).logits[:, -1]
            past.crop(-1)
        return (logits,)

    return side


def llama_cpp(path: Path, prompt: Sequence[int], rows: int, stack: ExitStack) -> Side:
    """Steps of llama.cpp; `stack` closes it."""
    model = LlamaCpp(path, rows, len(prompt) + 1)
    stack.callback(model.close)
    model.read(prompt)
    model.spread()
    return lambda: (model.step(prompt[-1]),)
