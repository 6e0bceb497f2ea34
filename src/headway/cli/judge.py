"""`headway judge A B --questions F --by URL|FOLDER --out FOLDER`: whose answers a model finds better."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from headway.cli._endpoints import TimeoutOption, check_timeout, opened
from headway.cli._progress import progress
from headway.cli._shared import JsonOption, ThreadsOption, print_report, set_threads
from headway.errors import ConfigError

ANSWERS = "answers of a file (.jsonl, FastChat's form), or of URL#MODEL, or of a model folder, which is asked"


def command(
    a: Annotated[str, typer.Argument(metavar="A", help=ANSWERS)],
    b: Annotated[str, typer.Argument(metavar="B", help="the same")],
    questions: Annotated[Path, typer.Option("--questions", help="questions (JSONL, FastChat's form)")],
    by: Annotated[str, typer.Option("--by", metavar="URL#MODEL|FOLDER", help="the judge")],
    out: Annotated[
        Path, typer.Option("--out", help="folder of answers, transcripts, judgments and the report")
    ],
    references: Annotated[
        Path | None, typer.Option("--references", help="right answers (JSONL), shown to the judge")
    ] = None,
    mode: Annotated[
        str, typer.Option("--mode", help="pairs | ratings | both: compare two answers, rate each by itself")
    ] = "both",
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="only the first N questions")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of the requests and the intervals")] = 0,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, help="requests sent to the judge at once; changes no verdict")
    ] = 1,
    timeout: TimeoutOption = None,
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Let a model judge two sets of answers: in both orders, with what its verdicts owe to order and length, and the
    ratio of its ratings. The same command goes on after an interruption."""
    if mode not in ("pairs", "ratings", "both"):
        raise ConfigError(f"--mode {mode}: pairs, ratings and both are known")
    set_threads(threads)
    from headway import judge
    from headway.checkpoints import atomic_write
    from headway.endpoints import Transcript
    from headway.report import plain
    from headway.storage.files import json_text

    check_timeout(timeout, a, b, by)
    asked = judge.read_questions(questions, references)[:limit]
    answers = []
    for side, source in (("A", a), ("B", b)):
        if source.endswith(".jsonl"):
            answers.append(judge.read_answers(source))
        else:
            path = out / f"answers-{side}.jsonl"
            with progress(f"answers of {source}") as advance:
                answers.append(judge.ask(opened(source, timeout), asked, path, seed=seed, progress=advance))
    endpoint = opened(by, timeout)
    verdicts, ratings = [], []
    with Transcript(out / "judge.transcript.jsonl") as transcript:
        how: dict[str, Any] = {"seed": seed, "parallel": parallel}
        if mode != "ratings":
            with progress(f"{endpoint.name} compares answers to {len(asked)} questions") as how["progress"]:
                verdicts = judge.compare(endpoint, asked, answers[0], answers[1], transcript, **how)
        if mode != "pairs":
            with progress(f"{endpoint.name} rates answers to {len(asked)} questions") as how["progress"]:
                ratings = judge.rate(endpoint, asked, answers[0], answers[1], transcript, **how)
    pairs = judge.pairs_of(verdicts, seed=seed) if verdicts else None
    marks = judge.ratings_of(ratings, seed=seed) if ratings else None
    report = {"A": a, "B": b, "judge": endpoint.name, "pairs": pairs, "ratings": marks}
    judgments = [dumps(plain(one)) + "\n" for both in (*verdicts, *ratings) for one in both]
    atomic_write(out / "judgments.jsonl", "".join(judgments))
    atomic_write(out / "report.json", json_text(plain(report)))
    text = "\n\n".join(found.text() for found in (pairs, marks) if found is not None)
    print_report(report, f"A is {a}\nB is {b}\n\n{text}\n\n{out}", json)
