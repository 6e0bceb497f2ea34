"""`headway judge A B --questions F --by URL|FOLDER --out FOLDER`: compares the answers of two models by a third."""

from json import dumps
from pathlib import Path
from typing import Annotated, Any, Literal

from headway.cli._options import Count, Whole, says
from headway.cli._shared import check_timeout, opened, print_report, progress, set_threads


def command(
    a: Annotated[str, says(metavar="A")],
    b: Annotated[str, says(metavar="B")],
    *,
    questions: Path,
    by: Annotated[str, says(metavar="URL#MODEL|FOLDER")],
    out: Path,
    references: Path | None = None,
    mode: Literal["pairs", "ratings", "both"] = "both",
    limit: Count | None = None,
    seed: Whole = 0,
    parallel: Count = 1,
    timeout: float | None = None,
    threads: int | None = None,
    json: bool = False,
) -> None:
    """Let a model judge two sets of answers, in both orders. Reports how order and length affect its verdicts, and the
    ratio of its ratings. After an interruption, the same command continues.

    a: a file of answers (.jsonl, FastChat's format), or a model that answers: URL#MODEL or a folder
    b: the same
    questions: questions (JSONL, FastChat's format)
    by: the judge
    out: folder for answers, transcripts, judgments and the report
    references: correct answers (JSONL), shown to the judge
    mode: compare two answers, rate each by itself, or both
    limit: only the first N questions
    seed: for the requests and the confidence intervals
    parallel: requests sent to the judge at once; does not change results
    """
    set_threads(threads)
    from headway import judge
    from headway.endpoints import Transcript
    from headway.judge.judgments import Kind
    from headway.report import plain
    from headway.storage.files import atomic_write, json_text

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
    kinds: dict[Kind, str] = {"pairs": "compares", "ratings": "rates"}
    judgments: dict[Kind, list[tuple[judge.Judgment, judge.Judgment]]] = {}
    with Transcript(out / "judge.transcript.jsonl") as transcript:
        how: dict[str, Any] = {"seed": seed, "parallel": parallel}
        for kind, does in kinds.items():
            if mode in (kind, "both"):
                with progress(f"{endpoint.name} {does} answers to {len(asked)} questions") as how["progress"]:
                    judgments[kind] = judge.judgments(
                        kind, endpoint, asked, answers[0], answers[1], transcript, **how
                    )
    pairs = judge.pairs_of(judgments["pairs"], seed=seed) if "pairs" in judgments else None
    marks = judge.ratings_of(judgments["ratings"], seed=seed) if "ratings" in judgments else None
    report = {"A": a, "B": b, "judge": endpoint.name, "pairs": pairs, "ratings": marks}
    lines = [
        dumps(plain(judgment)) + "\n" for orders in judgments.values() for both in orders for judgment in both
    ]
    atomic_write(out / "judgments.jsonl", "".join(lines))
    atomic_write(out / "report.json", json_text(plain(report)))
    text = "\n\n".join(part.text() for part in (pairs, marks) if part is not None)
    print_report(report, f"A is {a}\nB is {b}\n\n{text}\n\n{out}", json)
