"""What a model will cost on a machine, said before anything runs.

Legend: n tokens of a row, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from headway import attention, hardware
from headway.cache import choose_cache
from headway.choice import Choice
from headway.errors import ConfigError
from headway.models.cost.key_values import cache_slots, kv_bytes_read, kv_bytes_stored
from headway.models.cost.operations import decode_flops, prefill_flops
from headway.models.cost.receptive_fields import receptive_field
from headway.models.cost.training import training_bytes
from headway.models.cost.weights import parameters, weight_bytes, weight_bytes_read
from headway.models.spec import ModelSpec
from headway.patterns import Pattern, parse
from headway.quantization import row_bytes

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The roofs of a machine: bytes that can be allocated, bytes/s that are read, FLOP/s of a matrix product."""

    name: str
    memory: int
    bandwidth: float
    peak: float
    native: bool = True

    @staticmethod
    def here(dtype: torch.dtype) -> Machine:
        """This machine, measured (a second or two)."""
        return Machine(
            name=hardware.cpu_name(),
            memory=hardware.memory_available(),
            bandwidth=hardware.read_bandwidth(),
            peak=hardware.gemm_peak(dtype),
            native=dtype != torch.bfloat16 or hardware.bf16_native(),
        )


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """Layers that share a pattern: what each of them gets, and what all of them together cost.

    Attributes:
        pattern: as text. layers: their numbers.
        slots: slots per row in the cache of one layer. reads: keys that one more token sees in one head.
        kv_stored, kv_read: bytes in all these layers and rows, held, and read for one more token of each row.
        cache, prefill, decode: which cache, and which backend for the prompt and for one more token; and why.
    """

    pattern: str
    layers: tuple[int, ...]
    slots: int
    reads: int
    kv_stored: int
    kv_read: int
    cache: Choice
    prefill: Choice
    decode: Choice


@dataclass(frozen=True, kw_only=True)
class Report:
    """The plan of one model at one context and batch on one machine. Bytes, FLOPs and seconds.

    Attributes:
        dtype: of weights and products. kv_dtype: of what the caches store.
        parameters: by place; their sum is what a model card states.
        weights: bytes. kv: bytes of keys and values, all layers and rows. working: bytes that the prompt's pass
            needs besides. needed: the three together; fits: needed <= machine.memory.
        training: bytes that training rows of this shape holds, by cause; checkpointed: their sum when blocks
            are computed again; empty and 0 where they are not counted, and a note says why.
        moved: bytes read for one more token of every row. step_flops: operations for that.
        step_seconds: the larger of moved / bandwidth and step_flops / peak; bound: which of the two.
        tokens_per_second: of all rows together. prefill_seconds: prefill_flops / peak.
        notes: what the numbers do not say.
    """

    model: str
    family: str
    context: int
    batch: int
    dtype: str
    kv_dtype: str
    machine: Machine
    parameters: dict[str, int]
    layers: tuple[LayerPlan, ...]
    weights: int
    kv: int
    working: int
    needed: int
    fits: bool
    training: dict[str, int]
    checkpointed: int
    moved: int
    step_flops: float
    step_seconds: float
    bound: str
    tokens_per_second: float
    prefill_flops: float
    prefill_seconds: float
    notes: tuple[str, ...]

    @property
    def parameter_count(self) -> int:
        """All trained numbers."""
        return sum(self.parameters.values())


