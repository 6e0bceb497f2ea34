"""Plans the cost of a model on a machine before anything runs.

Legend: n tokens of a row, B rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from headway import attention
from headway.cache import choose_cache
from headway.choice import Choice
from headway.errors import ConfigError
from headway.models.cost.activations import ExpertRows, Scores, TrainingOptions
from headway.models.cost.devices import Machine
from headway.models.cost.operations import (
    cache_slots,
    decode_flops,
    keys_read,
    kv_bytes_read,
    kv_bytes_stored,
    memory_bytes,
    prefill_flops,
)
from headway.models.cost.peak import first_pass_bytes, training_bytes
from headway.models.cost.report import LayerPlan, Report, plan_notes
from headway.models.cost.weights import (
    Kept,
    Quantized,
    active_parameters,
    adapter_parameters,
    expert_share,
    kept_bytes,
    parameter_count,
    parameters,
    stacks,
    trained_bytes,
    weight_bytes_read,
)
from headway.models.mixers import kind_of
from headway.models.quantize import KINDS
from headway.models.spec import ModelSpec
from headway.nn import Lora
from headway.nn.block import Checkpointing

MOST = 2**40
"""Maximum number of tokens over all rows: element counts of their tensors must fit in 64 bits."""
PROMPT_CHUNK = 512
"""Prompt tokens per chunk in the suggestions of `what_fits`: enough for matrix products at full speed."""


def plan(
    spec: ModelSpec,
    *,
    model: str,
    context: int,
    batch: int = 1,
    source: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    kv_dtype: torch.dtype | None = None,
    quantized: Quantized | None = None,
    prefill_chunk: int | None = None,
    machine: Machine | None = None,
) -> Report:
    """Returns the report for `batch` rows of `context` tokens: prompt and answer together for a decoder; the target
    for an encoder-decoder, whose sources have `source` tokens (`context` if None); the whole sequence for an encoder.

    Args:
        spec: the model. model: its name in the report.
        kv_dtype: dtype of the KV cache: `dtype` if None, or torch.int8.
        quantized: which weights are quantized; `dtype` is then the dtype of everything else. The training figures are
            those of the unquantized model in `dtype`.
        prefill_chunk: prompt tokens that a decoder reads at a time; all at once if None.
        machine: the machine to plan for; this one, measured, if None.
    Raises:
        ConfigError: context, source, batch or chunk below 1; rows longer than the model can take; a source for a model
            without an encoder; a chunk for a model that is not a decoder; more than `MOST` tokens.
    """
    rows = stacks(spec, context, source)
    source = rows[1][1] if spec.encoder is not None else None
    if batch < 1 or any(tokens < 1 for _, tokens in rows):
        raise ConfigError(
            f"plan: context, source and batch must be at least 1, got {context}, {source} and {batch}"
        )
    if prefill_chunk is not None and (spec.kind != "decoder" or prefill_chunk < 1):
        raise ConfigError(
            f"plan: prefill_chunk must be at least 1, and is for decoders only; got {prefill_chunk} for {model}, of "
            f"kind {spec.kind}"
        )
    for stack, tokens in rows:
        if batch * tokens > MOST:
            raise ConfigError(
                f"plan: {batch} rows of {tokens} tokens exceed the limit of {MOST} tokens; lower the context, the "
                "source or the batch"
            )
        if stack.context_limit is not None and tokens > stack.context_limit:
            raise ConfigError(
                f"plan: {model} takes rows of at most {stack.context_limit} tokens, got {tokens}; lower the "
                + ("context" if stack is spec else "source")
            )
    machine = Machine.here(dtype) if machine is None else machine
    kv_dtype = dtype if kv_dtype is None else kv_dtype
    device = machine.device
    layers, *encoder_layers = (
        tuple(
            _layer_plan(*row, layer_group, batch, dtype, kv_dtype, device) for layer_group in _alike(row[0])
        )
        for row in rows
    )
    memory = 0 if source is None else memory_bytes(spec, source, dtype, batch)
    kept = kept_bytes(spec, Kept(dtype, quantized))
    weights, kv = sum(kept.values()), memory + sum(layer.kv_stored for layer in layers)
    looked_up = {"encoder"} | (set() if spec.tied else {"embedding"})
    read = {"experts": expert_share(spec, batch)}
    saved = sum(
        round(read.get(place, 1) * (n * dtype.itemsize - kept[place]))
        for place, n in parameters(spec).items()
        if place not in looked_up
    )
    working = max(first_pass_bytes(*row, batch, dtype, prefill_chunk) for row in rows)
    scores: Scores = (
        "stored" if any(_stores_scores(*row, batch, dtype, device) for row in rows) else "recomputed"
    )
    ways: tuple[tuple[Scores, Checkpointing], ...] = ((scores, "none"), (scores, "block"), ("stored", "none"))
    options: list[TrainingOptions] = [
        {
            "source": source,
            "expert_rows": expert_rows(device),
            "scores": score_storage,
            "gradient_checkpointing": checkpointing,
        }
        for score_storage, checkpointing in ways
    ]
    training, checkpointed, stored = (
        training_bytes(spec, context, batch, dtype, **training_options) for training_options in options
    )
    first = 1 if spec.encoder is not None else context
    logits = first if spec.kind == "encoder" and spec.head.task not in ("classify", "embed") else 1
    prefill = batch * prefill_flops(spec, first, logits, source)
    moved = step_flops = step = bound = rate = decoding = None
    if spec.kind != "encoder":
        moved = (
            weight_bytes_read(spec, dtype, batch) - saved + memory + sum(layer.kv_read for layer in layers)
        )
        step_flops = batch * decode_flops(spec, context, source)
        decoding = weights + kv + first_pass_bytes(spec, 1, batch, dtype)
        by_memory, by_compute = moved / machine.bandwidth, step_flops / machine.peak
        step = max(by_memory, by_compute)
        bound, rate = ("memory" if by_memory >= by_compute else "compute"), batch / step
    return Report(
        model=model,
        family=spec.family,
        kind=spec.kind,
        context=context,
        source=source,
        batch=batch,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=str(kv_dtype).removeprefix("torch."),
        machine=machine,
        parameters=parameters(spec),
        active=active_parameters(spec),
        weight_bytes=kept,
        layers=layers,
        encoder_layers=encoder_layers[0] if encoder_layers else (),
        weights=weights,
        kv=kv,
        working=working,
        needed=weights + kv + working,
        decoding=decoding,
        fits=weights + kv + working <= machine.memory,
        training=training,
        checkpointed=sum(checkpointed.values()),
        scores_stored=sum(stored.values()),
        trained=trained_bytes(parameter_count(spec), dtype),
        adapted=trained_bytes(adapter_parameters(spec, Lora(rank=16)), dtype),
        moved=moved,
        step_flops=step_flops,
        step_seconds=step,
        bound=bound,
        tokens_per_second=rate,
        prefill_flops=prefill,
        prefill_seconds=prefill / machine.peak,
        notes=plan_notes(spec, context, machine, quantized),
    )


def what_fits(report: Report, again: Callable[..., Report]) -> Iterator[tuple[str, Report]]:
    """Yields options of `headway plan` that make a plan fit, each with its plan: chunked prompts (which change no
    result), quantization to fewer bits, one row, and the longest context that fits among a half, a quarter, ... of
    the requested one. `again` plans the same model on the same machine with some keyword arguments of `plan`
    replaced."""
    int8: dict[str, object] = {} if report.kind == "encoder" else {"kv_dtype": torch.int8}
    kv = " --kv-cache-dtype int8" if int8 else ""
    tries: dict[str, dict[str, object]] = {
        f"--prefill-chunk {PROMPT_CHUNK}": {"prefill_chunk": PROMPT_CHUNK}
        if report.kind == "decoder"
        else {},
        "--kv-cache-dtype int8": int8,
        "--batch 1": {} if report.batch == 1 else {"batch": 1},
        "--weights int8": {"quantized": KINDS["int8"]},
        "--weights int4": {"quantized": KINDS["int4"]},
        f"--weights int4{kv}": {"quantized": KINDS["int4"], **int8} if int8 else {},
    }
    for option, changed in tries.items():
        if changed and (candidate := again(**changed)).fits:
            yield option, candidate
    context = report.context // 2
    while context:
        if (candidate := again(context=context)).fits:
            yield f"--context {context}", candidate
            return
        context //= 2


def expert_rows(device: str) -> ExpertRows:
    """Returns how training in a single process applies the experts of a model."""
    return "in one pass" if device == "cpu" else "sorted"


def _backend(
    spec: ModelSpec,
    layer: int,
    queries: int,
    keys: int,
    batch: int,
    dtype: torch.dtype,
    *,
    device: str,
    paged: bool = False,
    gradient: bool = False,
) -> Choice:
    """Returns the attention backend that is chosen for a layer."""
    positions, (kv_heads, head_dim) = spec.layer_positions[layer], spec.key_sizes[layer]
    return attention.choose(
        spec.patterns[layer],
        queries=queries,
        keys=keys,
        heads=spec.heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        batch=batch,
        dtype=dtype,
        score=(*positions.scores(spec.heads, head_dim, not spec.causal), *spec.score),
        dropout=spec.attention_dropout if gradient else 0.0,
        paged=paged,
        gradient=gradient,
        device=device,
    )


def _alike(spec: ModelSpec) -> list[list[int]]:
    """Returns the numbers of the layers in groups that share pattern and mixer."""
    each = list(zip(spec.patterns, spec.mixers, strict=True))
    return [[i for i, layer in enumerate(each) if layer == kind] for kind in dict.fromkeys(each)]


def _stores_scores(spec: ModelSpec, context: int, batch: int, dtype: torch.dtype, device: str) -> bool:
    """Returns whether training stores whole score matrices in some layer: the backend choice then states their
    bytes."""
    each = {(spec.patterns[i], spec.key_sizes[i]): i for i in spec.softmax_layers}
    whole = (context, context, batch, dtype)
    choices = (_backend(spec, i, *whole, device=device, gradient=True) for i in each.values())
    return any(choice.bytes is not None for choice in choices)


def _layer_plan(
    spec: ModelSpec,
    context: int,
    layers: Sequence[int],
    batch: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: str,
) -> LayerPlan:
    """Returns the plan of these layers, which share pattern and mixer."""
    first = layers[0]
    pattern, softmax = spec.patterns[first], first in spec.softmax_layers
    layer_plan = LayerPlan(
        pattern=str(pattern) if softmax else kind_of(spec.mixers[first]).name,
        layers=tuple(layers),
        prefill=_backend(spec, first, context, context, batch, dtype, device=device) if softmax else None,
    )
    if spec.kind == "encoder":
        return layer_plan
    slots, (kv_heads, _) = cache_slots(spec, context)[first], spec.key_sizes[first]
    read = kv_bytes_read(spec, context, kv_dtype, batch, layers)
    stored = kv_bytes_stored(spec, context, kv_dtype, batch, layers)
    layer_plan = replace(layer_plan, slots=slots, kv_stored=stored, kv_read=read)
    if not softmax:
        return layer_plan
    return replace(
        layer_plan,
        reads=round(keys_read(pattern, context, kv_heads) / kv_heads),
        cache=choose_cache(pattern),
        decode=_backend(spec, first, 1, slots, batch, dtype, device=device, paged=True),
    )
