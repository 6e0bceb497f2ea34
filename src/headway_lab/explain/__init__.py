"""Questions about attention, each answered by a run.

A topic is a module of its name, or a row of `contests.CONTESTS`, with

    FORMULA                                what is verified, as text
    run() -> Report                        measures; writes nothing; deterministic for its seeds
    draw(figure, report) -> None           paints the report on a matplotlib figure

`explain(topic, out)` runs it and, when `out` is given, writes `out/TOPIC.csv` (the table) and `out/TOPIC.png`.
"""

import csv
import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from headway.errors import ConfigError, did_you_mean
from headway_lab.explain.report import Report

TOPICS = {
    "scale": "Why are the scores divided by the square root of the head's width?",
    "masks": "Does a mask keep the future out? The four patterns, drawn",
    "permutation": "Does attention know the order of its tokens?",
    "heads": "What do heads share in MHA, GQA and MQA, and what does it save?",
    "cache": "What does the KV cache save, and does it change the result?",
    "memory": "Why does attention eat memory, and what does a window change?",
    "multi-head": "Why several heads? One head has one place to look at",
    "sinusoids": "What do sinusoids tell of positions and distances?",
    "embedding": "Why are embeddings multiplied by the square root of the width?",
    "rotary-identity": "Why do vectors turned by absolute positions give scores of relative ones?",
    "rotary-forms": "Are the printed ways of turning the same, and what does each cost?",
    "rotary-expansion": "What does the second term of a turned product mean, and does it decay without it?",
    "rotary-decay": "Do rotary positions make far tokens matter less?",
    "rotary-frequencies": "Why d/2 angles instead of one, and does any other choice of them decay?",
    "rotary-values": "Why are values not turned?",
    "rotary-shift": "All positions moved by 1000 change the output a little: is rotary not invariant?",
    "rotary-linear": "What breaks when linear attention turns queries and keys in its denominator too?",
    "norms": "What do BatchNorm, LayerNorm and RMSNorm average over?",
    "residual-order": "Norm before or after the residual: what happens to the gradients of a deep stack?",
    "swish": "What is Swish between beta = 0 and beta = infinity?",
    "complexity": "Why self-attention? Operations, sequential steps and path lengths of four kinds of layer",
    "receptive-field": "How far does a stack of windows see?",
    "positions": "Over one switch, at equal budgets: which marks of positions does a small model learn best with?",
    "extrapolation": "Which marks of positions bear rows longer than those of training?",
    "rotary-layers": "What is lost when only some layers turn?",
    "rotary-switches": "What do other frequencies, and turned values, do to a model trained on text?",
    "rotary-trained": "Do rotary frequencies that are trained move, and is it worth it?",
    "blocks": "What is different between the Transformer of 2017 and LLaMA, and what does each difference do?",
    "adapters": "What does an adapter of low rank train, and does merging it change the model?",
    "packing": "What does padding waste, and do packed examples see each other?",
    "linear-training": "Does a model with linear attention and rotary positions train, and at what cost per token?",
}


def find_topic(name: str) -> Any:
    """The module or the contest of that name. Raises ConfigError for a name that does not exist."""
    if name not in TOPICS:
        raise ConfigError(f"no topic {name!r}{did_you_mean(name, TOPICS)}; topics are {', '.join(TOPICS)}")
    from headway_lab.explain.contests import CONTESTS

    return CONTESTS.get(name) or importlib.import_module(f"headway_lab.explain.{name.replace('-', '_')}")


def explain(name: str, out: Path | None = None) -> Report:
    """Run one topic. With `out`, write `out/TOPIC.csv` and `out/TOPIC.png` too.

    Raises ConfigError for a topic that does not exist."""
    topic = find_topic(name)
    report: Report = replace(topic.run(), topic=name, question=TOPICS[name], formula=topic.FORMULA)
    if out is None:
        return report
    from headway.draw import saved_figure

    out.mkdir(parents=True, exist_ok=True)
    table_path, figure_path = out / f"{name}.csv", out / f"{name}.png"
    with table_path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([report.columns, *report.cells])
    with saved_figure(figure_path) as figure:
        topic.draw(figure, report)
    return replace(report, figure=figure_path, csv=table_path)
