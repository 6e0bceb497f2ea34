"""`headway convert SRC DST`: another format, rotary pairing or number of kv heads, the same function, shown."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from headway.cli._shared import (
    AllowPickleOption,
    JsonOption,
    OverwriteOption,
    TargetArgument,
    ThreadsOption,
    note,
    print_report,
    set_threads,
)
from headway.errors import ConfigError, did_you_mean
from headway.report import cell, table

if TYPE_CHECKING:
    from headway.checkpoints.formats.conversion import Format
    from headway.positions import Pairing

DTYPES = ("float32", "bfloat16", "float16", "float64")
_PAIRS = re.compile(r"\(\d{1,6},\d{1,6}\)(,\(\d{1,6},\d{1,6}\))*")
_SIZE = re.compile(r"(\d{1,18})\s*(|KB|MB|GB|TB)", re.IGNORECASE)


def command(
    source: Annotated[
        Path,
        typer.Argument(
            help="a Hugging Face folder, Meta's (consolidated.*.pth), llama2.c's .bin, a pickle of torchtune"
        ),
    ],
    target: TargetArgument,
    frm: Annotated[str, typer.Option("--from", help="auto, hf, llama2c, meta, torchtune")] = "auto",
    to_pairing: Annotated[
        str,
        typer.Option(
            "--to-pairing",
            help="rotary pairing of the result: halves (transformers reads it), adjacent, or pairs such as "
            "(0,3),(1,4),(2,5) (headway alone reads those)",
        ),
    ] = "halves",
    kv_heads: Annotated[
        int | None,
        typer.Option(
            min=1, help="key and value heads of the result, by exact repetition [default: as they are]"
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="stored dtype: float32, bfloat16, float16, float64 [default: as it is]"),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer to save along: a folder, tokenizer.json, SentencePiece .model, llama2.c .bin"
        ),
    ] = None,
    heads: Annotated[int | None, typer.Option(min=1, help="query heads, without a params.json")] = None,
    norm_eps: Annotated[
        float | None, typer.Option(help="eps of the norms of a pickle [default: 1e-5]")
    ] = None,
    shard_size: Annotated[str, typer.Option(help="largest file of weights: bytes, or 500MB, 4GB")] = "4GB",
    allow_pickle: AllowPickleOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Turn a checkpoint into a Hugging Face folder, and show that both compute the same.

    The logits of source and target are compared in float32 and bfloat16 before DST takes its name; if they
    differ, the exit code is 1 and DST stays as it was. With --dtype, the source is compared with its numbers
    rounded to it, and the change by that rounding alone is printed.
    """
    import torch

    from headway.checkpoints import convert
    from headway.models.cost import parameter_count
    from headway.text import Tokenizer

    set_threads(threads)
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(DTYPES)}{did_you_mean(dtype, DTYPES)}")
    note(f"reading {source}")
    result = convert(
        source,
        target,
        frm=cast("Format", frm),
        to_pairing=pairing_of(to_pairing),
        kv_heads=kv_heads,
        dtype=None if dtype is None else getattr(torch, dtype),
        tokenizer=None if tokenizer is None else Tokenizer.load(tokenizer),
        heads=heads,
        norm_eps=norm_eps,
        allow_pickle=allow_pickle,
        overwrite=overwrite,
        shard_bytes=bytes_of(shard_size),
    )
    count, heads_now, dtype = parameter_count(result.spec), result.spec.kv_heads, result.dtype
    repeated = f"  kv heads: {result.source_kv_heads} repeated to {heads_now}"
    rounded = (
        f"  rounding to {dtype} changed logits by up to {cell(result.rounding)}; the source rounded alike:"
    )
    rows = [(c.dtype, c.difference, c.bound, c.largest_logit) for c in result.checks]
    lines = [
        f"{result.source} ({result.format}, {result.source_pairing}) -> {result.target} ({result.target_pairing})",
        f"  {count:,} parameters, {dtype}; transformers {result.transformers}",
        *([] if heads_now == result.source_kv_heads else [repeated]),
        *([] if result.rounding is None else [rounded]),
        f"  logits of {result.checks[0].tokens} random tokens, source against target:",
        table(("dtype", "largest difference", "allowed", "largest logit"), rows, indent="    "),
        "  equal",
    ]
    print_report(result, "\n".join(lines), json)


def pairing_of(text: str) -> "Pairing":
    """`halves`, `adjacent`, or pairs such as (0,3),(1,4),(2,5). Raises ConfigError for other text."""
    if text in ("halves", "adjacent"):
        return cast("Pairing", text)
    close = text.replace(" ", "")
    if not _PAIRS.fullmatch(close):
        raise ConfigError(
            f"--to-pairing {text}: must be halves or adjacent, or pairs such as (0,3),(1,4),(2,5)"
        )
    numbers = [int(digits) for digits in re.findall(r"\d+", close)]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))


def bytes_of(text: str) -> int:
    """Bytes of `500MB`, `4GB` (powers of 1000) or a plain number. Raises ConfigError for other text."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or int(found[1]) == 0:
        raise ConfigError(f"--shard-size {text}: must be a number of bytes, or one such as 500MB or 4GB")
    power = ("", "KB", "MB", "GB", "TB").index(found[2].upper())
    return int(found[1]) * int(1000**power)
