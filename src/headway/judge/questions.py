"""Questions of one or two turns and answers to them, in FastChat's files, and answers asked of an endpoint."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.data.values import values
from headway.endpoints import Endpoint, Transcript
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
    found: dict[str, Question] = {}
    for where, value in values(path):
        name, turns = _turns(value, value, where)
        if len(turns) not in (1, 2):
            raise DataError(f"{where}: a question has one turn or two, got {len(turns)}")
        if name in found:
            raise DataError(f"{where}: there are two questions {name}")
        given = right.get(name)
        if given is not None and len(given) < len(turns):
            raise DataError(
                f"{references}: question {name} has {len(turns)} turns, and {len(given)} reference answers"
            )
        question = Question(name, str(value.get("category", "")), turns)
        found[name] = question if given is None else replace(question, reference=tuple(given))
    return list(found.values())


def read_answers(path: str | Path) -> dict[str, tuple[str, ...]]:
    """{"question_id", "choices": [{"turns": [...]}]}: the first choice of each. Raises DataError with file and line."""
    found: dict[str, tuple[str, ...]] = {}
    for where, value in values(path):
        choices = value.get("choices") if isinstance(value, Mapping) else None
        first = choices[0] if isinstance(choices, list) and choices else None
        name, turns = _turns(value, first, where)
        found[name] = turns
    return found


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
    path, found = Path(out), dict[str, tuple[str, ...]]()
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
            found[question.id] = tuple(one["content"] for one in messages[1::2])
            progress(len(found), len(questions))
    lines = [
        {"question_id": name, "model_id": endpoint.name, "choices": [{"index": 0, "turns": turns}]}
        for name, turns in found.items()
    ]
    atomic_write(path, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return found
