"""`headway bench attention | linear | memory`: what attention costs on this machine, beside its peers."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import report_error
from headway.cli._options import BackendOption, JsonOption, ThreadsOption
from headway.cli._shared import application, note, set_threads
from headway.errors import ConfigError, did_you_mean

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
PassOption = Annotated[str | None, typer.Option("--pass", help="forward or forward+backward [default: both]")]
QuickOption = Annotated[bool, typer.Option("--quick", help="a subset, within a minute")]
OutOption = Annotated[Path | None, typer.Option("--out", help="folder for charts (PNG)")]
SaveOption = Annotated[
    bool, typer.Option("--save", help="append to bench/results/DATE-CPU.jsonl, with machine and versions")
]

DTYPES = ("float32", "bfloat16")
PASSES = ("forward", "forward+backward")
QUICK_SECONDS = 45.0
"""What --quick may take beyond starting and drawing."""


@app.command()
def attention(
    case: CaseOption = None,
    dtype: DtypeOption = None,
    direction: PassOption = None,
    quick: QuickOption = False,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=16, help="every case at this length; windows shrink to a quarter of it"),
    ] = None,
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

    from headway_lab.bench import attention as bench
    from headway_lab.bench.cases import chosen
    from headway_lab.bench.measure import QUICK, THOROUGH

    if scaling and threads is not None:
        raise ConfigError("bench: --scaling measures at 1, 2, 4, ... threads; leave out --threads")
    check_choices("--dtype", dtype, DTYPES)
    set_threads(threads)
    effort = QUICK if quick else THOROUGH
    if repeats is not None:
        effort = replace(effort, repeats=repeats, least=min(repeats, effort.least))
    request = bench.Request(
        cases=chosen(case or (), quick=quick, tokens=tokens),
        dtypes=tuple(dtype or ()),
        passes=passes(direction) if direction else (),
        backend=backend,
        threads=bench.scaling() if scaling else (),
        tuned=tuned,
        effort=effort,
        seconds=QUICK_SECONDS if quick else None,
    )
    return show(bench.attention(request, note), out, save, json)


@app.command()
def linear(
    feature: Annotated[
        str, typer.Option("--feature", help="phi, or cosine; a wrong name lists them")
    ] = "elu+1",
    direction: PassOption = None,
    quick: QuickOption = False,
    tokens: Annotated[int | None, typer.Option("--tokens", min=512, help="no length above this one")] = None,
    save: SaveOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> int:
    """Linear attention at growing lengths, beside softmax attention, and the power that its time grows with."""
    from headway.attention.linear_attention import LinearAttentionSpec
    from headway_lab.bench import growth
    from headway_lab.bench.measure import QUICK

    set_threads(threads)
    most = tokens or (8192 if quick else 131072)
    lengths = growth.powers(min(2048, most // 4), most)
    effort = QUICK if quick else growth.USUAL
    rows = growth.linear(LinearAttentionSpec(feature), lengths, passes(direction), effort, say=note)
    return show(rows, None, save, json)


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
    from headway_lab.bench import growth
    from headway_lab.bench.attention import check_backend

    check_choices("--dtype", dtype, DTYPES)
    check_backend(backend)
    set_threads(threads)
    growths = growth.chosen(case or (), quick=quick, tokens=tokens)
    return show(growth.memory(growths, dtype or (), backend, note), out, save, json)


def passes(direction: str | None) -> tuple[str, ...]:
    """The passes that --pass names; both without it."""
    check_choices("--pass", direction and [direction], PASSES)
    return (direction,) if direction else PASSES


def check_choices(option: str, given: Iterable[str] | None, values: tuple[str, ...]) -> None:
    """Raises ConfigError for a value that is none of `values`."""
    for value in given or ():
        if value not in values:
            raise ConfigError(
                f"bench: {option} is {' or '.join(values)}, got {value!r}{did_you_mean(value, values)}"
            )


def show(rows: "Iterable[Row]", out: Path | None, save: bool, json: bool) -> int:
    """Print the rows as they come (JSON) or together (a table), also where Ctrl-C ends them. The exit code is 1 where a
    peer gave another result than headway, or nothing could be measured."""
    from headway_lab.bench import rows as results
    from headway_lab.bench.charts import draw
    from headway_lab.bench.measure import mismatches

    done: list[Row] = []
    try:
        for row in rows:
            done.append(row)
            if json:
                print(row.to_line(), flush=True)
    finally:
        if done and not json:
            print(results.to_text(done), flush=True)
        if done and save:
            note(f"saved: {results.save(done)}")
        if done and out is not None:
            note("written: " + ", ".join(map(str, draw(done, out))))
    wrong = mismatches(done)
    for line in wrong:
        report_error(line)
    measured = any(row.ours_ms is not None for row in done)
    if not measured:
        report_error("nothing could be measured; each row says why")
    return 0 if measured and not wrong else 1


command = typer.main.get_command(app)
