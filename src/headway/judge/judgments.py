"""Questions of one or two turns and answers to them, in FastChat's files, and answers asked of an endpoint; judgments
of two answers, in both orders, and of single ones, by a judge with FastChat's prompts.

`prompts.jsonl` is FastChat's (fastchat/llm_judge/data/judge_prompts.jsonl, Apache 2.0), as it is.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from headway.data.values import values
from headway.endpoints import Endpoint, Transcript, in_order
from headway.errors import DataError
from headway.storage.files import atomic_write

Answers = Mapping[str, Sequence[str]]
"""The answer to each turn of a question, by the question's id."""

# FastChat's temperatures for answers, by category.
TEMPERATURES = {"roleplay": 0.7, "writing": 0.7, "stem": 0.1, "humanities": 0.1}
TEMPERATURES |= dict.fromkeys(("extraction", "math", "coding", "reasoning"), 0.0)
USUAL_TEMPERATURE = 0.7


@dataclass(frozen=True)
class Question:
    """id, category: as in its file.   turns: what the user says, one or two messages.   reference: right answers to its
    turns, where there are any."""

    id: str
    category: str
    turns: tuple[str, ...]
    reference: tuple[str, ...] | None = None


def read_questions(path: str | Path, references: str | Path | None = None) -> list[Question]:
    """{"question_id", "category", "turns"} (MT-bench, Vicuna bench), with the answers of a file of `references`.

    Raises DataError with file and line."""
    right = {} if references is None else read_answers(references)
    questions: dict[str, Question] = {}
    for where, value in values(path):
        name, turns = _turns(value, value, where)
        if len(turns) not in (1, 2):
            raise DataError(f"{where}: a question has one turn or two, got {len(turns)}")
        if name in questions:
            raise DataError(f"{where}: there are two questions {name}")
        reference = right.get(name)
        if reference is not None and len(reference) < len(turns):
            raise DataError(
                f"{references}: question {name} has {len(turns)} turns, and {len(reference)} reference answers"
            )
        question = Question(name, str(value.get("category", "")), turns)
        questions[name] = question if reference is None else replace(question, reference=tuple(reference))
    return list(questions.values())


def read_answers(path: str | Path) -> dict[str, tuple[str, ...]]:
    """{"question_id", "choices": [{"turns": [...]}]}: the first choice of each. Raises DataError with file and line."""
    answers: dict[str, tuple[str, ...]] = {}
    for where, value in values(path):
        choices = value.get("choices") if isinstance(value, Mapping) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        name, turns = _turns(value, first, where)
        answers[name] = turns
    return answers


def _turns(value: Any, inner: Any, where: str) -> tuple[str, tuple[str, ...]]:
    """The id of a question and the texts of its turns, which stand in `inner`."""
    turns = inner.get("turns") if isinstance(inner, Mapping) else None
    name = value.get("question_id") if isinstance(value, Mapping) else None
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(text, str) for text in turns)
        or name is None
    ):
        keys = sorted(value) if isinstance(value, Mapping) else type(value).__name__
        raise DataError(
            f'{where}: "question_id" and "turns", a list of texts, are expected (answers have them in '
            f'"choices": [{{"turns": ...}}]), got {keys}'
        )
    return str(name), tuple(turns)


def ask(
    endpoint: Endpoint,
    questions: Sequence[Question],
    out: str | Path,
    *,
    seed: int = 0,
    max_tokens: int = 1024,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, tuple[str, ...]]:
    """The endpoint's answers, each turn after the answer to the one before, written to `out` in FastChat's form; with
    `out`.transcript.jsonl beside it, from which a run that was stopped goes on. Temperatures are FastChat's, by
    category. `progress(questions done, questions)` is called after each."""
    path, answers = Path(out), dict[str, tuple[str, ...]]()
    with Transcript(path.with_name(f"{path.name}.transcript.jsonl")) as transcript:
        for question in questions:
            messages: list[dict[str, str]] = []
            for turn, text in enumerate(question.turns, 1):
                messages.append({"role": "user", "content": text})
                reply = transcript.chat(
                    endpoint,
                    f"{question.id}:{turn}",
                    messages,
                    seed=seed,
                    temperature=TEMPERATURES.get(question.category, USUAL_TEMPERATURE),
                    max_tokens=max_tokens,
                )
                messages.append({"role": "assistant", "content": reply.text})
            answers[question.id] = tuple(message["content"] for message in messages[1::2])
            progress(len(answers), len(questions))
    lines = [
        {"question_id": name, "model_id": endpoint.name, "choices": [{"index": 0, "turns": turns}]}
        for name, turns in answers.items()
    ]
    atomic_write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return answers


Side = Literal["A", "B"]
Kind = Literal["pairs", "ratings"]
MAX_TOKENS = 2048
# FastChat's names and versions of the prompts, and what stands in brackets at the end of a judgment.
_KINDS = {"pairs": ("pair", "v2", r"[ABC]"), "ratings": ("single", "v1", r"\d+\.?\d*")}


@dataclass(frozen=True)
class Judgment:
    """A judge's verdict on the answers to a turn of a question.

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
        first, second = (a[question.id], b[question.id]) if side == "A" else (b[question.id], a[question.id])
        messages = _messages(kind, question, turn, {"answer": first, "answer_a": first, "answer_b": second})
        key = f"{kind}:{question.id}:{turn}:{side}"
        reply = transcript.chat(judge, key, messages, seed=seed, temperature=0.0, max_tokens=MAX_TOKENS)
        lengths = len(a[question.id][turn - 1]), len(b[question.id][turn - 1])
        return Judgment(question.id, turn, lengths, side, _value(kind, side, reply.text))

    sides: tuple[Side, Side] = ("A", "B")
    jobs = [(*turn, side) for turn in _answered(questions, a, b) for side in sides]
    results = []
    for judgment in in_order(judged, jobs, parallel):
        results.append(judgment)
        progress(len(results), len(jobs))
    return list(zip(results[::2], results[1::2], strict=True))


def _messages(
    kind: Kind, question: Question, turn: int, answers: dict[str, Sequence[str]]
) -> list[dict[str, str]]:
    """The messages that ask the judge about answers; the conversation up to the second turn where that is judged."""
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


def _answered(questions: Sequence[Question], a: Answers, b: Answers) -> Iterator[tuple[Question, int]]:
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
    """The value in the last double brackets, or in the last single ones without any: judgments end with it."""
    pattern = _KINDS[kind][2]
    places = re.findall(rf"\[\[({pattern})\]\]", text) or re.findall(rf"\[({pattern})\]", text)
    if not places:
        return None
    if kind == "pairs":
        return {"A": side, "B": "B" if side == "A" else "A", "C": "tie"}[places[-1]]
    return mark if 1 <= (mark := float(places[-1])) <= 10 else None


@cache
def _prompts() -> dict[str, dict[str, Any]]:
    lines = (files("headway.judge") / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    return {prompt["name"]: prompt for prompt in map(json.loads, lines)}
