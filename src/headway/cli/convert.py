"""`headway convert SOURCE TARGET`: another format, dtype, rotary pairing or number of kv heads; the same function."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from headway.cli._options import Count, Model, says
from headway.cli._shared import note, print_report, set_threads
from headway.errors import ConfigError, did_you_mean
from headway.report import cell, table

if TYPE_CHECKING:
    from headway.positions import Pairing

_PAIRS = re.compile(r"\(\d{1,6},\d{1,6}\)(,\(\d{1,6},\d{1,6}\))*")
_SIZE = re.compile(r"(\d{1,18})\s*(|KB|MB|GB|TB)", re.IGNORECASE)


def command(
    source: Annotated[Model, says(metavar="SOURCE")],
    target: Path,
    *,
    frm: Annotated[Literal["auto", "hf", "gguf", "llama2c", "meta"], says(flag="from")] = "auto",
    to: Literal["hf", "gguf"] | None = None,
    to_pairing: str | None = None,
    kv_heads: Count | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    shard_size: str | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    json: bool = False,
    threads: int | None = None,
) -> None:
    """Turn a checkpoint into a Hugging Face folder or a GGUF file, and show that both compute the same.

    The logits of source and target are compared in float32 and bfloat16 before TARGET takes its name; if they
    differ, the exit code is 1 and TARGET stays as it was. With --dtype, the source is compared with its numbers
    rounded to it, and the change by that rounding alone is printed.

    source: a Hugging Face folder or an id of the Hub, a GGUF file, Meta's (consolidated.00.pth), llama2.c's
        .bin
    target: folder or GGUF file to write
    frm: format of SOURCE
    to: format of TARGET [default: gguf where TARGET ends in .gguf, else hf]
    to_pairing: rotary pairing of a folder: halves (transformers reads it), adjacent, or pairs such as
        (0,3),(1,4),(2,5) (headway alone reads those) [default: halves]
    kv_heads: key and value heads of the result, by exact repetition [default: as they are]
    dtype: stored dtype: float32, bfloat16, float16, float64; of a GGUF file's matrices also q8_0, q4_0
        [default: as it is]
    tokenizer: tokenizer to save along: a folder, tokenizer.json, SentencePiece .model, llama2.c .bin
    shard_size: largest file of a folder's weights: bytes, or 500MB, 4GB [default: 4GB]
    """
    from headway.checkpoints import convert
    from headway.checkpoints.formats.storing import PACKINGS
    from headway.models.cost import parameter_count
    from headway.storage.dtypes import DTYPES
    from headway.text import Tokenizer

    set_threads(threads)
    known = (*DTYPES, *PACKINGS)
    if dtype is not None and dtype not in known:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(known)}{did_you_mean(dtype, known)}")
    note(f"reading {source}")
    result = convert(
        source,
        target,
        frm=frm,
        to=to,
        to_pairing=None if to_pairing is None else pairing_of(to_pairing),
        kv_heads=kv_heads,
        dtype=None if dtype is None else DTYPES.get(dtype, dtype),
        tokenizer=None if tokenizer is None else Tokenizer.load(tokenizer),
        allow_pickle=allow_pickle,
        overwrite=overwrite,
        shard_bytes=None if shard_size is None else bytes_of(shard_size),
    )
    count, heads_now = parameter_count(result.spec), result.spec.kv_heads
    repeated = f"  kv heads: {result.source_kv_heads} repeated to {heads_now}"
    reader = f"; transformers {result.transformers}" if result.transformers else ""
    whole = f"  not packed, for rows that are no multiples of its blocks: {', '.join(result.not_packed)}"
    alike = "" if result.rounding is None else " rounded alike"
    largest = result.checks[0].largest_logit
    equal = (
        "equal"
        if result.rounding is None
        else f"differs from the source: rounding to {result.dtype} changed logits by up to {cell(result.rounding)} of "
        f"{cell(largest)}"
    )
    rows = [(c.dtype, c.difference, c.bound, c.largest_logit) for c in result.checks]
    lines = [
        f"{result.source} ({result.format}, {result.source_pairing}) -> {result.target} ({result.target_pairing})",
        f"  {count:,} parameters, {result.dtype}{reader}",
        *([whole] if result.not_packed else []),
        *([] if heads_now == result.source_kv_heads else [repeated]),
        *(f"  {line}" for line in result.layers),
        f"  logits of {result.checks[0].tokens} random tokens, source{alike} against target:",
        table(("dtype", "largest difference", "allowed", "largest logit"), rows, indent="    "),
        f"  {equal}",
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
