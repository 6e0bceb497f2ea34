"""`headway explain [TOPIC]`: a question about attention, answered by a run."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._shared import JsonOption, ThreadsOption, print_json, set_threads
from headway_lab.explain import TOPICS, explain


def command(
    topic: Annotated[str | None, typer.Argument(help="which question; none lists them")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="folder for TOPIC.png and TOPIC.csv")] = None,
    json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Answer a question about attention by a run: formula, numbers, figure, verdict."""
    if topic is None:
        if json:
            print_json(TOPICS)
        else:
            width = max(map(len, TOPICS))
            print("\n".join(f"  {name:<{width}}   {question}" for name, question in TOPICS.items()))
        return
    set_threads(threads)
    report = explain(topic, out)
    if json:
        print_json(report.to_json())
    else:
        print(report.to_text())
