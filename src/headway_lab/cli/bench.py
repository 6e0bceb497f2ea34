"""`headway bench attention | linear | memory`: what attention costs on this machine, beside its peers."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headway.cli import report_error
from headway.cli._shared import (
    BackendOption,
    JsonOption,
    ThreadsOption,
    application,
    note,
    set_threads,
    with_options,
)
from headway.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from headway_lab.bench.rows import Row

app = application(
    "What attention costs on this machine, beside its peers: docs/benchmarks.md says how it is measured."
)

PassOption = Annotated[str | None, typer.Option("--pass", help="forward or forward+backward [default: both]")]

DTYPES = ("float32", "bfloat16")
PASSES = ("forward", "forward+backward")
QUICK_SECONDS = 45.0
"""What --quick may take beyond starting and drawing."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """How much is measured, and where the rows go."""

    quick: Annotated[bool, typer.Option("--quick", help="a subset, within a minute")] = False
    save: Annotated[
        bool, typer.Option("--save", help="append to bench/results/DATE-CPU.jsonl, with machine and versions")
    ] = False
    json: JsonOption = False
    threads: ThreadsOption = None

    def show(self, rows: "Iterable[Row]", out: Path | None = None) -> int:
        """Print the rows as they come (JSON) or together (a table), also where Ctrl-C ends them. The exit code is 1
        where a peer gave another result than headway, or nothing could be measured."""
        set_threads(self.threads)
        from headway_lab.bench import rows as results
        from headway_lab.bench.charts import draw
        from headway_lab.bench.measure import mismatches

        done: list[Row] = []
        try:
            for row in rows:
                done.append(row)
                if self.json:
                    print(row.to_line(), flush=True)
        finally:
            if done and not self.json:
                print(results.to_text(done), flush=True)
            if done and self.save:
                note(f"saved: {results.save(done)}")
            if done and out is not None:
                note("written: " + ", ".join(map(str, draw(done, out))))
        wrong = mismatches(done)
        if all(row.ours_ms is None for row in done):
            wrong.append("nothing could be measured; each row says why")
        for line in wrong:
            report_error(line)
        return 1 if wrong else 0


@dataclass(frozen=True, kw_only=True)
class CasesRun(Run):
    """A bench of cases in dtypes."""

    case: Annotated[
        list[str] | None, typer.Option("--case", help="only this case (repeatable); a wrong name lists them")
    ] = None
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="float32 or bfloat16 (repeatable) [default: each case's]"),
    ] = None
    out: Annotated[Path | None, typer.Option("--out", help="folder for charts (PNG)")] = None
    backend: BackendOption = "auto"

    def __post_init__(self) -> None:
        check_choices("--dtype", self.dtype, DTYPES)


@app.command()
@with_options
def attention(
    run: CasesRun,
    direction: PassOption = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", min=16, help="every case at this length; windows shrink to a quarter of it"),
    ] = None,
    repeats: Annotated[int | None, typer.Option("--repeats", min=1, help="turns per row, at most")] = None,
    scaling: Annotated[bool, typer.Option("--scaling", help="at 1, 2, 4, ... threads")] = False,
    tuned: Annotated[
        bool, typer.Option("--tuned/--no-tuned", help="beside torch with MKL's full path on AMD, too")
    ] = True,
) -> int:
    """Attention in every case of the table, interleaved with torch, FlexAttention and transformers."""
    from headway_lab.bench import attention as bench
    from headway_lab.bench.cases import chosen
    from headway_lab.bench.measure import QUICK, THOROUGH

    if scaling and run.threads is not None:
        raise ConfigError("bench: --scaling measures at 1, 2, 4, ... threads; leave out --threads")
    effort = QUICK if run.quick else THOROUGH
    if repeats is not None:
        effort = replace(effort, repeats=repeats, least=min(repeats, effort.least))
    request = bench.Request(
        cases=chosen(run.case or (), quick=run.quick, tokens=tokens),
        dtypes=tuple(run.dtype or ()),
        passes=passes(direction) if direction else (),
        backend=run.backend,
        threads=bench.scaling() if scaling else (),
        tuned=tuned,
        effort=effort,
        seconds=QUICK_SECONDS if run.quick else None,
    )
    return run.show(bench.attention(request, note), run.out)


@app.command()
@with_options
def linear(
    run: Run,
    feature: Annotated[
        str, typer.Option("--feature", help="phi, or cosine; a wrong name lists them")
    ] = "elu+1",
    direction: PassOption = None,
    tokens: Annotated[int | None, typer.Option("--tokens", min=512, help="no length above this one")] = None,
) -> int:
    """Linear attention at growing lengths, beside softmax attention, and the power that its time grows with."""
    from headway.attention.linear_attention import LinearAttentionSpec
    from headway_lab.bench import growth
    from headway_lab.bench.measure import QUICK
    from headway_lab.profiling import doublings

    most = tokens or (8192 if run.quick else 131072)
    lengths = doublings(min(2048, most // 4), most)
    effort = QUICK if run.quick else growth.USUAL
    return run.show(growth.linear(LinearAttentionSpec(feature), lengths, passes(direction), effort, say=note))


@app.command()
@with_options
def memory(
    run: CasesRun,
    tokens: Annotated[int | None, typer.Option("--tokens", min=64, help="no length above this one")] = None,
) -> int:
    """What forward and backward hold beyond inputs and outputs, each length in a process of its own."""
    from headway_lab.bench import growth
    from headway_lab.bench.attention import check_backend

    check_backend(run.backend)
    growths = growth.chosen(run.case or (), quick=run.quick, tokens=tokens)
    return run.show(growth.memory(growths, run.dtype or (), run.backend, note), run.out)


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


command = typer.main.get_command(app)
