"""`headway surgery gqa | window | context | longformer`: another function from the same weights, measured before and
after."""

import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headway.cli._longformer import longformer
from headway.cli._options import (
    AllowPickleOption,
    FolderArgument,
    JsonOption,
    LimitOption,
    OverwriteOption,
    RowOption,
    TargetArgument,
    ThreadsOption,
)
from headway.cli._shared import application, note, print_json, set_threads
from headway.report import cell, plain, size, table

if TYPE_CHECKING:
    from headway.checkpoints import Folder
    from headway.choice import Choice
    from headway.surgery import Operation, Pooled, Text
    from headway.surgery.operation import Change

app = application("Change what a model computes, and report what that costs and saves: docs/surgery.md.")

TextOption = Annotated[
    Path | None,
    typer.Option(
        "--text", help="held-out text to measure on: a file, a folder of text files, a .tokens file"
    ),
]


@app.command()
def gqa(
    model: FolderArgument,
    out: TargetArgument,
    kv_heads: Annotated[int, typer.Option("--kv-heads", help="key/value heads of the new model")],
    pool: Annotated[str, typer.Option("--pool", help="mean, first, random: what a group becomes")] = "mean",
    seed: Annotated[
        int | None,
        typer.Option("--seed", min=0, help="of --pool random, and first of --compare's [default: 0]"),
    ] = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="measure all three pools on --text, random with three seeds")
    ] = False,
    text: TextOption = None,
    context: RowOption = None,
    limit: LimitOption = None,
    allow_pickle: AllowPickleOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Fewer key/value heads: MHA to GQA to MQA, each group of heads becoming one."""
    from headway.checkpoints import load_folder
    from headway.checkpoints.folder import check_target
    from headway.choice import Choice
    from headway.errors import ConfigError
    from headway.surgery import POOLS, compare_pools, kept_by_mean, pool_heads, row_length

    if compare and text is None:
        raise ConfigError("surgery gqa: --compare measures losses, so it needs --text")
    if seed is not None and pool != "random" and not compare:
        raise ConfigError(f"surgery gqa: --seed is for --pool random or --compare; {pool} draws nothing")
    set_threads(threads)
    check_target(out, overwrite)
    folder = load_folder(model, allow_pickle=allow_pickle)
    drawn = seed if pool == "random" else None
    given: Any = pool
    spec, _ = pool_heads(folder.spec, folder.tensors, kv_heads, given, seed=drawn)
    kept = kept_by_mean(folder.spec, folder.tensors, kv_heads)
    group = folder.spec.kv_heads // kv_heads
    why = (
        f"{POOLS[given]}; the means hold {kept:.0%} of the squared key and value weights "
        f"(heads with nothing in common: {1 / group:.0%})"
    )
    choice = Choice(pool, why, rejected=tuple((p, r) for p, r in POOLS.items() if p != pool))
    with _opened(text, folder, limit) as words:
        rows: tuple[Pooled, ...] = ()
        if compare and words is not None:
            note("comparing mean, first and random")
            length = row_length(folder.spec, spec) if context is None else context
            first = 0 if seed is None else seed
            seeds = range(first, first + 3)
            rows = compare_pools(folder.spec, folder.tensors, kv_heads, words, length, seeds=seeds)
        _run(
            folder,
            out,
            lambda spec, state: pool_heads(spec, state, kv_heads, given, seed=drawn),
            choice,
            rows=rows,
            text=words,
            context=context,
            overwrite=overwrite,
            json=json,
        )


@app.command()
def window(
    model: FolderArgument,
    out: TargetArgument,
    keys: Annotated[int, typer.Option("--window", min=1, help="keys that a query sees, itself included")],
    sinks: Annotated[
        int, typer.Option("--sinks", min=0, help="first tokens that are seen from everywhere")
    ] = 0,
    layers: Annotated[
        str | None,
        typer.Option("--layers", help="'0-3,5' or all [default: the layers that see all before them]"),
    ] = None,
    text: TextOption = None,
    context: RowOption = None,
    limit: LimitOption = None,
    allow_pickle: AllowPickleOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """A window and attention sinks where a layer saw everything: its cache stops growing."""
    from headway.checkpoints import load_folder
    from headway.checkpoints.inspection import layer_numbers
    from headway.choice import Choice
    from headway.surgery import open_layers, parse_layers, put_window

    set_threads(threads)
    folder = load_folder(model, allow_pickle=allow_pickle)
    chosen = None if layers is None else parse_layers(layers, folder.spec.layers)
    which = layer_numbers(list(open_layers(folder.spec) if chosen is None else chosen))
    grows = set(open_layers(folder.spec))
    why = "they see all before them, so their caches grow" if chosen is None else "asked for"
    with _opened(text, folder, limit) as words:
        _run(
            folder,
            out,
            lambda spec, state: put_window(spec, state, keys, sinks=sinks, layers=chosen),
            Choice(f"layers {which}", why),
            text=words,
            context=context,
            beyond=keys + sinks if grows.issuperset(chosen or ()) else 0,
            overwrite=overwrite,
            json=json,
        )


@app.command()
def context(
    model: FolderArgument,
    out: TargetArgument,
    method: Annotated[str, typer.Option("--method", help="linear, ntk, yarn, llama3, dynamic")],
    factor: Annotated[float, typer.Option("--factor", min=1.0, help="longest row over the trained context")],
    text: TextOption = None,
    context: RowOption = None,
    limit: LimitOption = None,
    allow_pickle: AllowPickleOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Longer rows: rotary frequencies are rescaled. Perplexity by position shows what that gives, and costs."""
    from headway.checkpoints import load_folder
    from headway.choice import Choice
    from headway.surgery import METHODS, stretch_context

    set_threads(threads)
    folder = load_folder(model, allow_pickle=allow_pickle)
    given: Any = method
    stretch_context(folder.spec, {}, given, factor)
    choice = Choice(method, METHODS[given], rejected=tuple((m, r) for m, r in METHODS.items() if m != method))
    with _opened(text, folder, limit) as words:
        _run(
            folder,
            out,
            lambda spec, state: stretch_context(spec, state, given, factor),
            choice,
            text=words,
            context=context,
            beyond=folder.spec.trained_context,
            overwrite=overwrite,
            json=json,
        )


