"""`headway bench attention | growth | decode | prefill | train`: what attention and whole models cost on this machine,
beside their peers."""

from dataclasses import replace
from typing import Annotated

import typer

from headway.cli._options import Count, application, says
from headway.cli._shared import note
from headway.errors import ConfigError
from headway_lab.cli.bench_run import DTYPES, ModelsRun, OperatorsOption, Run, check_choices

PASSES = ("forward", "forward+backward")
QUICK_SECONDS = 45.0
"""What --quick may take beyond starting and drawing."""


def attention(
    run: Run,
    *,
    case: list[str] | None = None,
    dtype: list[str] | None = None,
    backend: str = "auto",
    direction: Annotated[str | None, says(flag="pass")] = None,
    tokens: Annotated[int | None, says(min=16)] = None,
    repeats: Count | None = None,
    scaling: bool = False,
    tuned: bool = True,
) -> int:
    """Attention in every case of the table, interleaved with torch, FlexAttention and transformers.

    case: only this case (repeatable); a wrong name lists them
    dtype: float32 or bfloat16 (repeatable) [default: each case's]
    direction: forward or forward+backward [default: both]
    tokens: every case at this length; windows shrink to a quarter of it
    repeats: turns per row, at most
    scaling: at 1, 2, 4, ... threads
    tuned: beside torch with MKL's full path on AMD, too
    """
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


def growth(
    run: Run,
    *,
    form: list[str] | None = None,
    direction: Annotated[str, says(flag="pass")] = "forward",
    tokens: Annotated[int | None, says(min=64)] = None,
    window: Annotated[int, says(min=2)] = 256,
    memory_limit: Annotated[int | None, says(min=64)] = None,
    seconds: Annotated[float, says(min=0.1)] = 10.0,
) -> int:
    """Time and memory against length, up to a limit of memory: full attention, torch's kernel, linear attention, and a
    window as loop, chunks and kernels; exponents, and what is seen of them.

    form: only this form (repeatable); a wrong name lists them [default: all; --quick: all but flex]
    direction: forward or forward+backward
    tokens: no length above this one [default: 65536]
    window: keys that a query of a window sees
    memory_limit: MiB at which a form is stopped [default: 2048]
    seconds: a form whose next step would take longer is stopped
    """
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


def decode(
    run: ModelsRun,
    *,
    rows: list[Count] | None = None,
    context: Annotated[int, says(min=2)] = 512,
    operators: OperatorsOption = False,
) -> int:
    """One more token of each text by a whole LLaMA with random weights: tokens per second, and bytes read per step as a
    share of the bandwidth of reading; beside transformers and llama.cpp on the same weights.

    rows: texts side by side (repeatable) [default: 1, 8, 16]
    context: tokens that a step sees, its own with them
    """
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


def prefill(
    run: ModelsRun, *, tokens: Annotated[int | None, says(min=2)] = None, operators: OperatorsOption = False
) -> int:
    """Reading a prompt by a whole LLaMA with random weights: tokens per second, and products as a share of the register
    peak; beside transformers and llama.cpp on the same weights.

    tokens: of the prompt [default: 2048; 256 with --quick]
    """
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


def train(
    run: Run,
    *,
    case: list[str] | None = None,
    dtype: list[str] | None = None,
    compiled: bool = True,
    memory: bool = True,
    operators: OperatorsOption = False,
) -> int:
    """A training step of a whole model: tokens per second, products as a share of the register peak, and peak memory;
    beside transformers, as it comes and compiled.

    case: only this case (repeatable); a wrong name lists them [default: all but tiny]
    dtype: float32 or bfloat16 (repeatable) [default: both]
    compiled: beside the compiled model, too; that takes minutes
    memory: peak memory of every side, in processes of their own
    """
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


ABOUT = (
    "What attention and whole models cost on this machine, beside peers: docs/benchmarks.md says how it is "
    "measured."
)
command = typer.main.get_command(application(ABOUT, attention, growth, decode, prefill, train))
