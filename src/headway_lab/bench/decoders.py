"""The rows of `headway bench decode` and `headway bench prefill`: whole decoders, compared with transformers and
llama.cpp.

A decoding step takes token ids and returns the logits of one more token of each sequence; it is repeated at the same
position, after `context - 1` tokens that are read before. Its limit is the read bandwidth: every weight and every key
once. Prefill goes from the ids of a prompt to the logits after the last of them, into an empty cache. Its limit is the
register peak.

Legend: B batch, V vocab.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headway.generate import Reader
from headway.models import Decoder, ModelSpec
from headway.models.cost import kv_bytes_read, prefill_flops
from headway.models.cost.weights import expert_share
from headway.nn import MixtureOfExperts
from headway.nn.kept import Keeps
from headway_lab.bench.attention import Say
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase
from headway_lab.bench.llama_cpp import NAME as LLAMA_CPP
from headway_lab.bench.llama_cpp import LlamaCpp
from headway_lab.bench.measure import THOROUGH, Effort, measured
from headway_lab.bench.models import Written, ids_of, transformers, written_models
from headway_lab.bench.rows import Row

TRANSFORMERS = "transformers"
ONE_ROW, BF16 = f"{OURS} one row", f"{OURS} bf16"
APART, APART_BF16 = 0.15, 0.05
"""Largest difference of a peer's logits from ours, relative to their norm: for quantized weights, whose inputs are
rounded to 8 bits, and for the rounding of 22 layers in bfloat16. From float32 products of the same codes ours differ by
0.06 at 1.1 B, llama.cpp's by 0.05 (int4) to 0.09 (q4_K), in unrelated directions. Layers with states round more: in
bfloat16 the 24 layers of hybrid-0.8b differ from float32 by 0.082 here, 0.069 in transformers and 0.032 in llama.cpp,
which keeps the residual stream in float32. The logits of different tokens differ by about 1.4."""
PREFILL_EFFORT = Effort(repeats=5, least=3, seconds=60.0)


def decode(
    models: Sequence[str],
    weights: Sequence[str],
    rows: Sequence[int],
    context: int,
    *,
    effort: Effort = THOROUGH,
    say: Say,
) -> Iterator[Row]:
    """Yields the rows: each of these models with each of these weights and batch sizes."""
    for written, kind in written_models(models, weights):
        model, peer = cache(partial(written.ours, kind)), cache(written.transformers)
        for count in rows:
            name = f"{written.name} {kind} rows={count} context={context}"
            say(f"decode {name}")
            problem = partial(_decode, written, kind, model, peer, count, context, say)
            yield measured("decode", name, "bfloat16", problem, effort)


def _decode(
    written: Written,
    kind: str,
    model: Callable[[], Decoder],
    theirs: Callable[[], Any],
    rows: int,
    context: int,
    say: Say,
) -> Problem:
    prompt = ids_of(written.name, context - 1)
    say(f"  decoding: {Reader(model()).steps}")
    sides = {OURS: our_steps(model(), prompt, rows)}
    work = step_bytes(model(), context, rows)
    problem = Problem(sides, work, "reads", tolerance=apart(written.spec, kind), tokens=rows)
    peers = {LLAMA_CPP: lambda: llama_cpp_steps(written.gguf(kind), prompt, rows)}
    if kind == "bf16":
        peers[TRANSFORMERS] = lambda: transformers_steps(theirs(), prompt, rows, forgets(written.spec))
    problem.add_peers(peers)
    if rows > 1:
        problem.set_beside(ONE_ROW, our_steps(model(), prompt, 1), rows)
    return problem


def prefill(
    models: Sequence[str], weights: Sequence[str], tokens: int, *, effort: Effort = PREFILL_EFFORT, say: Say
) -> Iterator[Row]:
    """Yields the rows: each of these models with each of these weights."""
    for written, kind in written_models(models, weights):
        name = f"{written.name} {kind} n={tokens}"
        say(f"prefill {name}")
        yield measured("prefill", name, "bfloat16", partial(_prefill, written, kind, tokens), effort)


def _prefill(written: Written, kind: str, tokens: int) -> Problem:
    prompt = ids_of(written.name, tokens)
    sides, work = {OURS: our_prompt(written.ours(kind), prompt)}, prefill_flops(written.spec, tokens)
    problem = Problem(sides, work, tolerance=apart(written.spec, kind), tokens=tokens)
    peers = {LLAMA_CPP: lambda: llama_cpp_prompt(written.gguf(kind), prompt)}
    if kind == "bf16":
        peers[TRANSFORMERS] = lambda: transformers_prompt(written.transformers(), prompt)
    problem.add_peers(peers)
    if kind != "bf16":
        problem.set_beside(BF16, our_prompt(written.ours("bf16"), prompt))
    return problem


def apart(spec: ModelSpec, weights: str) -> float:
    """Returns the largest allowed difference of the peers' logits from ours."""
    return APART_BF16 if weights in ("bf16", "compressed") and forgets(spec) else APART


