"""`headway plan MODEL`: does it fit, what does it move, how fast, and which kernel and cache each layer gets."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from headway.cli._options import Count, says
from headway.cli._shared import note, print_report, set_threads
from headway.report import duration, operations, size, table

if TYPE_CHECKING:
    from headway.checkpoints import Folder
    from headway.choice import Choice
    from headway.models import ModelSpec
    from headway.models.cost import Codes, Kept, LayerPlan, Report
    from headway.models.cost.processes import ProcessShare


def command(
    model: Annotated[str, says(metavar="MODEL")],
    *,
    context: int | None = None,
    batch: int = 1,
    source: int | None = None,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    weights: str | None = None,
    prefill_chunk: Count | None = None,
    patterns: str | None = None,
    processes: Count | None = None,
    mesh: str | None = None,
    json: bool = False,
    threads: int | None = None,
) -> None:
    """Does it fit, what does it move, how fast: before anything runs. No weights are loaded, nor downloaded.

    model: a name of the catalog, a folder with a config.json, a GGUF file, or a Hub id
    context: tokens per row [default: the trained context]
    batch: rows
    source: tokens per source row of an encoder-decoder [default: as --context]
    weights: int8, int4: as headway quantize makes them [default: the folder's]
    prefill_chunk: read prompts so many tokens at a time
    patterns: other patterns, e.g. 'Window.last(1024); Causal()', repeated
    processes: also what each of N processes of a training step takes
    mesh: how they share it: dp=2,cp=4 [default: dp, all of them]
    """
    import torch

    from headway.cache import kv_dtype
    from headway.errors import ConfigError
    from headway.models.cost import Machine
    from headway.models.cost.planning import plan, what_fits
    from headway.models.cost.processes import process_shares, whole_vocabs
    from headway.models.difference import BF16
    from headway.models.quantize import weight_kind
    from headway.parallel import Mesh
    from headway.patterns import parse
    from headway.storage.dtypes import named_dtype

    wanted = named_dtype(dtype)
    if wanted == torch.float16:
        raise ConfigError(
            "plan: float16 products are hundreds of times slower on most CPUs; --dtype bfloat16 is what is meant, or "
            "float32, in which a file of float16 runs"
        )
    stored = kv_dtype(kv_cache_dtype)
    set_threads(threads)
    spec, kept = find_model(model)
    kept = BF16._replace(why="a size of the catalog has no file") if kept is None else kept
    if wanted is not None:
        kept = kept._replace(dtype=wanted, why="asked for")
    if weights is not None:
        kept = kept._replace(quantized=weight_kind(weights))
    if patterns is not None:
        spec = spec.with_patterns([parse(part) for part in patterns.split(";")])
    note("measuring this machine's memory and matrix product ...")
    asked: dict[str, Any] = {
        "model": model,
        "context": spec.trained_context if context is None else context,
        "batch": batch,
        "source": source,
        "dtype": kept.dtype,
        "kv_dtype": stored,
        "quantized": kept.quantized,
        "prefill_chunk": prefill_chunk,
        "machine": Machine.here(kept.dtype),
    }
    report = plan(spec, **asked)
    would = [] if report.fits else [*what_fits(report, lambda **other: plan(spec, **{**asked, **other}))]
    report = replace(report, notes=(f"{report.dtype}: {kept.why}; --dtype asks for another", *report.notes))
    found = {**vars(report), "what_fits": {option: other.needed for option, other in would}}
    text = to_text(report, spec, would)
    if processes is not None or mesh is not None:
        among = Mesh.of(mesh, processes or 1)
        shares = process_shares(spec, among, asked["context"], batch, kept.dtype)
        found, text = {**found, "processes": shares}, f"{text}\n\n{shares_table(shares)}"
        for vocab in whole_vocabs(spec, among.tp):
            text += (
                f"\n\ntp={among.tp} does not divide a vocab of {vocab}: its embedding and output layer are whole in "
                "each process"
            )
    print_report(found, text, json)


def shares_table(shares: "Sequence[ProcessShare]") -> str:
    """A row for each process of a training step."""
    sent = ("gradients_sent", "weights_sent", "sums_sent", "rows_sent", "keys_sent")
    names = ("process", "rows x tokens", "holds", *(name.replace("_", " ") for name in sent), "hops")
    rows = [
        (
            str(share.rank),
            f"{share.rows} x {share.tokens}",
            *(size(getattr(share, name)) for name in ("memory", *sent)),
            share.hops,
            f"{share.pairs:.2f}",
        )
        for share in shares
    ]
    return table((*names, "pairs, to the mean"), rows)


def find_model(model: str) -> "tuple[ModelSpec, Kept | None]":
    """The spec of a catalog name, a GGUF file, or a Hugging Face folder (or its config.json); and how its weights are
    kept when it runs, None for a name of the catalog."""
    import torch

    from headway.checkpoints import load_folder, spec_from_config
    from headway.checkpoints.quantized.scheme import split_config
    from headway.checkpoints.remote import is_address, local_model
    from headway.errors import ConfigError
    from headway.models import catalog
    from headway.models.cost import Kept
    from headway.models.quantize import WeightKind
    from headway.storage.dtypes import DTYPES, choose_dtype
    from headway.storage.reading import read_json
    from headway.storage.tensors import open_tensors

    path = local_model(model, files=("config.json",)) if is_address(model) else Path(model)
    stored: dict[str, torch.dtype] = {}
    if path.is_file() and path.suffix != ".json":
        folder = load_folder(path)
        dtype, choice = folder.choose_dtype()
        return folder.spec, Kept(dtype, codes_of(folder), choice.why)
    if path.is_dir():
        if any(path.glob("model*.safetensors*")):
            stored = {n: f.dtype for n, f in open_tensors(path).forms.items() if f.dtype.is_floating_point}
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{model} is a folder without a config.json")
    if path.is_file():
        config, scheme = split_config(read_json(path))
        named = DTYPES.get(str(config.get("dtype") or config.get("torch_dtype")))
        dtype, choice = choose_dtype(stored or {"weights": named or torch.bfloat16}, torch.device("cpu"))
        why = choice.why if stored else "config.json names it" if named else "config.json names none"
        coded = scheme is not None and scheme.form != "mxfp4"  # which is read as plain numbers
        quantized = WeightKind(scheme.bits, scheme.group) if scheme is not None and coded else None
        return spec_from_config(config), Kept(dtype, quantized, why)
    if "/" in model or model.startswith("."):
        raise ConfigError(f"{model} is neither a folder with a config.json nor a name of the catalog")
    return catalog.spec(model), None


def codes_of(file: "Folder") -> "Codes | None":
    """The weights that a GGUF file's model keeps as codes."""
    from headway.models.cost import Codes
    from headway.nn.weights import code_bytes
    from headway.storage.gguf_blocks import CODED

    sizes = {
        name: (prod(layer.form.shape), code_bytes(CODED[layer.kept], *layer.form.shape))
        for name, layer in file.quantized.items()
    }
    return None if file.kept is None else Codes(file.kept, sizes)


def to_text(report: "Report", spec: "ModelSpec", would: "Sequence[tuple[str, Report]]" = ()) -> str:
    """The report for a terminal; `would` fit where it does not."""
    heads = f"{spec.layout.kind}, {spec.heads} query heads on {spec.kv_heads} kv heads of {spec.head_dim}"
    machine = report.machine
    kv = "" if report.kv_dtype == report.dtype else f", keys and values in {report.kv_dtype},"
    sides = (
        str(report.context)
        if report.source is None
        else f"{report.source} source and {report.context} target"
    )
    numbers = [(place, n, size(report.weight_bytes[place])) for place, n in report.parameters.items()]
    numbers.append(("total", report.parameter_count, size(report.weights)))
    if report.active < report.parameter_count:
        numbers.append(("... of one token", report.active, ""))
    memory = {
        "weights": report.weights,
        "keys and values": report.kv,
        "in the first pass": report.working,
        "needed": report.needed,
        "... once the prompt is read": report.decoding,
        "free on this machine": machine.memory,
        "training, at its peak": sum(report.training.values()),
        "... with blocks computed again": report.checkpointed,
        "gradients and moments of training": report.trained,
        "... of an adapter of rank 16": report.adapted,
    }
    parts = [
        f"{report.model}: {report.parameter_count:,} parameters, {spec.layers} layers of {spec.width}, {heads}\n"
        f"{report.batch} x {sides} tokens in {report.dtype}{kv} on {machine.name} "
        f"({size(machine.memory)} free, reads {machine.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies at {machine.peak / 1e9:.0f} GFLOP/s)",
        table(("parameters", "number", "bytes"), numbers),
        _layer_table(report.layers, report.kind),
        *([_layer_table(report.encoder_layers, "encoder")] if report.encoder_layers else []),
        "\n".join(
            f"  {layer.pattern}: {name} {choice}"
            for layer in (*report.layers, *report.encoder_layers)
            for name in ("cache", "prefill", "decode")
            if (choice := getattr(layer, name)) is not None
        ),
        table(("memory", "bytes"), [(name, size(n)) for name, n in memory.items() if n is not None]),
        _verdict(report, would),
        _work(report),
        "\n".join(f"  note: {line}" for line in report.notes),
    ]
    return "\n\n".join(parts)


def _layer_table(layers: "Sequence[LayerPlan]", kind: str) -> str:
    """What each kind of layer gets: an encoder's have no cache."""
    from headway.models.description import layer_numbers

    if kind == "encoder":
        rows = [(layer_numbers(layer.layers), layer.pattern, _what(layer.prefill)) for layer in layers]
        return table(("encoder's layers", "pattern", "whole rows"), rows)
    return table(
        ("layers", "pattern", "cache", "slots", "KV stored", "KV read", "prompt", "one token"),
        [
            (
                layer_numbers(layer.layers),
                layer.pattern,
                _what(layer.cache),
                layer.slots,
                size(layer.kv_stored),
                size(layer.kv_read),
                _what(layer.prefill),
                _what(layer.decode),
            )
            for layer in layers
        ],
    )


def _what(choice: "Choice | None") -> str:
    return "sums" if choice is None else choice.what


def _verdict(report: "Report", would: "Sequence[tuple[str, Report]]") -> str:
    """Whether it fits, and what would."""
    room = size(report.machine.memory)
    if report.fits:
        return f"  it fits: {size(report.needed)} of {room}"
    end = "; what would:" if would else ", and neither would fewer bits"
    fitting = [f"    {option:<40}{size(other.needed)}" for option, other in would]
    return "\n".join([f"  it does NOT fit: {size(report.needed)} of {room}{end}", *fitting])


def _work(report: "Report") -> str:
    """The first pass; and one more token, where there are such steps."""
    whole = {"decoder": "prompt", "encoder": "whole rows", "encoder-decoder": "source"}[report.kind]
    rows = [(whole, "", operations(report.prefill_flops), duration(report.prefill_seconds))]
    last = ""
    if report.moved is not None and report.step_flops is not None and report.step_seconds is not None:
        step = operations(report.step_flops), duration(report.step_seconds)
        rows.append(("one token per row", size(report.moved), *step))
        last = (
            f"\n\n  at best {report.tokens_per_second:.4g} tokens/s over {report.batch} rows; one token is bound by "
            + ("memory: bytes / bandwidth" if report.bound == "memory" else "compute: FLOPs / peak")
        )
    return table(("work", "bytes", "operations", "time at best"), rows) + last
