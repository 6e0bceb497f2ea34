"""`headway bench attention | growth | decode | prefill | train`: what attention and whole models cost on this machine,
beside their peers."""

from dataclasses import replace
from typing import Annotated

import typer

from headway.cli._shared import BackendOption, application, note, with_options
from headway.errors import ConfigError
from headway_lab.cli.bench_run import DTYPES, ModelsRun, OperatorsOption, Run, check_choices

app = application(
    "What attention and whole models cost on this machine, beside peers: docs/benchmarks.md says how it is measured."
)

PASSES = ("forward", "forward+backward")
QUICK_SECONDS = 45.0
"""What --quick may take beyond starting and drawing."""


@app.command()
@with_options
def attention(
    run: Run,
    case: Annotated[
        list[str] | None, typer.Option("--case", help="only this case (repeatable); a wrong name lists them")
    ] = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option("--dtype", help="float32 or bfloat16 (repeatable) [default: each case's]"),
    ] = None,
    backend: BackendOption = "auto",
    direction: Annotated[
        str | None, typer.Option("--pass", help="forward or forward+backward [default: both]")
    ] = None,
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

    check_choices("--dtype", dtype, DTYPES)
    check_choices("--pass", direction and [direction], PASSES)
    if scaling and run.threads is not None:
        raise ConfigError("bench: --scaling measures at 1, 2, 4, ... threads; leave out --threads")
    effort = QUICK if run.quick else THOROUGH
    if repeats is not None:
        effort = replace(effort, repeats=repeats, least=min(repeats, effort.least))
    request = bench.Request(
        cases=chosen(case or (), quick=run.quick, tokens=tokens),
        dtypes=tuple(dtype or ()),
        passes=(direction,) if direction else (),
        backend=backend,
        threads=bench.scaling() if scaling else (),
        tuned=tuned,
        effort=effort,
        seconds=QUICK_SECONDS if run.quick else None,
    )
    return run.show(bench.attention(request, note))


@app.command()
@with_options
def growth(
    run: Run,
    form: Annotated[
        list[str] | None,
        typer.Option(
            "--form",
            help="only this form (repeatable); a wrong name lists them [default: all; --quick: all but flex]",
        ),
    ] = None,
    direction: Annotated[str, typer.Option("--pass", help="forward or forward+backward")] = "forward",
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=64, help="no length above this one [default: 65536]")
    ] = None,
    window: Annotated[int, typer.Option("--window", min=2, help="keys that a query of a window sees")] = 256,
    memory_limit: Annotated[
        int | None,
        typer.Option("--memory-limit", min=64, help="MiB at which a form is stopped [default: 2048]"),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="a form whose next step would take longer is stopped")
    ] = 10.0,
) -> int:
    """Time and memory against length, up to a limit of memory: full attention, torch's kernel, linear attention, and a
    window as loop, chunks and kernels; exponents, and what is seen of them."""
    from headway.patterns import Window
    from headway_lab.bench import growth as bench
    from headway_lab.bench.forms import FORMS
    from headway_lab.bench.models import chosen

    check_choices("--pass", (direction,), PASSES)
    usual = [name for name, form in FORMS.items() if not (run.quick and form.compiled)]
    request = bench.Request(
        window=Window.last(window),
        most=tokens or (4096 if run.quick else 65536),
        direction=direction,
        forms=chosen(form, FORMS, usual, "form"),
        limit=(memory_limit or (256 if run.quick else 2048)) << 20,
        seconds=seconds,
    )
    return run.show(bench.growth(request, note))


@app.command()
@with_options
def decode(
    run: ModelsRun,
    rows: Annotated[
        list[int] | None,
        typer.Option("--rows", min=1, help="texts side by side (repeatable) [default: 1, 8, 16]"),
    ] = None,
    context: Annotated[
        int, typer.Option("--context", min=2, help="tokens that a step sees, its own with them")
    ] = 512,
    operators: OperatorsOption = False,
) -> int:
    """One more token of each text by a whole LLaMA with random weights: tokens per second, and bytes read per step as a
    share of the bandwidth of reading; beside transformers and llama.cpp on the same weights."""
    from headway_lab.bench import decode as bench
    from headway_lab.bench.measure import QUICK, THOROUGH

    request = bench.Request(
        models=run.models(),
        weights=run.kinds(("bf16", "int8", "int4")),
        rows=rows or ((1, 8) if run.quick else (1, 8, 16)),
        context=context,
        effort=QUICK if run.quick else THOROUGH,
    )
    if operators:
        from headway_lab.bench.operators import of_decoding

        return run.show(of_decoding(request, note))
    return run.show(bench.decode(request, note))


@app.command()
@with_options
def prefill(
    run: ModelsRun,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=2, help="of the prompt [default: 2048; 256 with --quick]")
    ] = None,
    operators: OperatorsOption = False,
) -> int:
    """Reading a prompt by a whole LLaMA with random weights: tokens per second, and products as a share of the register
    peak; beside transformers and llama.cpp on the same weights."""
    from headway_lab.bench import prefill as bench
    from headway_lab.bench.measure import QUICK

    request = bench.Request(
        models=run.models(),
        weights=run.kinds(("bf16", "int8")),
        tokens=tokens or (256 if run.quick else 2048),
        effort=QUICK if run.quick else bench.USUAL,
    )
    if operators:
        from headway_lab.bench.operators import of_prefill

        return run.show(of_prefill(request, note))
    return run.show(bench.prefill(request, note))


@app.command()
@with_options
def train(
    run: Run,
    case: Annotated[
        list[str] | None,
        typer.Option(
            "--case", help="only this case (repeatable); a wrong name lists them [default: all but tiny]"
        ),
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option("--dtype", help="float32 or bfloat16 (repeatable) [default: both]")
    ] = None,
    compiled: Annotated[
        bool,
        typer.Option("--compiled/--no-compiled", help="beside the compiled model, too; that takes minutes"),
    ] = True,
    memory: Annotated[
        bool,
        typer.Option("--memory/--no-memory", help="peak memory of every side, in processes of their own"),
    ] = True,
    operators: OperatorsOption = False,
) -> int:
    """A training step of a whole model: tokens per second, products as a share of the register peak, and peak memory;
    beside transformers, as it comes and compiled."""
    from headway_lab.bench import train as bench
    from headway_lab.bench.measure import QUICK
    from headway_lab.bench.models import chosen

    check_choices("--dtype", dtype, DTYPES)
    usual = [name for name in bench.CASES if ("tiny" in name) == run.quick]
    request = bench.Request(
        cases=chosen(case, tuple(bench.CASES), usual, "case"),
        dtypes=dtype or DTYPES,
        peers=[
            peer
            for peer in (bench.EAGER, bench.COMPILED, bench.ALL_BF16)
            if peer != bench.COMPILED or (compiled and not run.quick)
        ],
        memory=memory,
        effort=QUICK if run.quick else bench.USUAL,
    )
    if operators:
        from headway_lab.bench.operators import of_training

        return run.show(of_training(request, note))
    return run.show(bench.train(request, note))


command = typer.main.get_command(app)
