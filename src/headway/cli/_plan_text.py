"""The report of `headway plan` for a terminal."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headway.report import duration, operations, size, table

if TYPE_CHECKING:
    from headway.choice import Choice
    from headway.models import ModelSpec
    from headway.models.cost import LayerPlan, Report


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
    parts = [
        f"{report.model}: {report.parameter_count:,} parameters, {spec.layers} layers of {spec.width}, {heads}\n"
        f"{report.batch} x {sides} tokens in {report.dtype}{kv} on {machine.name} "
        f"({size(machine.memory)} free, reads {machine.bandwidth / 1e9:.1f} GB/s, "
        f"multiplies at {machine.peak / 1e9:.0f} GFLOP/s)",
        table(
            ("parameters", "number", "bytes"),
            [
                *((place, n, size(report.weight_bytes[place])) for place, n in report.parameters.items()),
                ("total", report.parameter_count, size(report.weights)),
                *(
                    [("... of one token", report.active, "")]
                    if report.active < report.parameter_count
                    else []
                ),
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