def step_bytes(model: Decoder, context: int, rows: int) -> int:
    """Returns the bytes that a step reads: all weights once, except that an embedding that is not the output layer
    counts only the rows of the ids, and experts their expected share; and the KV cache, or the states, of all rows."""
    spec, embedding = model.spec, model.model.embed_tokens
    assert embedding is not None
    weights = _kept(model)
    idle = 1 - expert_share(spec, rows)
    for block in model.modules():
        if isinstance(block, MixtureOfExperts):
            weights -= round(idle * _kept(block.experts))
    if not spec.tied:
        weights -= embedding.nbytes * (spec.vocab - rows) // spec.vocab
    return weights + kv_bytes_read(spec, context, embedding.like.dtype, rows)


def _kept(module: nn.Module) -> int:
    """Returns the bytes of the weights of a module, whatever their format."""
    quantized_modules = [
        m for m in module.modules() if isinstance(m, Keeps) and getattr(m, "weight", None) is None
    ]
    return sum(p.nbytes for p in module.parameters()) + sum(m.nbytes for m in quantized_modules)


# -- sides: the logits [B, V] of each step ------------------------------------------------------------------------


def our_steps(model: Decoder, prompt: Sequence[int], rows: int) -> Side:
    """Returns decoding steps of sequences with separate caches; if layers have recurrent states, which cannot be rolled
    back, each step is one token further."""
    trims = forgets(model.spec)
    reader = Reader(model, slack=int(trims))
    tables = [reader.cache.open() for _ in range(rows)]
    for table in tables:
        reader.read([(table, prompt)], [[len(prompt) - 1]])
        reader.end()
    chunks = [(table, [prompt[-1]]) for table in tables]

    def side() -> Sequence[torch.Tensor]:
        logits = reader.read(chunks, [[0]] * rows)
        for table in tables if trims else ():
            reader.trim(table, 1)
        reader.end()
        return (logits,)

    return side


def our_prompt(model: Decoder, prompt: Sequence[int]) -> Side:
    """Returns a side that reads a prompt into an empty cache."""

    def side() -> Sequence[torch.Tensor]:
        reader = Reader(model)
        return (reader.read([(reader.cache.open(), prompt)], [[len(prompt) - 1]]),)

    return side


def forgets(spec: ModelSpec) -> bool:
    """Returns whether a token can be removed from the cache again: only softmax layers can, recurrent states cannot."""
    return len(spec.softmax_layers) == spec.layers


def transformers_steps(model: Any, prompt: Sequence[int], rows: int, crops: bool) -> Side:
    """Returns calls of transformers' model with its cache, which is cropped after each call if `crops`."""
    if rows > 1 and not crops:
        raise UnsupportedCase("its cache cannot repeat states for several rows")
    past = transformers().DynamicCache(config=model.config)
    with torch.inference_mode():
        model(input_ids=torch.tensor([prompt]), past_key_values=past, logits_to_keep=1)
        if rows > 1:
            past.batch_repeat_interleave(rows)
    ids = torch.tensor([[prompt[-1]]] * rows)

    def side() -> Sequence[torch.Tensor]:
        with torch.inference_mode():
            logits = model(input_ids=ids, past_key_values=past, use_cache=True).logits[:, -1]
            if crops:
                past.crop(-1)
        return (logits,)

    return side


def transformers_prompt(model: Any, prompt: Sequence[int]) -> Side:
    """Returns a call of transformers' model with an empty cache."""
    ids, empty = torch.tensor([prompt]), partial(transformers().DynamicCache, config=model.config)

    def side() -> Sequence[torch.Tensor]:
        with torch.inference_mode():
            return (model(input_ids=ids, past_key_values=empty(), logits_to_keep=1).logits[:, -1],)

    return side


def llama_cpp_steps(path: Path, prompt: Sequence[int], rows: int) -> Side:
    """Returns decoding steps of llama.cpp."""
    model = LlamaCpp(path, rows, len(prompt) + 1)
    model.read(prompt)
    model.spread()
    return lambda: (model.step(prompt[-1]),)


def llama_cpp_prompt(path: Path, prompt: Sequence[int]) -> Side:
    """Returns a side in which llama.cpp reads the prompt."""
    model = LlamaCpp(path, 1, len(prompt))
    return lambda: (model.read(prompt),)
