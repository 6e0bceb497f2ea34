"""`headway bench attention | linear | memory`: what attention costs on this machine, beside its peers."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli._options import BackendOption, JsonOption, ThreadsOption
from headway.cli._shared import application, note, set_threads

if TYPE_CHECKING:
    from headway_lab.bench.rows import Row

app = application(
    "What attention costs on this machine, beside its peers: docs/benchmarks.md says how it is measured."
)

CaseOption = Annotated[
    list[str] | None, typer.Option("--case", help="only this case (repeatable); a wrong name lists them")
]
DtypeOption = Annotated[
    list[str] | None, typer.Option("--dtype", help="float32 or bfloat16 (repeatable) [default: each case's]")
]
QuickOption = Annotated[bool, typer.Option("--quick", help="a subset, within a minute")]
TokensOption = Annotated[
    int | None,
    typer.Option("--tokens", min=16, help="every case at this length; windows shrink to a quarter of it"),
]
OutOption = Annotated[Path | None, typer.Option("--out", help="folder for charts (PNG)")]
SaveOption = Annotated[
    bool, typer.Option("--save", help="append to bench/results/DATE-CPU.jsonl, with machine and versions")
]


@app.command()
def attention(
    case: CaseOption = None,
    dtype: DtypeOption = None,
    direction: Annotated[
        str | None, typer.Option("--pass", help="forward or forward+backward [default: both]")
    ] = None,
    quick: QuickOption = False,
    tokens: TokensOption = None,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="turns per row, at most")] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="at 1, 2, 4, ... threads")] = False,
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="beside torch with MKL's full path on AMD, too")
    ] = True,
    out: OutOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
    backend: BackendOption = "auto",
) -> int:
    """Attention in every case of the table, interleaved with torch, FlexAttention and transformers."""
    from dataclasses import replace

    from headway.errors import ConfigError
    from headway_lab.bench.cases import chosen
    from headway_lab.bench.run import Wish
    from headway_lab.bench.run import attention as rows_of
    from headway_lab.bench.run import scaling as numbers_of_threads
    from headway_lab.bench.timing import QUICK, WELL

    if scaling and threads is not None:
        raise ConfigError("bench: --scaling measures at 1, 2, 4, ... threads; leave out --threads")
    known("--dtype", dtype or (), DTYPES)
    known("--pass", [direction] if direction else (), PASSES)
    set_threads(threads)
    effort = QUICK if quick else WELL
    if repeats is not None:
        effort = replace(effort, repeats=repeats, least=min(repeats, effort.least))
    wish = Wish(
        cases=chosen(case or (), quick=quick, tokens=tokens),
        dtypes=tuple(dtype or ()),
        passes=(direction,) if direction else (),
        backend=backend,
        threads=numbers_of_threads() if scaling else (),
        tuned=tuned,
        effort=effort,
        seconds=QUICK_SECONDS if quick else None,
    )
    return show(rows_of(wish, note), out, save, json)


@app.command()
def linear(
    feature: Annotated[
        str, typer.Option("--feature", help="phi, or cosine; a wrong name lists them")
    ] = "elu+1",
    direction: Annotated[
        str | None, typer.Option("--pass", help="forward or forward+backward [default: both]")
    ] = None,
    quick: QuickOption = False,
    tokens: Annotated[int | None, typer.Option("--tokens", min=512, help="no length above this one")] = None,
    save: SaveOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Linear attention at growing lengths, beside softmax attention, and the power that its time grows with."""
    from headway.attention.linear_attention import LinearAttentionSpec
    from headway_lab.bench.linear import USUAL, Growth
    from headway_lab.bench.linear import linear as rows_of
    from headway_lab.bench.memory import powers
    from headway_lab.bench.timing import QUICK

    known("--pass", [direction] if direction else (), PASSES)
    set_threads(threads)
    most = tokens or (8192 if quick else 131072)
    growth = Growth(
        linear=LinearAttentionSpec(feature),
        lengths=powers(min(2048, most // 4), most),
        passes=(direction,) if direction else PASSES,
        effort=QUICK if quick else USUAL,
    )
    return show(rows_of(growth, note), None, save, json)


@app.command()
def memory(
    case: CaseOption = None,
    dtype: DtypeOption = None,
    quick: QuickOption = False,
    tokens: Annotated[int | None, typer.Option("--tokens", min=64, help="no length above this one")] = None,
    out: OutOption = None,
    save: SaveOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
    backend: BackendOption = "auto",
) -> int:
    """What forward and backward hold beyond inputs and outputs, each length in a process of its own."""
    from headway_lab.bench.memory import chosen
    from headway_lab.bench.memory import memory as rows_of
    from headway_lab.bench.run import check_backend

    known("--dtype", dtype or (), DTYPES)
    check_backend(backend)
    set_threads(threads)
    return show(
        rows_of(chosen(case or (), quick=quick, tokens=tokens), dtype or (), backend, note), out, save, json
    )


DTYPES = ("float32", "bfloat16")
PASSES = ("forward", "forward+backward")
QUICK_SECONDS = 45.0
"""What --quick may take beyond starting and drawing."""


def known(option: str, given: Iterable[str], values: tuple[str, ...]) -> None:
    """Raises ConfigError for a value that is none of `values`."""
    from headway.errors import ConfigError, did_you_mean

    for value in given:
        if value not in values:
            raise ConfigError(
                f"bench: {option} is {' or '.join(values)}, got {value!r}{did_you_mean(value, values)}"
            )


def show(rows: "Iterable[Row]", out: Path | None, save: bool, json: bool) -> int:
    """Print the rows as they come (JSON) or together (a table), also where Ctrl-C ends them. The exit code is 1 where a
    peer gave another result than headway, or nothing could be measured."""
    from headway_lab.bench import report
    from headway_lab.bench.charts import draw
    from headway_lab.bench.rows import unlike

    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
            if json:
                print(report.line(row), flush=True)
    finally:
        if done and not json:
            print(report.text(done), flush=True)
        if done and save:
            note(f"saved: {report.save(done)}")
        if done and out is not None:
            note("written: " + ", ".join(map(str, draw(done, out))))
    differing = unlike(done)
    for line in differing:
        note(f"headway: error: {line}")
    measured = any(row.ours_ms is not None for row in done)
    if not measured:
        note("headway: error: nothing could be measured; each row says why")
    return 0 if measured and not differing else 1


command = typer.main.get_command(app)
