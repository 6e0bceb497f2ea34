"""Toy data for each shipped recipe of several stages: functions that write it to a folder and return overrides."""

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.train.conftest import documents
from tests.train.heads import write

HAN = "".join(map(chr, range(0x4E00, 0x4E40)))


def text(folder: Path) -> list[str]:
    """Writes one long document."""
    (folder / "text.txt").write_text("".join(documents(0, 400)), encoding="utf-8")
    return [f"data={folder / 'text.txt'}"]


def letters(folder: Path) -> list[str]:
    """Writes a text of the 27 symbols of text8."""
    rng = random.Random(0)
    symbols = "".join(map(chr, range(97, 123))) + " "
    (folder / "text8.txt").write_text(symbols + "".join(rng.choices(symbols, k=30000)), encoding="utf-8")
    return [f"data={folder / 'text8.txt'}"]


def chinese(folder: Path) -> list[str]:
    """Writes chapters of random characters."""
    rng = random.Random(0)
    chapters = [{"text": "".join(rng.choices(HAN, k=500))} for _ in range(8)]
    return [f"data={write(folder / 'chapters.jsonl', chapters)}"]


def comparison(folder: Path) -> list[str]:
    """Writes chapters, triplets of random passages, and titles of two classes."""
    rng = random.Random(1)

    def some(count: int) -> str:
        return "".join(rng.choices(HAN, k=count))

    triplets = write(
        folder / "triplets.jsonl",
        [{"A": some(30), "B": some(30), "C": some(30), "label": rng.choice("BC")} for _ in range(12)],
    )
    titles = folder / "titles.txt"
    titles.write_text("".join(f"{some(9)}\t{i % 2}\n" for i in range(12)), encoding="utf-8")
    ranked = ("bert_triplets", "wobert_triplets", "roformer_triplets", "roformer_long")
    named = ("wobert_titles", "roformer_titles")
    files = [(name, triplets) for name in ranked] + [(name, str(titles)) for name in named]
    overrides = [f"{name}.{key}={file}" for name, file in files for key in ("data", "validation")]
    return [*chinese(folder), *overrides]


def reviews(folder: Path) -> list[str]:
    """Writes texts with one of two labels; some are longer than the context."""
    texts = documents(2, 24, most=90)
    data = write(folder / "r.jsonl", [{"text": text, "label": str(i % 2)} for i, text in enumerate(texts)])
    measured = ("reviews128", "reviews512", "reviews2048", "imdb128", "imdb512")
    overrides = [f"{name}.data={data}" for name in ("imdb128", "imdb512", "news512", "news2048")]
    return [f"data={data}", *overrides, *(f"{name}.validation={data}" for name in measured)]


def meetings(folder: Path) -> list[str]:
    """Writes questions that a word of a text answers."""
    texts = documents(3, 12, most=90)
    words = [passage.split()[-1] for passage in texts]
    records: list[dict[str, object]] = [
        {
            "question": "where",
            "context": passage,
            "answers": [{"text": word, "answer_start": passage.rindex(word)}],
        }
        for passage, word in zip(texts, words, strict=True)
    ]
    data = write(folder / "q.jsonl", records)
    return [f"data={data}", *(f"{name}.validation={data}" for name in ("long", "pieces", "beginning"))]


def long_text(folder: Path) -> list[str]:
    """Writes documents of some thousand tokens."""
    lines: list[dict[str, object]] = [{"text": "".join(documents(seed, 60))} for seed in range(4)]
    return [f"data={write(folder / 'long.jsonl', lines)}"]


def instructions(folder: Path, *stages: str, base: str = "base") -> list[str]:
    """Writes a text, and instructions with an answer of a word or two."""
    lines: list[dict[str, object]] = [
        {
            "instruction": document.split()[0],
            "input": document.split()[-1] * (i % 2),
            "output": " ".join(document.split()[:2]),
        }
        for i, document in enumerate(documents(4, 20))
    ]
    data = write(folder / "alpaca.jsonl", lines)
    return [f"{base}.{text(folder)[0]}", *(f"{stage}.data={data}" for stage in stages)]


def talks(folder: Path, *stages: str, base: str = "base") -> list[str]:
    """Writes the data of `instructions`, and conversations of one to three rounds."""
    turns = [{"from": "human", "value": "one two"}, {"from": "gpt", "value": "three"}]
    lines: list[dict[str, object]] = [{"conversations": turns * (1 + i % 3)} for i in range(20)]
    data = write(folder / "sharegpt.jsonl", lines)
    return [*instructions(folder, "alpaca", base=base), *(f"{stage}.data={data}" for stage in stages)]


def evolution(folder: Path) -> list[str]:
    """Writes the data of `talks`, and takes the text once more."""
    overrides = talks(folder, "vicuna", "llama2_chat", base="llama")
    return [*overrides, f"llama2.{text(folder)[0]}"]


def pairs(folder: Path) -> list[str]:
    """Writes sentences and the same backwards."""
    lines = [line[:40] for line in documents(5, 40)]
    sides = {"source": lines, "target": [line[::-1] for line in lines]}
    for side, texts in sides.items():
        (folder / side).write_text("".join(f"{text.strip() or 'a'}\n" for text in texts), encoding="utf-8")
    parts = ("", "validation_", "test_")
    return [f"{part}{side}={folder / side}" for part in parts for side in sides]


TOYS: Mapping[str, Callable[[Path], list[str]]] = {
    "alpaca": lambda folder: instructions(folder, "alpaca", "lora"),
    "context-extend": text,
    "evolution": evolution,
    "gqa-translation": pairs,
    "gqa-uptrain": text,
    "hybrid": text,
    "long-classify": reviews,
    "long-qa": meetings,
    "longformer-4096": long_text,
    "longformer-charlm": letters,
    "roformer-chinese": comparison,
    "roformer-six": chinese,
    "vicuna": lambda folder: talks(folder, "vicuna", "last", "oasst"),
}
