"""Verdicts on two answers, in both orders, and ratings of single ones, by a judge with FastChat's prompts.

`prompts.jsonl` is FastChat's (fastchat/llm_judge/data/judge_prompts.jsonl, Apache 2.0), as it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from headway.endpoints import Endpoint, Transcript
from headway.errors import DataError
from headway.judge.questions import Answers, Question

Side = Literal["A", "B"]
MAX_TOKENS = 2048
# What ends a judgment. Each has a second form, which judges write that forget a bracket.
_VERDICT = (re.compile(r"\[\[([ABC])\]\]"), re.compile(r"\[([ABC])\]"))
_RATING = (re.compile(r"\[\[(\d+\.?\d*)\]\]"), re.compile(r"\[(\d+\.?\d*)\]"))


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
) -> Iterator[tuple[Verdict, Verdict]]:
    """Two verdicts on each turn of each question: with the answer of `a` first, and with that of `b` first.

    Raises DataError for an answer that is missing."""
    for question, turn in _turns(questions, a, b):
        match = _match(question, turn, a, b)
        verdicts = []
        for first, (one, other) in (("A", (a, b)), ("B", (b, a))):
            said = _judged(
                judge, transcript, f"pair:{question.id}:{turn}:{first}", question, turn, "pair",
                {"answer_a": one[question.id], "answer_b": other[question.id]}, seed,
            )  # fmt: skip
            shown = {"A": first, "B": "B" if first == "A" else "A", "C": "tie"}
            found = _last(_VERDICT, said)
            verdicts.append(Verdict(match, first, None if found is None else shown[found]))  # type: ignore[arg-type]
        yield verdicts[0], verdicts[1]


def rate(
    judge: Endpoint,
    questions: Sequence[Question],
    a: Answers,
    b: Answers,
    transcript: Transcript,
    *,
    seed: int = 0,
) -> Iterator[tuple[Rating, Rating]]:
    """A rating of each answer by itself, turn by turn. Raises DataError for an answer that is missing."""
    for question, turn in _turns(questions, a, b):
        match, ratings = _match(question, turn, a, b), []
        sides: tuple[tuple[Side, Answers], ...] = (("A", a), ("B", b))
        for side, answers in sides:
            said = _judged(
                judge, transcript, f"rating:{question.id}:{turn}:{side}", question, turn, "single",
                {"answer": answers[question.id]}, seed,
            )  # fmt: skip
            found = _last(_RATING, said)
            score = None if found is None else float(found)
            ratings.append(Rating(match, side, score if score is not None and 1 <= score <= 10 else None))
        yield ratings[0], ratings[1]


def _judged(
    judge: Endpoint,
    transcript: Transcript,
    key: str,
    question: Question,
    turn: int,
    kind: Literal["pair", "single"],
    answers: dict[str, Sequence[str]],
    seed: int,
) -> str:
    """What the judge says of answers; the conversation up to the second turn where that is judged."""
    version = "math-v1" if question.reference else {"pair": "v2", "single": "v1"}[kind]
    template = _prompts()[f"{kind}-{version}{'-multi-turn' if turn == 2 else ''}"]
    if turn == 1:
        fields = {"question": question.turns[0], **{name: turns[0] for name, turns in answers.items()}}
    else:
        fields = {f"question_{i}": text for i, text in enumerate(question.turns, 1)}
        fields |= {f"{name}_{i}": turns[i - 1] for name, turns in answers.items() for i in (1, 2)}
    fields |= {f"ref_answer_{i}": text for i, text in enumerate(question.reference or (), 1)}
    messages = [
        {"role": "system", "content": template["system_prompt"]},
        {"role": "user", "content": template["prompt_template"].format(**fields)},
    ]
    reply = transcript.chat(judge, key, messages, seed=seed, temperature=0.0, max_tokens=MAX_TOKENS)
    return reply.text


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


def _match(question: Question, turn: int, a: Answers, b: Answers) -> Match:
    return Match(question.id, turn, (len(a[question.id][turn - 1]), len(b[question.id][turn - 1])))


def _last(forms: Sequence[re.Pattern[str]], text: str) -> str | None:
    """What the last place of the first form that occurs says: judgments end with it."""
    found = next((places for form in forms if (places := form.findall(text))), None)
    return None if found is None else str(found[-1])


@cache
def _prompts() -> dict[str, dict[str, Any]]:
    lines = (files("headway.judge") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return {prompt["name"]: prompt for prompt in map(json.loads, lines)}
