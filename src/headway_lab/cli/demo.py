"""`headway demo`: three acts on this machine, in about three minutes."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import ThreadsOption, note, set_threads, share_cores


def command(
    data: Annotated[
        Path | None, typer.Option("--data", help="a text, or a folder of them [default: Python's]")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="folder of what is made")] = Path("runs/demo"),
    seconds: Annotated[float, typer.Option("--seconds", min=5, help="length of act 2 (training)")] = 150.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="20 seconds with a toy, to see that it runs")
    ] = False,
    threads: ThreadsOption = None,
) -> None:
    """The patterns drawn, a small model trained on this machine's own Python library, and why to trust it.

    Needs no network and no data. Writes a Hugging Face folder with metrics and pictures.
    """
    share_cores()
    from headway.train import Interrupted
    from headway_lab.demo.run import demo, next_commands

    set_threads(threads)
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    seconds, say = min(seconds, 8.0) if quick else seconds, partial(print, flush=True)
    try:
        demo(out, data=data, seconds=seconds, quick=quick, say=say, unicode=unicode)
    except Interrupted as stop:
        note(f"stopped; the training state is in {stop.checkpoint}. The same demo again begins anew")
        raise
    pictures = "loss.png, bits.png, heads.png, patterns.png"
    print(f"\nin {out}: a model folder, metrics.jsonl, {pictures}, samples.txt, demo.json")
    print(f"next:\n\n{next_commands(out)}")
