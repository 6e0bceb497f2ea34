"""Questions about attention, each answered by a run.

A topic is a module with two functions:

    run() -> Report                        measures; writes nothing; deterministic for its seeds
    draw(figure, report) -> None           paints the report on a matplotlib figure

`explain(topic, out)` runs it and, when `out` is given, writes `out/TOPIC.csv` (the table) and
`out/TOPIC.png`. A mechanism has landed when its topic exists.
"""

import csv
import importlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, did_you_mean
from headway.report import plain, table

TOPICS: dict[str, tuple[str, str]] = {
    "scale": (
        "headway_lab.explain.scale",
        "Why are the scores divided by the square root of the head's width?",
    ),
    "masks": (
        "headway_lab.explain.masks",
        "Does a mask keep the future out? The four patterns, drawn",
    ),
    "order": ("headway_lab.explain.permutation", "Does attention know the order of its tokens?"),
    "heads": (
        "headway_lab.explain.heads",
        "What do heads share in MHA, GQA and MQA, and what does it save?",
    ),
    "cache": ("headway_lab.explain.cache", "What does the KV cache save, and does it change the result?"),
    "memory": ("headway_lab.explain.memory", "Why does attention eat memory, and what does a window change?"),
    "channels": ("headway_lab.explain.multi_head", "Why several heads? One head has one place to look at"),
    "sinusoids": ("headway_lab.explain.sinusoids", "What do sinusoids tell of positions and distances?"),
    "embedding": (
        "headway_lab.explain.embedding",
        "Why are embeddings multiplied by the square root of the width?",
    ),
    "rotary-identity": (
        "headway_lab.explain.rotary_identity",
        "Why do vectors turned by absolute positions give scores of relative ones?",
    ),
    "rotary-forms": (
        "headway_lab.explain.rotary_forms",
        "Are the printed ways of turning the same, and what does each cost?",
    ),
    "rotary-expansion": (
        "headway_lab.explain.rotary_expansion",
        "What does the second term of a turned product mean, and does it decay without it?",
    ),
    "rotary-decay": ("headway_lab.explain.rotary_decay", "Do rotary positions make far tokens matter less?"),
    "rotary-frequencies": (
        "headway_lab.explain.rotary_frequencies",
        "Why d/2 angles instead of one, and does any other choice of them decay?",
    ),
    "rotary-values": ("headway_lab.explain.rotary_values", "Why are values not turned?"),
    "rotary-shift": (
        "headway_lab.explain.rotary_shift",
        "All positions moved by 1000 change the output a little: is rotary not invariant?",
    ),
    "rotary-linear": (
        "headway_lab.explain.rotary_linear",
        "What breaks when linear attention turns queries and keys in its denominator too?",
    ),
    "norms": ("headway_lab.explain.norms", "What do BatchNorm, LayerNorm and RMSNorm average over?"),
    "residual-order": (
        "headway_lab.explain.residual_order",
        "Norm before or after the residual: what happens to the gradients of a deep stack?",
    ),
    "swish": ("headway_lab.explain.swish", "What is Swish between beta = 0 and beta = infinity?"),
    "complexity": (
        "headway_lab.explain.complexity",
        "Why self-attention? Operations, sequential steps and path lengths of four kinds of layer",
    ),
    "field": ("headway_lab.explain.receptive_field", "How far does a stack of windows see?"),
    "positions": (
        "headway_lab.explain.positions",
        "Over one switch, at equal budgets: which marks of positions does a small model learn best with?",
    ),
    "extrapolation": (
        "headway_lab.explain.extrapolation",
        "Which marks of positions bear rows longer than those of training?",
    ),
    "rotary-layers": ("headway_lab.explain.rotary_layers", "What is lost when only some layers turn?"),
    "rotary-switches": (
        "headway_lab.explain.rotary_switches",
        "What do other frequencies, and turned values, do to a model trained on text?",
    ),
    "rotary-trained": (
        "headway_lab.explain.rotary_trained",
        "Do rotary frequencies that are trained move, and is it worth it?",
    ),
    "blocks": (
        "headway_lab.explain.blocks",
        "What is different between the Transformer of 2017 and LLaMA, and what does each difference do?",
    ),
    "linear-training": (
        "headway_lab.explain.linear_training",
        "Does a model with linear attention and rotary positions train, and at what cost per token?",
    ),
}

Cell = float | int | str | bool | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """An answer by a run.

    topic      name in TOPICS
    question   one sentence
    formula    the formulas that are checked, as text, one a line
    columns    names of the table's columns, units in parentheses
    rows       the numbers
    seen       whether the run shows what the formula says
    setting    sizes and seeds of the run: "d = 4..512, 3 seeds"
    finding    what was found, with numbers, in one or two sentences
    highlight  rows that a terminal shows (by index); empty = all of them
    picture    text that belongs to the answer (a pattern drawn, for example)
    figure     where the figure was written, csv where the table was; None when nothing was written
    """

    topic: str
    question: str
    formula: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    seen: bool
    setting: str
    finding: str
    highlight: tuple[int, ...] = ()
    picture: str = ""
    figure: Path | None = None
    csv: Path | None = None

    def __post_init__(self) -> None:
        assert all(len(row) == len(self.columns) for row in self.rows), f"{self.topic}: a row misses a column"

    @property
    def verdict(self) -> str:
        """ "seen" or "not seen" at this size, with these seeds; a run of this size refutes nothing."""
        return f"{'seen' if self.seen else 'not seen'} at this size ({self.setting}): {self.finding}"

    def column(self, name: str) -> list[Any]:
        """The values of one column."""
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def to_text(self) -> str:
        """The report for a terminal."""
        rows = [self.rows[i] for i in self.highlight] or list(self.rows)
        parts = [f"{self.topic}: {self.question}", indent(self.formula), table(self.columns, rows)]
        if len(rows) < len(self.rows):
            parts[-1] += f"\n  ({len(rows)} of {len(self.rows)} rows; all of them with --out or --json)"
        if self.picture:
            parts.append(indent(self.picture))
        parts.append(f"verdict: {self.verdict}")
        written = [str(path) for path in (self.figure, self.csv) if path]
        if written:
            parts.append("written: " + ", ".join(written))
        return "\n\n".join(parts)

    def to_json(self) -> dict[str, Any]:
        """The report in JSON's types, `verdict` included."""
        return {**plain(self), "verdict": self.verdict}


def indent(text: str, by: str = "  ") -> str:
    """Every line of `text` moved right."""
    return "\n".join(by + line if line else line for line in text.splitlines())


def explain(topic: str, out: Path | None = None) -> Report:
    """Run one topic. With `out`, write `out/TOPIC.csv` and `out/TOPIC.png` too.

    Raises ConfigError for a topic that does not exist."""
    if topic not in TOPICS:
        raise ConfigError(f"no topic {topic!r}{did_you_mean(topic, TOPICS)}; topics are {', '.join(TOPICS)}")
    module = importlib.import_module(TOPICS[topic][0])
    report: Report = module.run()
    if out is None:
        return report
    from headway.draw import saved_figure

    out.mkdir(parents=True, exist_ok=True)
    table_path, figure_path = out / f"{topic}.csv", out / f"{topic}.png"
    with table_path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([report.columns, *report.rows])
    with saved_figure(figure_path) as figure:
        module.draw(figure, report)
    return replace(report, figure=figure_path, csv=table_path)
