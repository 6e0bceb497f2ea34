"""`headway plan MODEL`: does it fit, what does it move, how fast, and which kernel and cache each layer gets."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._shared import JsonOption, KvCacheOption, ThreadsOption, note, print_report, set_threads
from headway.report import duration, operations, size, table

if TYPE_CHECKING:
    import torch

    from headway.choice import Choice
    from headway.models import ModelSpec
    from headway.models.cost import LayerPlan, Machine, Report
    from headway.models.cost.processes import ProcessShare


def command(
    model: Annotated[
        str, typer.Argument(help="a name of the catalog, or a folder with a config.json, or a Hub id")
    ],
    context: Annotated[
        int | None, typer.Option("--context", help="tokens per row [default: the trained context]")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", help="rows")] = 1,
    source: Annotated[
        int | None,
        typer.Option("--source", help="tokens per source row of an encoder-decoder [default: as --context]"),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16")] = "bfloat16",
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
        typer.Option("--measure", help="measure this machine again; else what was measured today counts"),
    ] = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Does it fit, what does it move, how fast: before anything runs. No weights are loaded, nor downloaded."""
    from headway.cache import kv_dtype
    from headway.errors import ConfigError, did_you_mean
    from headway.models.cost.alternatives import what_fits
    from headway.models.cost.planning import DTYPES, plan
    from headway.models.cost.processes import process_shares, whole_vocabs
    from headway.models.quantize import weight_kind
    from headway.parallel import Mesh
    from headway.patterns import parse

    if dtype not in DTYPES:
        raise ConfigError(
            f"plan: --dtype must be one of {', '.join(DTYPES)}, got {dtype!r}{did_you_mean(dtype, DTYPES)}"
            + (
                "; float16 products are hundreds of times slower on most CPUs, bfloat16 is what is meant"
                if "16" in dtype
                else ""
            )
        )
    stored = kv_dtype(kv_cache_dtype)
    set_threads(threads)
    spec, quantized = find_model(model)
    if weights is not None:
        quantized = weight_kind(weights)
    if patterns is not None:
        spec = spec.with_patterns([parse(part) for part in patterns.split(";")])
    asked: dict[str, Any] = {
        "model": model,
        "context": spec.trained_context if context is None else context,
        "batch": batch,
        "source": source,
        "dtype": DTYPES[dtype],
        "kv_dtype": stored,
        "quantized": quantized,
        "prefill_chunk": prefill_chunk,
        "machine": _machine(DTYPES[dtype], measure),
    }
    report = plan(spec, **asked)
    would = [] if report.fits else [*what_fits(report, lambda **other: plan(spec, **{**asked, **other}))]
    found = {**vars(report), "what_fits": {option: other.needed for option, other in would}}
    text = to_text(report, spec, would)
    if processes is not None or mesh is not None:
        among = Mesh.of(mesh, processes or 1)
        shares = process_shares(spec, among, asked["context"], batch, DTYPES[dtype])
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
    """This machine, with the roofs that were measured today unless they are to be measured `again`."""
    from headway.models.cost import Machine

    if again or not Machine.measured_today(dtype):
        note("measuring this machine's memory and matrix product ...")
    return Machine.here(dtype, again=again)


def find_model(model: str) -> "tuple[ModelSpec, tuple[int, int | None] | None]":
    """The spec of a catalog name, or of a Hugging Face folder (or its config.json); bits and groups of its weights
    where they are quantized."""
    from headway.checkpoints import spec_from_config
    from headway.checkpoints.quantized.scheme import split_config
    from headway.checkpoints.remote import is_address, local_model
    from headway.errors import ConfigError
    from headway.models import catalog
    from headway.storage.reading import read_json

    path = local_model(model, files=("config.json",)) if is_address(model) else Path(model)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise ConfigError(f"{model} is a folder without a config.json")
    if path.is_file():
        config, scheme = split_config(read_json(path))
        return spec_from_config(config), None if scheme is None else (scheme.bits, scheme.group)
    if "/" in model or model.startswith("."):
        raise ConfigError(f"{model} is neither a folder with a config.json nor a name of the catalog")
    return catalog.spec(model), None


def to_text(report: "Report", spec: "ModelSpec", would: Sequence[tuple[str, "Report"]] = ()) -> str:
    """The report for a terminal; `would` fit where it does not."""
    heads = f"{spec.layout.kind}, {spec.heads} query heads on {spec.kv_heads} kv heads of {spec.head_dim}"
    machine, per = report.machine, report.weights / report.parameter_count
    kv = "" if report.kv_dtype == report.dtype else f", keys and values in {report.kv_dtype},"
    sides = (
        str(report.context)
        if report.source is None
        else f"{report.source} source and {report.context} target"
    )
    when = "" if machine.measured is None else f"; measured {machine.measured}, --measure does it anew"
    parts = [
        f"{report.model}: {report.parameter_count:,} parameters, {spec.layers} layers of {spec.width}, {heads}\n"
        f"{report.batch} x {sides} tokens in {report.dtype}{kv} on {machine.name} "
        f"({size(machine.memory)} free, reads {machine.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies at {machine.peak / 1e9:.0f} GFLOP/s{when})",
        table(
            ("parameters", "number", "bytes"),
            [
                *((place, count, size(count * per)) for place, count in report.parameters.items()),
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
