"""`headway instruct --seeds F --endpoint URL|FOLDER -n N --out FILE`: more instructions from a few."""

from pathlib import Path
from typing import Annotated

import typer

from headway.cli._endpoints import TimeoutOption, check_timeout, opened
from headway.cli._shared import JsonOption, ThreadsOption, note, print_report, set_threads
from headway.report import table

EndpointHelp = "URL#MODEL of an OpenAI-compatible server (https://host/v1#name), or a model folder"


def command(
    seeds: Annotated[Path, typer.Option("--seeds", help="seed tasks, or records of Alpaca's form (JSONL)")],
    endpoint: Annotated[str, typer.Option("--endpoint", metavar="URL#MODEL|FOLDER", help=EndpointHelp)],
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="instructions to make")],
    out: Annotated[Path, typer.Option("--out", help="file to write, records of Alpaca's form (JSONL)")],
    seed: Annotated[
        int, typer.Option("--seed", min=0, help="draws the examples; sent with each request")
    ] = 0,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="of the replies")] = 1.0,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="of a reply, at most")] = 3072,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="requests sent at once; changes nothing that is made")
    ] = 1,
    timeout: TimeoutOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Make instructions from seed tasks (self-instruct): a model is shown three and lists more; near-duplicates and
    what is malformed are dropped. The same command goes on after an interruption."""
    set_threads(threads)
    from headway.instruct import make_instructions, read_seeds

    check_timeout(timeout, endpoint)
    tasks = read_seeds(seeds)
    made = make_instructions(
        opened(endpoint, timeout), tasks, count, out, seed=seed, temperature=temperature, max_tokens=max_tokens,
        parallel=parallel, say=note,
    )  # fmt: skip
    share = len(made.items) / made.asked if made.asked else 0.0
    rows = [
        ("kept", len(made.items)),
        *((f"rejected: {reason}", n) for reason, n in made.rejected.items()),
        ("replies", made.replies),
        ("requests sent", made.sent),
        ("yield, kept / listed", share),
    ]
    report = {
        "kept": len(made.items),
        "rejected": made.rejected,
        "replies": made.replies,
        "sent": made.sent,
        "yield": share,
        **{name: str(getattr(made, name)) for name in ("out", "rejects", "transcript")},
    }
    print_report(report, f"{table(('what', 'count'), rows)}\n{out}", json)