def plan(
    spec: ModelSpec,
    *,
    model: str,
    context: int,
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    machine: Machine | None = None,
) -> Report:
    """The report for `batch` rows of `context` tokens (prompt and answer together).

    Args:
        spec: the model. model: its name in the report.
        kv_dtype: of what the caches store: `dtype` unless given, or torch.int8.
        machine: this one, measured, unless given.
    Raises:
        ConfigError: context or batch below 1, rows that the model cannot take at all, or a model that is no decoder.
    """
    if context < 1 or batch < 1:
        raise ConfigError(f"plan: context and batch must be at least 1, got {context} and {batch}")
    if not spec.causal or spec.encoder is not None:
        what = "an encoder-decoder" if spec.causal else "an encoder"
        raise ConfigError(
            f"plan: {model} is {what}, and what is planned is a decoder that reads a prompt and writes on, token "
            "by token; `headway inspect` and `headway models` give its sizes, `cost.prefill_flops` the work of one "
            "stack"
        )
    limit = spec.context_limit
    if limit is not None and context > limit:
        raise ConfigError(
            f"plan: {model} takes rows of at most {limit} tokens, {context} were asked for; lower the context"
        )
    machine = Machine.here(dtype) if machine is None else machine
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    layers = tuple(
        _layer_plan(spec, pattern, context, batch, dtype, kv_dtype)
        for pattern in dict.fromkeys(spec.patterns)
    )
    weights, kv = weight_bytes(spec, dtype), sum(layer.kv_stored for layer in layers)
    # x and its norm, and the two or three tensors of a feed-forward.
    working = batch * context * (2 * spec.width + (2 + spec.gated) * spec.hidden) * dtype.itemsize
    training, checkpointed, uncounted = _training(spec, context, batch, dtype)
    moved = weight_bytes_read(spec, dtype, batch) + sum(layer.kv_read for layer in layers)
    step_flops = batch * decode_flops(spec, context)
    by_memory, by_compute = moved / machine.bandwidth, step_flops / machine.peak
    step = max(by_memory, by_compute)
    prefill = batch * prefill_flops(spec, context)
    return Report(
        model=model,
        family=spec.family,
        context=context,
        batch=batch,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        machine=machine,
        parameters=parameters(spec),
        layers=layers,
        weights=weights,
        kv=kv,
        working=working,
        needed=weights + kv + working,
        fits=weights + kv + working <= machine.memory,
        training=training,
        checkpointed=checkpointed,
        moved=moved,
        step_flops=step_flops,
        step_seconds=step,
        bound="memory" if by_memory >= by_compute else "compute",
        tokens_per_second=batch / step,
        prefill_flops=prefill,
        prefill_seconds=prefill / machine.peak,
        notes=(
            *uncounted,
            *_notes(spec, context, machine, room=machine.memory - weights - kv, working=working),
        ),
    )


def _training(
    spec: ModelSpec, context: int, batch: int, dtype: torch.dtype
) -> tuple[dict[str, int], int, list[str]]:
    """Bytes that training holds, their sum with blocks computed again, and why they are not counted if they are not."""
    try:
        whole = training_bytes(spec, context, batch, dtype)
        again = training_bytes(spec, context, batch, dtype, gradient_checkpointing=True)
    except ConfigError as error:
        return {}, 0, [f"training memory: {error}"]
    return whole, sum(again.values()), []


def _layer_plan(
    spec: ModelSpec, pattern: Pattern, context: int, batch: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> LayerPlan:
    which = tuple(i for i, p in enumerate(spec.patterns) if p == pattern)
    alone = spec.with_patterns(pattern)
    share = len(which) / spec.layers
    (slots,) = set(cache_slots(alone, context))
    read = kv_bytes_read(alone, context, kv_dtype, batch)
    per_key = spec.layers * spec.kv_heads * 2 * row_bytes(spec.head_dim, kv_dtype) * batch
    score = spec.layer_positions[which[0]].scores(spec.heads, spec.head_dim, not spec.causal)

    def backend(queries: int, keys: int, in_order: bool = True) -> Choice:
        return attention.choose(
            pattern,
            queries=queries,
            keys=keys,
            heads=spec.heads,
            kv_heads=spec.kv_heads,
            head_dim=spec.head_dim,
            batch=batch,
            dtype=dtype,
            score=score,
            in_order=in_order,
        )

    return LayerPlan(
        pattern=str(pattern),
        layers=which,
        slots=slots,
        reads=round(read / per_key),
        kv_stored=round(kv_bytes_stored(alone, context, kv_dtype, batch) * share),
        kv_read=round(read * share),
        cache=choose_cache(pattern),
        prefill=backend(context, context),
        decode=backend(1, slots, in_order=slots == context),
    )


def _notes(spec: ModelSpec, context: int, machine: Machine, room: int, working: int) -> tuple[str, ...]:
    notes = []
    chunk = room * context // working
    if 1 <= chunk < context:
        notes.append(
            f"it fits when prompts are read in chunks of at most {chunk} tokens (any split gives the same result)"
        )
    if context > spec.trained_context:
        notes.append(
            f"a context of {context} exceeds the {spec.trained_context} tokens that the model was trained on: it "
            "runs, but nothing vouches for what it says there"
        )
    field = receptive_field(spec)
    if field is not None and field + 1 < context:
        notes.append(
            f"all layers are windows: the last token cannot depend on more than {field + 1} of the {context} tokens"
        )
    if not machine.native:
        notes.append("this CPU has no bfloat16 products: they save memory and cost time; see --dtype float32")
    notes.append(
        "speeds are roofs (the measured bandwidth and matrix product of this machine); real runs stay below"
    )
    return tuple(notes)


def parse_patterns(text: str) -> Sequence[Pattern]:
    """Patterns from text, separated by `;`, to be repeated over the layers."""
    return [parse(part) for part in text.split(";")]
