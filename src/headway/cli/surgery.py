"""`headway surgery gqa | window | context | merge | longformer`: changes the function of a model and measures it before
and after; `headway quantize MODEL OUT --weights int8`: writes weights of 8 or 4 bits, measured likewise."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._options import Count, Whole, application, says
from headway.cli._rewriting import MeasuredRun, Run, to_text
from headway.cli._shared import note, print_report
from headway.errors import ConfigError
from headway.report import plain, table

if TYPE_CHECKING:
    from headway.checkpoints import Folder
    from headway.surgery import Change, Pooled, Text


def changed(
    run: MeasuredRun,
    folder: "Folder",
    change: "Change",
    *,
    beyond: int = 0,
    compare: "Callable[[Text], tuple[Pooled, ...]] | None" = None,
) -> None:
    """Writes the changed folder and prints the report; `compare` measures alternatives on the text beforehand."""
    from headway.surgery import operate, verdict

    with run.text(folder) as words:
        rows = () if words is None or compare is None else compare(words)
        note(f"reading {folder.path}, measuring before and after")
        done = operate(
            folder, run.out, change, text=words, context=run.context, beyond=beyond, overwrite=run.overwrite
        )
    order, report = verdict(rows) if rows else None, to_text(done)
    if rows:
        columns = ("pool", "seed", "nats per token", "bits per byte")
        cells = table(columns, [(r.pool, r.seed, r.loss, r.bits_per_byte) for r in rows])
        report += f"\n\n  right after, without training:\n{cells}\n  {order}"
    print_report({**plain(done), "pools": rows, "verdict": order}, report, run.json)


def gqa(
    run: MeasuredRun, *, kv_heads: int, pool: str = "mean", seed: Whole | None = None, compare: bool = False
) -> None:
    """Reduce the key/value heads: MHA to GQA to MQA, each group of heads becoming one.

    kv_heads: number of key/value heads of the new model
    pool: how a group becomes one head: mean, first, random
    seed: seed of --pool random, and the first seed of --compare [default: 0]
    compare: measure all three pools on --data, random with three seeds
    """
    from headway.choice import Choice
    from headway.surgery import POOLS, Change, compare_pools, kept_by_mean, pool_heads, row_length

    if compare and run.data is None:
        raise ConfigError("surgery gqa: --compare measures losses, so it needs --data")
    if seed is not None and pool != "random" and not compare:
        raise ConfigError(f"surgery gqa: --seed is for --pool random or --compare; {pool} draws nothing")
    folder = run.open()
    drawn = seed if pool == "random" else None
    kind: Any = pool
    new, state = pool_heads(folder.spec, folder.tensors, kv_heads, kind, seed=drawn)
    share = kept_by_mean(folder.spec, folder.tensors, kv_heads)
    group = folder.spec.kv_heads // kv_heads
    why = (
        f"{POOLS[kind]}; the means hold {share:.0%} of the squared key and value weights "
        f"(heads with nothing in common: {1 / group:.0%})"
    )
    choice = Choice(pool, why, rejected=tuple((p, r) for p, r in POOLS.items() if p != pool))

    def compared(words: "Text") -> "tuple[Pooled, ...]":
        note("comparing mean, first and random")
        length = row_length(folder.spec, new) if run.context is None else run.context
        seeds = range(seed or 0, (seed or 0) + 3)
        return compare_pools(folder.spec, folder.tensors, kv_heads, words, length, seeds=seeds)

    changed(run, folder, Change(new, state, choices=(choice,)), compare=compared if compare else None)


def window(
    run: MeasuredRun,
    *,
    keys: Annotated[Count, says(flag="window")],
    sinks: Whole = 0,
    layers: str | None = None,
) -> None:
    """Replace full causal attention by a window and attention sinks, so that a layer's cache stops growing.

    keys: keys that a query sees, including itself
    sinks: number of first tokens that every query sees
    layers: '0-3,5' or all [default: the layers with full attention]
    """
    from headway.choice import Choice
    from headway.models.description import layer_numbers
    from headway.surgery import Change, open_layers, parse_layers, put_window

    folder = run.open()
    chosen = None if layers is None else parse_layers(layers, folder.spec.layers)
    grows = open_layers(folder.spec)
    numbers = layer_numbers(list(grows if chosen is None else chosen))
    why = "they saw all before them, so that their caches grew" if chosen is None else "asked for"
    new = put_window(folder.spec, folder.tensors, keys, sinks=sinks, layers=chosen)
    beyond = keys + sinks if set(grows).issuperset(chosen or ()) else 0
    changed(run, folder, Change(*new, choices=(Choice(f"layers {numbers}", why),)), beyond=beyond)


def context(run: MeasuredRun, *, method: str, factor: Annotated[float, says(min=1.0)]) -> None:
    """Extend the context by rescaling rotary frequencies. Perplexity by position shows the gain and the cost.

    method: linear, ntk, yarn, llama3, dynamic
    factor: new context over the trained context
    """
    from headway.choice import Choice
    from headway.surgery import METHODS, Change, stretch_context

    folder = run.open()
    kind: Any = method
    new = stretch_context(folder.spec, folder.tensors, kind, factor)
    choice = Choice(method, METHODS[kind], rejected=tuple((m, r) for m, r in METHODS.items() if m != method))
    changed(run, folder, Change(*new, choices=(choice,)), beyond=folder.spec.trained_context)


def merge(run: MeasuredRun, *, adapter: list[Path] | None = None, any_base: bool = False) -> None:
    """Merge adapters into the weights; MODEL may be an adapter's folder. "Before" is the model with separate
    adapters."""
    from headway.checkpoints import load_adapter, merged_state
    from headway.checkpoints.bases import with_adapters, with_base
    from headway.choice import Choice
    from headway.surgery import Change

    base, places = with_base(run.model, adapter or ())
    if not places:
        raise ConfigError(
            f"surgery merge: {base} is a model, not an adapter; give the adapter to merge into it: --adapter FOLDER"
        )
    folder = with_adapters(replace(run, model=Path(base)).open(), places, any_base=any_base)
    adapters = [load_adapter(place, folder.spec) for place in places]
    layers = len({layer for loaded in adapters for layer in loaded.layers})
    choice = Choice(f"{layers} layers", f"adapted by {', '.join(map(str, places))}")
    changed(run, folder, Change(folder.spec, merged_state(folder.tensors, adapters), choices=(choice,)))


def longformer(
    run: Run,
    *,
    context: Count = 4096,
    window: str = "512",
    text: Annotated[Path | None, says(flag="data")] = None,
) -> None:
    """Convert a BERT or RoBERTa for long texts: windows, global tokens, and copies of its positions end to end.

    context: maximum row length of the new model, in tokens
    window: other tokens that a token sees, half on each side: one number, or one for each layer
    text: text whose beginning both models read for the comparison [default: random ids]
    """
    from headway.data import texts
    from headway.surgery import lengthen

    try:
        sizes = [int(part) for part in window.split(",")]
    except ValueError:
        raise ConfigError(
            f"surgery longformer: --window is one even number, or one for each layer joined by commas, got {window!r}"
        ) from None
    folder = run.open()
    note(f"reading {folder.path}, comparing short rows before and after")
    words = None if text is None else next(texts(text), "")
    windows = sizes[0] if len(sizes) == 1 else sizes
    done = lengthen(folder, run.out, context, windows, text=words, overwrite=run.overwrite)
    print_report(done, to_text(done), run.json)


def quantize(
    run: MeasuredRun,
    *,
    weights: str,
    group: Annotated[int | None, says(min=-1)] = None,
    output: bool = False,
    calibrate: Path | None = None,
) -> None:
    """Write a model with weights of 8 or 4 bits, in the format of compressed-tensors, which transformers reads.

    weights: int8, int4
    group: number of inputs that share a scale, a multiple of 32, or -1 for all [default: 32]
    output: also quantize the output layer, unless it is tied to the embedding
    calibrate: text for GPTQ [default: round to the nearest]
    """
    from headway.surgery import Text, quantize_folder

    folder = run.open()
    with (
        run.text(folder) as text,
        nullcontext() if calibrate is None else Text.read(calibrate, folder) as calibration,
    ):
        note(f"reading {folder.path}")
        done = quantize_folder(
            folder, run.out, weights, group=group, output=output, calibrate=calibration, text=text, context=run.context,
            overwrite=run.overwrite,
        )  # fmt: skip
    print_report(done, to_text(done), run.json)


ABOUT = "Change what a model computes, and report what that costs and saves: docs/surgery.md."
command = typer.main.get_command(application(ABOUT, gqa, window, context, merge, longformer))
