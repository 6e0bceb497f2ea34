"""`headway quantize MODEL --weights int8 --out FOLDER`: weights of 8 or 4 bits, measured before and after."""

import math
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from headway.cli._options import Model, says
from headway.cli._shared import note, print_report, set_threads
from headway.errors import ConfigError
from headway.report import cell, size, table

if TYPE_CHECKING:
    from headway.surgery import Quantized


def command(
    model: Model,
    *,
    weights: str,
    out: Path,
    group: Annotated[int | None, says(min=-1)] = None,
    output: bool = False,
    calibrate: Path | None = None,
    data: Path | None = None,
    context: int | None = None,
    limit: int | None = None,
    allow_pickle: bool = False,
    overwrite: bool = False,
    json: bool = False,
    threads: int | None = None,
) -> None:
    """Write a model with weights of 8 or 4 bits, in the format of compressed-tensors, which transformers reads.

    weights: int8, int4
    out: folder to write
    group: inputs that share a scale, a multiple of 32, or -1 for all [default: 32]
    output: the output layer, too, where it is not the embedding
    calibrate: text for GPTQ [default: the nearest codes]
    data: held-out text: perplexity before and after, and KL
    """
    set_threads(threads)
    from headway.checkpoints import load_folder
    from headway.checkpoints.saving import check_target
    from headway.surgery import Text, quantize_folder

    if data is None and limit is not None:
        raise ConfigError("quantize: --limit counts tokens of a text; give one with --data")
    check_target(out, overwrite)
    folder = load_folder(model, allow_pickle=allow_pickle)
    with ExitStack() as stack:
        texts = [
            None if path is None else stack.enter_context(Text.read(path, folder, most))
            for path, most in ((calibrate, None), (data, limit))
        ]
        note(f"reading {folder.path}")
        done = quantize_folder(
            folder, out, weights, group=group, output=output, calibrate=texts[0], text=texts[1],
            context=context, overwrite=overwrite,
        )  # fmt: skip
    print_report(done, to_text(done), json)


def to_text(done: "Quantized") -> str:
    """The report for a terminal."""
    lines = [
        f"{done.source} -> {done.target}",
        f"  {done.layers} layers as {done.weights}; codes: {done.codes}",
    ]
    rows: list[tuple[object, ...]] = [("bytes", size(done.bytes_before), size(done.bytes_after))]
    both = done.compared
    if both is not None:
        rows += [
            ("nats per token", both.before, both.after),
            ("perplexity", *(math.exp(min(nats, 700.0)) for nats in (both.before, both.after))),
        ]
    lines += ["", table(("what", "before", "after"), rows), ""]
    if both is None:
        lines.append("  no loss was measured: --data FILE gives held-out text to measure it on")
    else:
        lines.append(f"  mean KL to the model as it was: {cell(both.kl)} nats, over {both.tokens} tokens")
    return "\n".join(lines)
