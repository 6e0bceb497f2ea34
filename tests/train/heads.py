"""Small data sets for each task with a head, which a small encoder learns in a second or two."""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from headway.train.config import TrainConfig
from headway.train.tasks import find_task
from headway.train.tasks.heads import HeadTask
from tests.train.prepared import prepared

NAMES, PLACES, VERBS = ("anna", "bob", "carl"), ("rome", "oslo", "new york"), ("lives", "works", "sings")
ENDS = ("today .", "now and then .", ".", "for a very long while .")
Record = dict[str, Any]


def sentences(seed: int) -> Iterator[tuple[str, str, str, str]]:
    rng = random.Random(seed)
    while True:
        yield rng.choice(NAMES), rng.choice(VERBS), rng.choice(PLACES), rng.choice(ENDS)


def labelled(seed: int, count: int) -> list[Record]:
    """Returns texts labelled with the place they name; every other record is a pair of texts."""
    records = []
    for i, (name, verb, place, end) in zip(range(count), sentences(seed), strict=False):
        text = f"{name} {verb} in {place} {end}"
        records.append(
            {"text": text, "label": place} if i % 2 else {"text_a": name, "text_b": text, "label": place}
        )
    return records


def tagged(seed: int, count: int) -> list[Record]:
    records = []
    for _, (name, verb, place, end) in zip(range(count), sentences(seed), strict=False):
        inside = ["B-LOC", "I-LOC"][: len(place.split())]
        words = [name, verb, "in", *place.split(), *end.split()]
        tags = ["B-PER", "O", "O", *inside, *["O"] * len(end.split())]
        records.append({"tokens": words, "ner_tags": tags})
    return records


def questions(seed: int, count: int) -> list[Record]:
    records = []
    texts = sentences(seed)
    for _ in range(count):
        (name, verb, place, end), (_, other_verb, elsewhere, _) = next(texts), next(texts)
        context = f"one {other_verb} in {elsewhere} . {name} {verb} in {place} {end}"
        start = context.rindex(place)
        answer = {"text": place, "answer_start": start}
        records.append(
            {
                "question": f"where is {name} ?",
                "context": context,
                "answers": [answer],
                "id": str(len(records)),
            }
        )
    return records


def triplets(seed: int, count: int) -> list[Record]:
    """Returns triplets in the form of CAIL2019-SCM: the label says which of B and C names the place of A."""
    rng, texts, records = random.Random(seed), sentences(seed), list[Record]()
    while len(records) < count:
        a, b, c = (next(texts) for _ in range(3))
        if a[2] == b[2] != c[2]:
            near, far = " ".join(b), " ".join(c)
            label = rng.choice("BC")
            pair = (near, far) if label == "B" else (far, near)
            records.append({"A": " ".join(a), "B": pair[0], "C": pair[1], "label": label})
    return records


DATA: dict[str, Callable[[int, int], list[Record]]] = {
    "classify": labelled,
    "tag": tagged,
    "answer": questions,
    "embed": triplets,
}
USUAL: dict[str, Any] = {
    "family": "bert", "depth": 2, "width": 32, "heads": 2, "hidden": 48, "dropout": 0.0, "vocab": 400,
    "units": "words", "context": 32, "batch": 16, "steps": 6, "lr": 3e-3, "dtype": "fp32", "threads": 1,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {"answer": {"stride": 8}}


def write(path: Path, records: Iterable[object]) -> str:
    """Writes a line of JSON for each record, and returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def settings(task: str, folder: Path, **changes: Any) -> TrainConfig:
    """Returns the settings of a run of `task` in `folder`, and writes its data there."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "data": write(folder / "train.jsonl", DATA[task](0, 96)),
        "validation": write(folder / "held.jsonl", DATA[task](1, 24)),
        "out": str(folder / "run"),
    }
    values = {"task": task, **USUAL, **OWN.get(task, {}), **files, **changes}
    return find_task(task).settings.of({name: value for name, value in values.items() if value is not None})


def made(task: str, folder: Path, **changes: Any) -> HeadTask:
    """Returns the task of these settings, ready for its first step."""
    head_task = prepared(settings(task, folder, **changes), folder)
    assert isinstance(head_task, HeadTask)
    return head_task
