"""Judgments of two answers, in both orders, and of single ones, by a judge with FastChat's prompts.

`prompts.jsonl` is FastChat's (fastchat/llm_judge/data/judge_prompts.jsonl, Apache 2.0), as it is.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from headway.endpoints import Endpoint, Transcript, in_order
from headway.errors import DataError
from headway.judge.questions import Answers, Question

Side = Literal["A", "B"]
Kind = Literal["pairs", "ratings"]
MAX_TOKENS = 2048
# FastChat's names and versions of the prompts, and what stands in brackets at the end of a judgment.
_KINDS = {"pairs": ("pair", "v2", r"[ABC]"), "ratings": ("single", "v1", r"\d+\.?\d*")}


@dataclass(frozen=True)
class Judgment:
    """What a judge says of the answers to a turn of a question.

    lengths: of the answers of A and of B, in characters.
    side: whose answer was shown first, or alone.
    value: the winner, "A", "B" or "tie"; of a rating the mark, 1..10; None where none was found in what the judge said.
    """

    question: str
    turn: int
    lengths: tuple[int, int]
    side: Side
    value: str | float | None


def judgments(
    kind: Kind,
    judge: Endpoint,
    questions: Sequence[Question],
    a: Answers,
    b: Answers,
    transcript: Transcript,
    *,
    seed: int = 0,
    parallel: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[tuple[Judgment, Judgment]]:
    """Two judgments of each turn of each question. "pairs": both answers, with that of `a` first, and with that of `b`
    first. "ratings": the answer of `a` by itself, and that of `b`. `parallel` requests are sent at once, which changes
    no judgment; `progress(replies, requests)` is called after each.

    Raises DataError for an answer that is missing."""

    def judged(job: tuple[Question, int, Side]) -> Judgment:
        question, turn, side = job
        own, other = (a[question.id], b[question.id]) if side == "A" else (b[question.id], a[question.id])
        messages = _messages(kind, question, turn, {"answer": own, "answer_a": own, "answer_b": other})
        key = f"{kind}:{question.id}:{turn}:{side}"
        reply = transcript.chat(judge, key, messages, seed=seed, temperature=0.0, max_tokens=MAX_TOKENS)
        lengths = len(a[question.id][turn - 1]), len(b[question.id][turn - 1])
        return Judgment(question.id, turn, lengths, side, _value(kind, side, reply.text))

    sides: tuple[Side, Side] = ("A", "B")
    jobs = [(*turn, side) for turn in _turns(questions, a, b) for side in sides]
    found = []
    for one in in_order(judged, jobs, parallel):
        found.append(one)
        progress(len(found), len(jobs))
    return list(zip(found[::2], found[1::2], strict=True))


def _messages(
    kind: Kind, question: Question, turn: int, answers: dict[str, Sequence[str]]
) -> list[dict[str, str]]:
    """What the judge is asked of answers; the conversation up to the second turn where that is judged."""
    name, version, _ = _KINDS[kind]
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


def _value(kind: Kind, side: Side, text: str) -> str | float | None:
    """What the last place in double brackets says, or in single ones where there are none: judgments end with it."""
    said = _KINDS[kind][2]
    places = re.findall(rf"\[\[({said})\]\]", text) or re.findall(rf"\[({said})\]", text)
    if not places:
        return None
    if kind == "pairs":
        return {"A": side, "B": "B" if side == "A" else "A", "C": "tie"}[places[-1]]
    return mark if 1 <= (mark := float(places[-1])) <= 10 else None


@cache
def _prompts() -> dict[str, dict[str, Any]]:
    lines = (files("headway.judge") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return {prompt["name"]: prompt for prompt in map(json.loads, lines)}