def _opened(text: Path | None, folder: "Folder", limit: int | None) -> "AbstractContextManager[Text | None]":
    from headway.errors import ConfigError
    from headway.surgery import Text

    if text is None and limit is not None:
        raise ConfigError("surgery: --limit counts tokens of a text; give one with --text")
    return nullcontext() if text is None else Text.read(text, folder, limit)


def _run(
    folder: "Folder",
    out: Path,
    change: "Change",
    choice: "Choice",
    *,
    rows: "tuple[Pooled, ...]" = (),
    json: bool,
    **settings: Any,
) -> None:
    """Operate, and print the report."""
    from headway.surgery import operate, verdict

    note(f"reading {folder.path}, measuring before and after")
    done = operate(folder, out, change, choices=(choice,), **settings)
    said = verdict(rows) if rows else None
    if json:
        print_json({**plain(done), "pools": rows, "verdict": said})
        return
    print(to_text(done))
    if rows:
        columns = ("pool", "seed", "nats per token", "bits per byte")
        cells = [(r.pool, r.seed, r.loss, r.bits_per_byte) for r in rows]
        print(f"\n  right after, without training:\n{table(columns, cells)}\n  {said}")


def to_text(done: "Operation") -> str:
    """The report for a terminal."""
    was, now = done.before, done.after
    lines = [f"{done.source} -> {done.target}; transformers {done.transformers}"]
    lines += [f"  {name}: {a} -> {b}" for name, a, b in done.changed] or ["  the spec stays as it was"]
    for choice in done.choices:
        lines += [
            f"  {choice.what}: {choice.why}",
            *(f"    not {name}: {why}" for name, why in choice.rejected),
        ]
    rows: list[tuple[object, ...]] = [
        ("parameters", was.parameters, now.parameters),
        (f"KV per token ({done.dtype})", size(was.kv_bytes_per_token), size(now.kv_bytes_per_token)),
        (f"KV of a row of {done.context}", size(was.kv_bytes_stored), size(now.kv_bytes_stored)),
    ]
    if was.loss is not None:
        rows += [
            ("nats per token", was.loss, now.loss),
            ("bits per byte", was.bits_per_byte, now.bits_per_byte),
            ("perplexity", was.perplexity, now.perplexity),
        ]
    lines += ["", table(("what", "before", "after"), rows), ""]
    lines.append(
        f"  largest difference of a logit: {cell(done.difference)} (largest logit {cell(done.largest_logit)}), "
        f"in the last {done.probed} of {done.probe} tokens"
    )
    if done.positions:
        columns = ("tokens to look back on", "predictions", "perplexity before", "after")
        ranges = [(f"{p.first}-{p.last}", p.tokens, _exp(p.before), _exp(p.after)) for p in done.positions]
        lines += ["", table(columns, ranges)]
    else:
        lines.append("  no loss was measured: --text FILE gives held-out text to measure it on")
    return "\n".join(lines)


def _exp(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


app.command()(longformer)
command = typer.main.get_command(app)
