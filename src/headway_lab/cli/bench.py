"""`headway bench attention | growth | decode | prefill | serve | train`: what attention, whole models and their servers
cost on this machine, compared with their peers."""

from dataclasses import replace
from itertools import chain
from typing import Annotated, Literal, get_args

import typer

from headway.cli._options import Count, application, says
from headway.cli._shared import note
from headway.errors import ConfigError
from headway_lab.cli.bench_run import ModelsRun, Run, chosen

DTYPES = ("float32", "bfloat16")
Pass = Literal["forward", "forward+backward"]


def attention(
    run: Run,
    *,
    case: list[str] | None = None,
    dtype: list[str] | None = None,
    backend: str = "auto",
    direction: Annotated[Pass | None, says(flag="pass")] = None,
    tokens: Annotated[int | None, says(min=16)] = None,
    repeats: Count | None = None,
    scaling: bool = False,
) -> int:
    """Attention in every case of the table, interleaved with torch, FlexAttention and transformers.

    case: only this case (repeatable); a wrong name lists them
    dtype: float32 or bfloat16 (repeatable) [default: those of each case]
    direction: forward or forward+backward [default: both]
    tokens: run every case at this length; windows shrink to a quarter of it
    repeats: most turns per row
    scaling: at 1, 2, 4, ... threads
    """
    from headway_lab.bench import attention as bench
    from headway_lab.bench.cases import CASES
    from headway_lab.bench.measure import THOROUGH

    if scaling and run.threads is not None:
        raise ConfigError("bench: --scaling measures at 1, 2, 4, ... threads; leave out --threads")
    effort = run.effort(THOROUGH)
    if repeats is not None:
        effort = replace(effort, repeats=repeats, least=min(repeats, effort.least))
    usual = [name for name, case in CASES.items() if case.quick or not run.quick]
    rows = bench.attention(
        [CASES[name].sized(quick=run.quick, tokens=tokens) for name in chosen(case, CASES, usual, "case")],
        dtypes=chosen(dtype, DTYPES, DTYPES, "dtype"),
        passes=(direction,) if direction else get_args(Pass),
        backend=backend,
        threads=bench.scaling() if scaling else (),
        effort=effort,
        say=note,
    )
    return run.show(rows)


def growth(
    run: Run,
    *,
    form: list[str] | None = None,
    direction: Annotated[Pass, says(flag="pass")] = "forward",
    tokens: Annotated[int | None, says(min=64)] = None,
    window: Annotated[int, says(min=2)] = 256,
    memory_limit: Annotated[int | None, says(min=64)] = None,
    seconds: Annotated[float, says(min=0.1)] = 10.0,
) -> int:
    """Time and memory against length, up to a memory limit: full attention, torch's kernel, linear attention, and a
    window as a loop, in chunks and by kernels; growth exponents, and whether they are as claimed.

    form: only this form (repeatable); a wrong name lists them [default: all; --quick: all but flex]
    direction: forward or forward+backward
    tokens: largest length [default: 65536]
    window: keys that each query of a windowed form sees
    memory_limit: MiB at which a form is stopped [default: 2048]
    seconds: a form whose next step would take longer is stopped
    """
    from headway.patterns import Window
    from headway_lab.bench import growth as bench
    from headway_lab.bench.forms import FORMS

    usual = [name for name, form in FORMS.items() if not (run.quick and form.prepares)]
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
) -> int:
    """Decoding one more token per sequence by a whole LLaMA with random weights: tokens per second, and bytes read per
    step as a share of the read bandwidth; compared with transformers and llama.cpp on the same weights.

    rows: batch size, in sequences (repeatable) [default: 1, 8, 16]
    context: tokens that a step sees, including its own
    """
    from headway_lab.bench import decoders as bench
    from headway_lab.bench.measure import THOROUGH

    weights, usual = run.kinds(("bf16", "int8", "int4")), (1, 8) if run.quick else (1, 8, 16)
    arguments = (run.models(), weights, rows or usual, context)
    return run.show(bench.decode(*arguments, effort=run.effort(THOROUGH), say=note))


