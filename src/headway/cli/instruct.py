"""`headway instruct --seeds F --endpoint URL|FOLDER -n N --out FILE`: generates instructions from a few seed tasks."""

from pathlib import Path
from typing import Annotated

from headway.cli._options import Count, Whole, says
from headway.cli._shared import check_timeout, note, opened, print_report, set_threads
from headway.report import table


def command(
    *,
    seeds: Path,
    endpoint: Annotated[str, says(metavar="URL#MODEL|FOLDER")],
    count: Annotated[Count, says(short="-n")],
    out: Path,
    seed: Whole = 0,
    temperature: Annotated[float, says(min=0.0)] = 1.0,
    max_tokens: Count = 3072,
    parallel: Count = 1,
    timeout: float | None = None,
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Generate instructions from seed tasks (self-instruct): a model sees three and lists more; near-duplicates and
    malformed ones are dropped. After an interruption, the same command continues.

    seeds: seed tasks, or records in Alpaca's format (JSONL)
    endpoint: URL#MODEL of an OpenAI-compatible server (https://host/v1#name), or a model folder
    count: number of instructions to generate
    out: file to write, records in Alpaca's format (JSONL)
    seed: for choosing the examples; also sent with each request
    temperature: sampling temperature of the replies
    max_tokens: maximum number of tokens of a reply
    parallel: requests sent at once; does not change results
    """
    set_threads(threads)
    from headway.instruct import make_instructions, read_seeds

    check_timeout(timeout, endpoint)
    tasks = read_seeds(seeds)
    result = make_instructions(
        opened(endpoint, timeout), tasks, count, out, seed=seed, temperature=temperature, max_tokens=max_tokens,
        parallel=parallel, say=note,
    )  # fmt: skip
    share = len(result.items) / result.asked if result.asked else 0.0
    rows = [
        ("kept", len(result.items)),
        *((f"rejected: {reason}", n) for reason, n in result.rejected.items()),
        ("replies", result.replies),
        ("requests sent", result.sent),
        ("yield, kept / listed", share),
    ]
    report = {
        "kept": len(result.items),
        "rejected": result.rejected,
        "replies": result.replies,
        "sent": result.sent,
        "yield": share,
        **{name: str(getattr(result, name)) for name in ("out", "rejects", "transcript")},
    }
    print_report(report, f"{table(('what', 'count'), rows)}\n{out}", json)
