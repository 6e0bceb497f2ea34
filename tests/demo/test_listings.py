"""What the demo prints and draws for given numbers, as listed in tests/demo/listings."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway_lab.demo import acts, corpus, heads, learn, run
from headway_lab.demo.corpus import Corpus, Document
from tests import figures, listings
from tests.listings import constants, number

LISTINGS = Path(__file__).parent / "listings"
MAPS = [torch.linspace(-2, 2, 50, dtype=torch.float64).view(2, 5, 5).mul(i).exp().tril() for i in (1, 2)]


def test_the_acts_print_and_draw_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(acts, "saved_figure", partial(figures.kept, drawn))
    acts.save_pictures(Path("patterns.png"))
    names = ("tokens", "window", "growing", "nbytes", "nbytes_growing")
    sizes = [(64, 8, 64, 5000, 90_000), (128, 8, None, 7000, 180_000)]
    rows = [dict(zip(names, values, strict=True)) for values in sizes]
    lines = [
        acts.pictures(),
        acts.pictures(6, unicode=False, width=40),
        acts.kv_table(),
        acts.cache_table(rows),
    ]
    listings.check(LISTINGS / "acts.txt", "\n\n".join([*lines, *drawn, constants(acts)]))


def test_heads_are_told_and_drawn_as_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    monkeypatch.setattr(heads, "saved_figure", partial(figures.kept, drawn))
    maps = [weights / weights.sum(-1, keepdim=True) for weights in MAPS]
    heads.draw_heads(maps, list("abcde"), Path("heads.png"))
    wide = torch.ones(1, heads.LABELLED + 1, heads.LABELLED + 1)
    heads.draw_heads([wide], [], Path("wide.png"))
    measured, ways = heads.looks(maps), ("itself", "previous", "first", "back")
    looks = [
        f"{look['layer']} {look['head']} {' '.join(number(look[way]) for way in ways)}" for look in measured
    ]
    listings.check(
        LISTINGS / "heads.txt", "\n".join([*looks, heads.striking(measured), *drawn, constants(heads)])
    )


def learned(bits: float) -> learn.Learned:
    result: Any = SimpleNamespace(
        validation=SimpleNamespace(bits_per_byte=bits), seconds=99.6, trained_tokens=1_234_567
    )
    samples = [learn.Sample(20.4, 7, 3.25, "x\n\x1b y"), learn.Sample(61.2, 30, None, "z")]
    tokenizer: Any = None
    return learn.Learned(result, {"unigram": 4.5, "gzip": 2.0, "xz": 1.7}, tokenizer, samples)


def documents() -> Iterator[Document]:
    for n in range(12):
        yield Document(f"{n}.py", f"group{n}", "x" * (n + 1) * 5000)


def test_what_was_learned_is_told_and_drawn_as_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(learn, "saved_figure", partial(figures.kept, lines))
    text = Corpus("here", "held out by name", tuple(documents()), tuple(documents()))
    for bits in (1.6, 1.8, 2.1):
        result = learned(bits)
        assert result.below_gzip == (bits < 2.0)
        lines += [learn.verdict(result), learn.comparison(result, text), number(result.seconds)]
        learn.draw_bits(result, Path("bits.png"))
    lines += [learn.show(sample) for sample in result.samples]
    result.samples.clear()
    lines += [
        number(result.seconds),
        run.about(text),
        run.about(Corpus("a", "b", text.train[:1], text.train[:2])),
    ]
    for most in (1, 5000, 5001, 100_000):
        part = learn.smaller(text, most)
        lines.append(f"{most}: {len(part.train)} and {len(part.held_out)}, {part.rule}")
    lines += [run.title("Act 9"), run.title("a" * 94), run.next_commands(Path("runs/x"))]
    for quick in (False, True):
        config = learn.settings(Path("out"), 12.5, quick)
        lines.append(f"{quick}: {config.model_dump(exclude_defaults=True)}")
    learn.save_documents(text.train[:1], tmp_path / "new" / "a.jsonl")
    lines.append((tmp_path / "new" / "a.jsonl").read_text(encoding="utf-8")[:80])
    listings.check(
        LISTINGS / "learn.txt", "\n".join([*lines, constants(learn), constants(corpus), constants(run)])
    )