def prefill(run: ModelsRun, *, tokens: Annotated[int | None, says(min=2)] = None) -> int:
    """Prefill of a prompt by a whole LLaMA with random weights: tokens per second, and products as a share of the
    register peak; compared with transformers and llama.cpp on the same weights.

    tokens: length of the prompt [default: 2048; 256 with --quick]
    """
    from headway_lab.bench import decoders as bench

    arguments = (run.models(), run.kinds(("bf16", "int8")), tokens or (256 if run.quick else 2048))
    return run.show(bench.prefill(*arguments, effort=run.effort(bench.PREFILL_EFFORT), say=note))


def serve(
    run: ModelsRun,
    *,
    clients: list[Count] | None = None,
    rounds: Count | None = None,
    new: Count = 32,
    llama_server: str = "llama-server",
    peer: list[str] | None = None,
) -> int:
    """Servers of a whole LLaMA with random weights under load, headway and others: tokens per second, time to
    the first token and between tokens, and the share of prompt tokens that come from the prefix cache. One more model,
    minilm, is an encoder in float32 whose embeddings are measured, compared with sentence-transformers.

    clients: concurrent clients, each sending one request after the other (repeatable) [default: 1, 4, 16, 32]
    rounds: turns per row [default: 5]
    new: tokens of each answer
    llama_server: path of llama.cpp's server program
    peer: llama-server, or transformers serve, which has no batches and only bf16 (repeatable) [default: llama-server]
    """
    from headway_lab.bench import serving as bench
    from headway_lab.bench.embeddings import MINILM, embed

    usual_peers = [bench.LLAMA_SERVER]
    peers = chosen(peer, bench.sides(llama_server), usual_peers, "peer")
    models = run.models(MINILM)
    decoders = [name for name in models if name != MINILM]
    if not decoders and (run.weights or peer):
        raise ConfigError(
            f"bench: --weights and --peer do not apply to {MINILM}; leave them out, or add --model with a decoder"
        )
    counts = clients or ((1, 4) if run.quick else (1, 4, 16, 32))
    effort = bench.Effort(rounds=rounds or (1 if run.quick else 5), new=new)
    arguments = (decoders, run.kinds(("bf16", "int8")), counts, llama_server, peers)
    encoders = embed(counts, effort=effort, say=note) if MINILM in models else ()
    return run.show(chain(bench.serve(*arguments, effort=effort, say=note), encoders))


def train(
    run: Run,
    *,
    case: list[str] | None = None,
    dtype: list[str] | None = None,
    compiled: bool = True,
    memory: bool = True,
) -> int:
    """A training step of a whole model: tokens per second, products as a share of the register peak, and peak memory;
    compared with transformers, eager and compiled.

    case: only this case (repeatable); a wrong name lists them [default: all but tiny]
    dtype: float32 or bfloat16 (repeatable) [default: both]
    compiled: compare with the compiled model, too; that takes minutes
    memory: measure the peak memory of every side, each in its own process
    """
    from headway_lab.bench import train as bench

    usual = [name for name in bench.CASES if ("tiny" in name) == run.quick]
    peers = [bench.EAGER, bench.ALL_BF16, bench.WITHIN]
    rows = bench.train(
        chosen(case, bench.CASES, usual, "case"),
        chosen(dtype, DTYPES, DTYPES, "dtype"),
        [*peers, bench.COMPILED] if compiled and not run.quick else peers,
        memory=memory,
        effort=run.effort(bench.USUAL),
        say=note,
    )
    return run.show(rows)


ABOUT = (
    "What attention and whole models cost on this machine, beside peers: docs/benchmarks.md says how it is "
    "measured."
)
command = typer.main.get_command(application(ABOUT, attention, growth, decode, prefill, serve, train))
