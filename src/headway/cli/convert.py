"""`headway convert MODEL OUT`: converts format, dtype, rotary pairing or number of kv heads, without changing the
function."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

from headway.cli._options import Count, says
from headway.cli._rewriting import Run, to_text
from headway.cli._shared import note, print_report, set_threads
from headway.errors import ConfigError, did_you_mean
from headway.report import bytes_of

if TYPE_CHECKING:
    from headway.positions import Pairing

_PAIRS = re.compile(r"\(\d{1,6},\d{1,6}\)(,\(\d{1,6},\d{1,6}\))*")


def command(
    run: Run,
    *,
    frm: Annotated[Literal["auto", "hf", "gguf", "llama2c", "meta"], says(flag="from")] = "auto",
    to: Literal["hf", "gguf"] | None = None,
    to_pairing: str | None = None,
    kv_heads: Count | None = None,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    shard_size: str | None = None,
) -> None:
    """Convert a checkpoint to a Hugging Face folder or a GGUF file, and verify that both compute the same.

    The logits of both are compared in float32 and bfloat16 before OUT is put in place; if they differ, the exit code is
    1 and OUT stays as it was. With --dtype, OUT is compared with MODEL rounded to that dtype, and the change due to the
    rounding alone is printed.

    model: a Hugging Face folder or an id of the Hub, a GGUF file, Meta's consolidated.00.pth, or llama2.c's .bin
    frm: format of MODEL
    to: format of OUT [default: gguf if OUT ends in .gguf, else hf]
    to_pairing: rotary pairing of a folder: halves, adjacent, or pairs such as (0,3),(1,4),(2,5); only headway reads
        another pairing than the family's [default: the family's]
    kv_heads: number of key/value heads of the result, by exact repetition [default: unchanged]
    dtype: stored dtype: float32, bfloat16, float16, float64; for the matrices of a GGUF file also q8_0, q4_0
        [default: unchanged]
    tokenizer: tokenizer to save with the model: a folder, tokenizer.json, SentencePiece .model, llama2.c .bin
    shard_size: maximum size of a folder's weight files: bytes, or 500MB, 4GB [default: 4GB]
    """
    from headway.checkpoints import convert
    from headway.checkpoints.formats.conversion import PACKINGS
    from headway.storage.dtypes import DTYPES
    from headway.text import Tokenizer

    set_threads(run.threads)
    dtypes = (*DTYPES, *PACKINGS)
    if dtype is not None and dtype not in dtypes:
        raise ConfigError(f"--dtype {dtype}: must be one of {', '.join(dtypes)}{did_you_mean(dtype, dtypes)}")
    note(f"reading {run.model}")
    done = convert(
        run.model,
        run.out,
        frm=frm,
        to=to,
        to_pairing=None if to_pairing is None else pairing_of(to_pairing),
        kv_heads=kv_heads,
        dtype=None if dtype is None else DTYPES.get(dtype, dtype),
        tokenizer=None if tokenizer is None else Tokenizer.load(tokenizer),
        allow_pickle=run.allow_pickle,
        overwrite=run.overwrite,
        shard_bytes=None if shard_size is None else bytes_of(shard_size, "--shard-size"),
    )
    print_report(done, to_text(done), run.json)


def pairing_of(text: str) -> "Pairing":
    """Returns the pairing of `halves`, `adjacent`, or pairs such as (0,3),(1,4),(2,5). Raises ConfigError for other
    text."""
    if text in ("halves", "adjacent"):
        return cast("Pairing", text)
    close = text.replace(" ", "")
    if not _PAIRS.fullmatch(close):
        raise ConfigError(
            f"--to-pairing {text}: must be halves or adjacent, or pairs such as (0,3),(1,4),(2,5)"
        )
    numbers = [int(digits) for digits in re.findall(r"\d+", close)]
    return tuple(zip(numbers[::2], numbers[1::2], strict=True))
