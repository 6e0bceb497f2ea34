"""`headway quantize MODEL OUT --weights int8`: weights of 8 or 4 bits, measured before and after."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

from headway.cli._options import says
from headway.cli._rewriting import MeasuredRun, to_text
from headway.cli._shared import note, print_report


def command(
    run: MeasuredRun,
    *,
    weights: str,
    group: Annotated[int | None, says(min=-1)] = None,
    output: bool = False,
    calibrate: Path | None = None,
) -> None:
    """Write a model with weights of 8 or 4 bits, in the format of compressed-tensors, which transformers reads.

    weights: int8, int4
    group: inputs that share a scale, a multiple of 32, or -1 for all [default: 32]
    output: the output layer, too, where it is not the embedding
    calibrate: text for GPTQ [default: the nearest codes]
    """
    folder = run.open()
    from headway.surgery import Text, quantize_folder

    with (
        run.text(folder) as text,
        nullcontext() if calibrate is None else Text.read(calibrate, folder) as more,
    ):
        note(f"reading {folder.path}")
        done = quantize_folder(
            folder, run.out, weights, group=group, output=output, calibrate=more, text=text, context=run.context,
            overwrite=run.overwrite,
        )  # fmt: skip
    print_report(done, to_text(done), run.json)
