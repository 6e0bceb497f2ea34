"""Verdicts on two answers, in both orders, and ratings of single ones, by a judge with FastChat's prompts.

`prompts.jsonl` is FastChat's (fastchat/llm_judge/data/judge_prompts.jsonl, Apache 2.0), as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal, TypeVar

from headway.endpoints import Endpoint, Transcript, in_order
from headway.errors import DataError
from headway.judge.questions import Answers, Question

Side = Literal["A", "B"]
T = TypeVar("T")
Progress = Callable[[int, int], None]
MAX_TOKENS = 2048
# What ends a judgment. Each has a second form, which judges write that forget a bracket.
_ENDS = {
    "pair": (re.compile(r"\[\[([ABC])\]\]"), re.compile(r"\[([ABC])\]")),
    "rating": (re.compile(r"\[\[(\d+\.?\d*)\]\]"), re.compile(r"\[(\d+\.?\d*)\]")),
}
_PROMPTS = {"pair": ("pair", "v2"), "rating": ("single", "v1")}  # FastChat's names and versions


@dataclass(frozen=True)
class Match:
    """A turn of a question, and how long the two answers to it are, in characters."""

    question: str
    turn: int
    lengths: tuple[int, int]


@dataclass(frozen=True)
class Verdict:
    """What a judge says of two answers, of which the one of `first` was shown first: "A", "B" or "tie"; None where no
    verdict was found in what it said."""

    match: Match
    first: Side
    winner: Literal["A", "B", "tie"] | None


@dataclass(frozen=True)
class Rating:
    """A judge's mark for an answer, 1..10; None where none was found in what it said."""

    match: Match
    side: Side
    score: float | None


def compare(
    judge: Endpoint,
    questions: Sequence[Question],
    a: Answers,
    b: Answers,
    transcript: Transcript,
    *,
    seed: int = 0,
    parallel: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[tuple[Verdict, Verdict]]:
    """Two verdicts on each turn of each question: with the answer of `a` first, and with that of `b` first. `parallel`
    requests are sent at once, which changes no verdict; `progress(replies, requests)` is called after each.

    Raises DataError for an answer that is missing."""

    def verdict(match: Match, first: Side, found: str | None) -> Verdict:
        shown = {"A": first, "B": "B" if first == "A" else "A", "C": "tie"}
        return Verdict(match, first, None if found is None else shown[found])  # type: ignore[arg-type]

    return _both("pair", verdict, judge, questions, a, b, transcript, seed, parallel, progress)


def rate(
    judge: Endpoint,
    questions: Sequence[Question],
    a: Answers,
    b: Answers,
    transcript: Transcript,
    *,
    seed: int = 0,
    parallel: int = 1,
    progress: Progress = lambda done, total: None,
) -> list[tuple[Rating, Rating]]:
    """A rating of each answer by itself, turn by turn; otherwise as `compare`."""

    def rating(match: Match, side: Side, found: str | None) -> Rating:
        score = None if found is None else float(found)
        return Rating(match, side, score if score is not None and 1 <= score <= 10 else None)

    return _both("rating", rating, judge, questions, a, b, transcript, seed, parallel, progress)


def _both(
    kind: Literal["pair", "rating"],
    made: Callable[[Match, Side, str | None], T],
    judge: Endpoint,
    questions: Sequence[Question],
    a: Answers,
    b: Answers,
    transcript: Transcript,
    seed: int,
    parallel: int,
    progress: Progress,
) -> list[tuple[T, T]]:
    """What `made` makes of the judgment of each turn, for A and for B."""

    def judged(job: tuple[Question, int, Side]) -> T:
        question, turn, side = job
        own, other = (a[question.id], b[question.id]) if side == "A" else (b[question.id], a[question.id])
        messages = _messages(kind, question, turn, {"answer": own, "answer_a": own, "answer_b": other})
        key = f"{kind}:{question.id}:{turn}:{side}"
        reply = transcript.chat(judge, key, messages, seed=seed, temperature=0.0, max_tokens=MAX_TOKENS)
        lengths = len(a[question.id][turn - 1]), len(b[question.id][turn - 1])
        return made(Match(question.id, turn, lengths), side, _last(_ENDS[kind], reply.text))

    sides: tuple[Side, Side] = ("A", "B")
    jobs = [(*turn, side) for turn in _turns(questions, a, b) for side in sides]
    found = []
    for one in in_order(judged, jobs, parallel):
        found.append(one)
        progress(len(found), len(jobs))
    return list(zip(found[::2], found[1::2], strict=True))


def _messages(
    kind: str, question: Question, turn: int, answers: dict[str, Sequence[str]]
) -> list[dict[str, str]]:
    """What the judge is asked of answers; the conversation up to the second turn where that is judged."""
    name, version = _PROMPTS[kind]
    several = "-multi-turn" if turn == 2 else ""
    template = _prompts()[f"{name}-{'math-v1' if question.reference else version}{several}"]
    if turn == 1:
        fields = {"question": question.turns[0], **{name: turns[0] for name, turns in answers.items()}}
    else:
        fields = {f"question_{i}": text for i, text in enumerate(question.turns, 1)}
        fields |= {f"{name}_{i}": turns[i - 1] for name, turns in answers.items() for i in (1, 2)}
    fields |= {f"ref_answer_{i}": text for i, text in enumerate(question.reference or (), 1)}
    return [
        {"role": "system", "content": template["system_prompt"]},
        {"role": "user", "content": template["prompt_template"].format(**fields)},
    ]


def _turns(questions: Sequence[Question], a: Answers, b: Answers) -> Iterator[tuple[Question, int]]:
    for question in questions:
        for name, answers in (("A", a), ("B", b)):
            count = len(answers.get(question.id, ()))
            if count < len(question.turns):
                raise DataError(
                    f"question {question.id} has {len(question.turns)} turns, and {name} answers {count} of them; give "
                    "answers to all, or fewer questions"
                )
        for turn in range(1, len(question.turns) + 1):
            yield question, turn


def _last(forms: Sequence[re.Pattern[str]], text: str) -> str | None:
    """What the last place of the first form that occurs says: judgments end with it."""
    found = next((places for form in forms if (places := form.findall(text))), None)
    return None if found is None else str(found[-1])


@cache
def _prompts() -> dict[str, dict[str, Any]]:
    lines = (files("headway.judge") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return {prompt["name"]: prompt for prompt in map(json.loads, lines)}
