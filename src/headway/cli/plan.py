"""`headway plan MODEL`: does it fit, what does it move, how fast, and which kernel and cache each layer gets."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._shared import (
    DtypeOption,
    JsonOption,
    KvCacheOption,
    ThreadsOption,
    note,
    print_report,
    set_threads,
)
from headway.report import duration, operations, size, table

if TYPE_CHECKING:
    import torch

    from headway.checkpoints import Folder
    from headway.choice import Choice
    from headway.models import ModelSpec
    from headway.models.cost import Codes, Kept, LayerPlan, Machine, Report
    from headway.models.cost.processes import ProcessShare


def command(
    model: Annotated[
        str,
        typer.Argument(
            help="a name of the catalog, a folder with a config.json, a GGUF file, or a Hub id",
            metavar="MODEL",
        ),
    ],
    context: Annotated[
        int | None, typer.Option("--context", help="tokens per row [default: the trained context]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="rows")] = 1,
    source: Annotated[
        int | None,
        typer.Option("--source", help="tokens per source row of an encoder-decoder [default: as --context]"),
    ] = None,
    dtype: DtypeOption = "auto",
    kv_cache_dtype: KvCacheOption = "auto",
    weights: Annotated[
        str | None,
        typer.Option("--weights", help="int8, int4: as headway quantize makes them [default: the folder's]"),
    ] = None,
    prefill_chunk: Annotated[
        int | None, typer.Option("--prefill-chunk", min=1, help="read prompts so many tokens at a time")
    ] = None,
    patterns: Annotated[
        str | None,
        typer.Option("--patterns", help="other patterns, e.g. 'Window.last(1024); Causal()', repeated"),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", min=1, help="also what each of N processes of a training step takes"),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option("--mesh", help="how they share it: dp=2,cp=4 [default: dp, all of them]"),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="measure this machine again; the best that was measured in a day counts"
        ),
    ] = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Does it fit, what does it move, how fast: before anything runs. No weights are loaded, nor downloaded."""
    import torch

    from headway.cache import kv_dtype
    from headway.errors import ConfigError
    from headway.models.cost.alternatives import what_fits
    from headway.models.cost.planning import plan
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
    asked: dict[str, Any] = {
        "model": model,
        "context": spec.trained_context if context is None else context,
        "batch": batch,
        "source": source,
        "dtype": kept.dtype,
        "kv_dtype": stored,
        "quantized": kept.quantized,
        "prefill_chunk": prefill_chunk,
        "machine": _machine(kept.dtype, measure),
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
    sent = ("gradients sent", "weights sent", "sums sent", "keys sent")
    names = ("process", "rows x tokens", "holds", *sent, "hops", "pairs, to the mean")
    return table(
        names,
        [
            (
                str(share.rank),
                f"{share.rows} x {share.tokens}",
                size(share.memory),
                size(share.gradients_sent),
                size(share.weights_sent),
                size(share.sums_sent),
                size(share.keys_sent),
                share.hops,
                f"{share.pairs:.2f}",
            )
            for share in shares
        ],
    )


def _machine(dtype: "torch.dtype", again: bool) -> "Machine":
    """This machine, with its roofs, which are measured where that was long ago, or `again`."""
    from headway.models.cost import Machine

    if again or not Machine.is_measured(dtype):
        note("measuring this machine's memory and matrix product ...")
    return Machine.here(dtype, again=again)


def find_model(model: str) -> "tuple[ModelSpec, Kept | None]":
    """The spec of a catalog name, a GGUF file, or a Hugging Face folder (or its config.json); and how its weights are
    kept when it runs, None for a name of the catalog."""
    import torch

    from headway.checkpoints import choose_dtype, load_folder, open_tensors, spec_from_config
    from headway.checkpoints.quantized.scheme import split_config
    from headway.checkpoints.remote import is_address, local_model
    from headway.errors import ConfigError
    from headway.models import catalog
    from headway.models.cost import Kept
    from headway.models.quantize import WeightKind
    from headway.storage.dtypes import DTYPES
    from headway.storage.reading import read_json

    path = local_model(model, files=("config.json",)) if is_address(model) else Path(model)
    stored: dict[str, torch.dtype] = {}
    if path.suffix == ".gguf":
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
        quantized = None if scheme is None else WeightKind(scheme.bits, scheme.group)
        return spec_from_config(config), Kept(dtype, quantized, why)
    if "/" in model or model.startswith("."):
        raise ConfigError(f"{model} is neither a folder with a config.json nor a name of the catalog")
    return catalog.spec(model), None


def codes_of(file: "Folder") -> "Codes | None":
    """The weights that a GGUF file's model keeps as codes."""
    from headway.models.cost import Codes
    from headway.nn import code_bytes
    from headway.storage.gguf_blocks import CODED

    shapes = {name: file.tensors.forms[f"{name}.weight"].shape for name in file.codes}
    sizes = {name: (o * i, code_bytes(CODED[file.codes[name]], o, i)) for name, (o, i) in shapes.items()}
    return None if file.kept is None else Codes(file.kept, sizes)


def to_text(report: "Report", spec: "ModelSpec", would: Sequence[tuple[str, "Report"]] = ()) -> str:
    """The report for a terminal; `would` fit where it does not."""
    heads = f"{spec.layout.kind}, {spec.heads} query heads on {spec.kv_heads} kv heads of {spec.head_dim}"
    machine = report.machine
    kv = "" if report.kv_dtype == report.dtype else f", keys and values in {report.kv_dtype},"
    sides = (
        str(report.context)
        if report.source is None
        else f"{report.source} source and {report.context} target"
    )
    ages = [""] * 2 if machine.ages is None else [f" ({_age(age)})" for age in machine.ages]
    when = "" if machine.ages is None else "; the best of a day"
    parts = [
        f"{report.model}: {report.parameter_count:,} parameters, {spec.layers} layers of {spec.width}, {heads}\n"
        f"{report.batch} x {sides} tokens in {report.dtype}{kv} on {machine.name} "
        f"({size(machine.memory)} free, reads {machine.bandwidth / 1e9:.1f} GB/s{ages[0]}, "
        f"multiplies at {machine.peak / 1e9:.0f} GFLOP/s{ages[1]}{when})",
        table(
            ("parameters", "number", "bytes"),
            [
                *((place, n, size(report.weight_bytes[place])) for place, n in report.parameters.items()),
                ("total", report.parameter_count, size(report.weights)),
            ],
        ),
        _layer_table(report.layers, report.kind),
        *([_layer_table(report.encoder_layers, "encoder")] if report.encoder_layers else []),
        "\n".join(
            f"  {layer.pattern}: {name} {choice}"
            for layer in (*report.layers, *report.encoder_layers)
            for name in ("cache", "prefill", "decode")
            if (choice := getattr(layer, name)) is not None
        ),
        table(
            ("memory", "bytes"),
            [
                ("weights", size(report.weights)),
                ("keys and values", size(report.kv)),
                ("in the first pass", size(report.working)),
                ("needed", size(report.needed)),
                *(
                    [("... once the prompt is read", size(report.decoding))]
                    if report.decoding is not None
                    else []
                ),
                ("free on this machine", size(machine.memory)),
                ("training, at its peak", size(sum(report.training.values()))),
                ("... with blocks computed again", size(report.checkpointed)),
                ("gradients and moments of training", size(report.trained)),
                ("... of an adapter of rank 16", size(report.adapted)),
            ],
        ),
        _verdict(report, would),
        _work(report),
        "\n".join(f"  note: {line}" for line in report.notes),
    ]
    return "\n\n".join(parts)


def _age(seconds: float) -> str:
    return "now" if seconds < 60 else f"{duration(60 * (seconds // 60))} ago"


def _layer_table(layers: Sequence["LayerPlan"], kind: str) -> str:
    """What each kind of layer gets: an encoder's have no cache."""
    if kind == "encoder":
        rows = [(_ranges(layer.layers), layer.pattern, _what(layer.prefill)) for layer in layers]
        return table(("encoder's layers", "pattern", "whole rows"), rows)
    return table(
        ("layers", "pattern", "cache", "slots", "KV stored", "KV read", "prompt", "one token"),
        [
            (
                _ranges(layer.layers),
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


def _verdict(report: "Report", would: Sequence[tuple[str, "Report"]]) -> str:
    """Whether it fits, and what would."""
    room = size(report.machine.memory)
    if report.fits:
        return f"  it fits: {size(report.needed)} of {room}"
    lines = [f"  it does NOT fit: {size(report.needed)} of {room}; what would:"]
    lines += [f"    {option:<40}{size(other.needed)}" for option, other in would]
    return "\n".join(
        lines if would else [lines[0].replace("; what would:", ", and neither would fewer bits")]
    )


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


def _ranges(layers: tuple[int, ...]) -> str:
    """0-31, or 0,2,4..30: numbers, abbreviated."""
    if len(layers) == 1:
        return str(layers[0])
    steps = {b - a for a, b in pairwise(layers)}
    if steps == {1}:
        return f"{layers[0]}-{layers[-1]}"
    if len(steps) == 1 and len(layers) > 2:
        return f"{layers[0]},{layers[1]}..{layers[-1]}"
    return ",".join(map(str, layers))
