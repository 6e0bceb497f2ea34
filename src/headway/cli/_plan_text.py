"""Text of `headway plan`'s report for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.report import duration, operations, size, table

if TYPE_CHECKING:
    from headway.choice import Choice
    from headway.models import ModelSpec
    from headway.models.cost import LayerPlan, Machine, Report, TrainingTime
    from headway.models.cost.processes import ProcessShare


def to_text(report: "Report", spec: "ModelSpec", alternatives: "Sequence[tuple[str, Report]]" = ()) -> str:
    """Returns the report as text; `alternatives` are options that fit if the report's do not."""
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
        "there is": machine.memory,
        "training, at its peak": sum(report.training.values()),
        "... with all scores kept": report.scores_stored,
        "... with blocks computed again": report.checkpointed,
        "gradients and moments of training": report.trained,
        "... of an adapter of rank 16": report.adapted,
    }
    parts = [
        f"{report.model}: {report.parameter_count:,} parameters, {spec.layers} layers of {spec.width}, {heads}\n"
        f"{report.batch} x {sides} tokens in {report.dtype}{kv} on {machine.name} "
        f"({size(machine.memory)} of memory, reads {machine.bandwidth / 1e9:.1f} GB/s, "
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
        _verdict(report, alternatives),
        _work(report),
        "\n".join(f"  note: {line}" for line in report.notes),
    ]
    return "\n\n".join(parts)


def _layer_table(layers: "Sequence[LayerPlan]", kind: str) -> str:
    """Returns a table with a row for each kind of layer: its cache and kernels; the layers of an encoder have no
    cache."""
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


def _verdict(report: "Report", alternatives: "Sequence[tuple[str, Report]]") -> str:
    """Returns whether the model fits in memory, and which options would."""
    room = size(report.machine.memory)
    if report.fits:
        return f"  to run, it fits: {size(report.needed)} of {room}"
    end = "; what would:" if alternatives else ", and neither would fewer bits"
    fitting = [f"    {option:<40}{size(alternative.needed)}" for option, alternative in alternatives]
    return "\n".join([f"  to run, it does NOT fit: {size(report.needed)} of {room}{end}", *fitting])


def _work(report: "Report") -> str:
    """Returns a table of the first pass and, unless it is an encoder, of a decoding step."""
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


def shares_table(shares: "Sequence[ProcessShare]") -> str:
    """Returns a table with a row for each process of a training step."""
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


def training_verdict(report: "Report", whole: int, redone: int, processes: int) -> str:
    """Returns whether a training step fits in memory at its peak, without and with gradient checkpointing."""
    room, separate = report.machine.memory, report.machine.device != "cpu"
    where = (
        ""
        if not processes
        else f" in each of {processes} processes"
        if separate
        else f" in {processes} processes"
    )
    word = "it fits" if whole <= room else "it does NOT fit"
    again = "it fits" if redone <= room else "it does NOT fit"
    return (
        f"  to train{where}, {word}: {size(whole)} of {size(room)}\n"
        f"  ... with blocks computed again, {again}: {size(redone)}"
    )


def time_text(run: "TrainingTime", machine: "Machine") -> str:
    """Returns how long training takes at fractions of the peak, and which fraction of the peak the reported hours
    imply."""
    on = machine.name if run.devices == 1 else f"{run.devices} x {machine.name}"
    lines = [
        f"  {run.rows:,} full rows x {run.epochs} on {on}: {run.tokens:,} tokens, {operations(run.flops)}",
        *(f"  at {part:.0%} of the peak  {duration(run.seconds / part)}" for part in (1.0, 0.5, 0.25)),
    ]
    if run.hours is not None and run.share is not None:
        more = (
            ""
            if run.share <= 1
            else ": more than there is, so that it was not with full rows, or not on these"
        )
        lines.append(f"  {duration(3600 * run.hours)} is {run.share:.1%} of the peak{more}")
    return "\n".join(lines)
