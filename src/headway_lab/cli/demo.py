"""`headway demo`: three acts on this machine, in about three minutes."""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from headway.cli._options import says
from headway.cli._shared import note, set_threads


def command(
    *,
    out: Path = Path("runs/demo"),
    seconds: Annotated[float, says(min=5)] = 150.0,
    quick: bool = False,
    threads: int | None = None,
) -> None:
    """The patterns drawn, a small model trained on this machine's own Python library, and why to trust it.

    Needs no network and no data. Writes a Hugging Face folder with metrics and pictures.

    out: folder for the model, metrics and pictures
    seconds: length of act 2 (training)
    quick: 20 seconds with a toy model, to see that it runs
    """
    from headway.train import Interrupted
    from headway_lab.demo.run import demo, next_commands

    set_threads(threads)
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    seconds, say = min(seconds, 8.0) if quick else seconds, partial(print, flush=True)
    try:
        demo(out, seconds=seconds, quick=quick, say=say, unicode=unicode)
    except Interrupted as stop:
        note(f"stopped; the training state is in {stop.checkpoint}. Running the demo again starts anew")
        raise
    pictures = "loss.png, bits.png, heads.png, patterns.png"
    print(f"\nin {out}: a model folder, metrics.jsonl, {pictures}, samples.txt, demo.json")
    print(f"next:\n\n{next_commands(out)}")
