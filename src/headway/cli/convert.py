"""`headway convert SRC DST`: another format or rotary pairing, the same function, shown."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import JsonOption, ThreadsOption, note, print_json, set_threads, table
from headway.errors import ConfigError


def command(
    source: Annotated[
        Path, typer.Argument(help="a Hugging Face folder, llama2.c's .bin, or a pickle of Meta or torchtune")
    ],
    target: Annotated[Path, typer.Argument(help="folder to write")],
    frm: Annotated[str, typer.Option("--from", help="auto, hf, llama2c, meta, torchtune")] = "auto",
    to_pairing: Annotated[
        str,
        typer.Option(
            "--to-pairing",
            help="rotary pairing of the result: halves (transformers reads it) or adjacent (headway alone does)",
        ),
    ] = "halves",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer to save along: a folder, tokenizer.json, SentencePiece .model, llama2.c .bin"
        ),
    ] = None,
    heads: Annotated[
        int | None, typer.Option(min=1, help="query heads, where no params.json says them")
    ] = None,
    norm_eps: Annotated[
        float | None, typer.Option(help="eps of the norms of a pickle [default: 1e-5]")
    ] = None,
    shard_bytes: Annotated[
        int, typer.Option(min=1, help="largest file of weights, in bytes")
    ] = 4_000_000_000,
    allow_pickle: Annotated[bool, typer.Option("--allow-pickle", help="read pickles (weights only)")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace the model in DST")] = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Turn a checkpoint into a Hugging Face folder, and show that both compute the same.

    The logits of source and target are compared in float32 and bfloat16 before DST takes its name; if they
    differ, the exit code is 1 and DST stays as it was.
    """
    from headway.checkpoints import convert
    from headway.checkpoints.conversion import FORMATS
    from headway.text import Tokenizer

    set_threads(threads)
    formats = {name: name for name in FORMATS}
    if frm not in formats:
        raise ConfigError(f"--from {frm}: unknown format; known are {', '.join(formats)}")
    if to_pairing not in ("halves", "adjacent"):
        raise ConfigError(f"--to-pairing {to_pairing}: must be halves or adjacent")
    note(f"reading {source}")
    result = convert(
        source,
        target,
        frm=formats[frm],
        to_pairing="adjacent" if to_pairing == "adjacent" else "halves",
        tokenizer=None if tokenizer is None else Tokenizer.load(tokenizer),
        heads=heads,
        norm_eps=norm_eps,
        allow_pickle=allow_pickle,
        overwrite=overwrite,
        shard_bytes=shard_bytes,
    )
    if json:
        print_json(result)
        return
    spec = result.spec
    print(
        f"{result.source} ({result.format}, {result.source_pairing}) -> {result.target} ({result.target_pairing})"
    )
    print(f"  {spec.parameter_count:,} parameters; transformers {result.transformers}")
    print(f"  logits of {result.checks[0].tokens} random tokens, source against target:")
    rows = [(c.dtype, c.difference, c.bound, c.largest_logit) for c in result.checks]
    print(table(("dtype", "largest difference", "allowed", "largest logit"), rows, indent="    "))
    print("  equal")
