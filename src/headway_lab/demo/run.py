"""Runs the three acts in order, and writes the output folder."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.api import LanguageModel, load
from headway.errors import ConfigError
from headway.models import Decoder
from headway.report import plain
from headway.train import Interrupted
from headway_lab.bench.rows import to_text
from headway_lab.demo import acts, heads, learn
from headway_lab.demo.corpus import Corpus, standard_library

REPORT, HELD_OUT = "demo.json", Path("text") / "held-out.jsonl"
Say = Callable[[str], None]


def demo(
    out: Path,
    *,
    corpus: Corpus | None = None,
    seconds: float = 150.0,
    quick: bool = False,
    say: Say,
    unicode: bool = True,
) -> dict[str, Any]:
    """Runs the three acts, reporting through `say`; returns the content of `out`/demo.json.

    Args:
        out: the output folder: a Hugging Face model folder with metrics.jsonl, loss.png, patterns.png, bits.png,
            heads.png, samples.txt, text/ (training and held-out text) and demo.json. The files of an earlier demo are
            replaced.
        corpus: the text; Python's standard library by default.
        seconds: length of act 2.
        quick: a small model on a small part of the text, to see that everything runs.
        say: prints a line.
        unicode: whether `say` can print the Unicode marks of the pictures.
    Raises:
        ConfigError: `out` has files that no demo has written.
        DataError: the standard library does not exist as files.
        Interrupted: Ctrl-C; the training state is saved, everything else is removed.
    """
    began = time.monotonic()
    corpus = standard_library() if corpus is None else corpus
    _clear(out)
    try:
        report = _acts(out, corpus, seconds=seconds, quick=quick, say=say, unicode=unicode)
    except Interrupted:
        raise  # the training state stays in the work folder, to resume from
    except BaseException:
        shutil.rmtree(out / learn.WORK, ignore_errors=True)
        raise
    report["seconds"] = time.monotonic() - began
    _write(out, report)
    shutil.rmtree(out / learn.WORK)
    return report


def _acts(
    out: Path, corpus: Corpus, *, seconds: float, quick: bool, say: Say, unicode: bool
) -> dict[str, Any]:
    say(title("Act 1: what each token may see, and what it costs"))
    say(acts.pictures(unicode=unicode))
    say(f"\nkeys and values of one row of {acts.SHAPE}'s shape, bf16:\n\n{acts.kv_table()}")
    acts.save_pictures(out / "patterns.png")
    say(f"\n  drawn in {out / 'patterns.png'}")

    say(title(f"Act 2: a model in {seconds:.0f} seconds"))
    if quick:
        corpus = learn.smaller(corpus, learn.QUICK_BYTES)
    say(about(corpus) + "\n")
    learned = learn.learn(corpus, out, seconds=seconds, quick=quick, say=say)
    _keep(out, corpus, learned)
    say("\n" + learn.comparison(learned, corpus))
    toy = "--quick: a toy on a part of the text; the figures mean nothing"
    say(f"\n  {toy if quick else learn.verdict(learned)}")

    lm = load(out, task="causal-lm", dtype=torch.float32)
    ids = learned.tokenizer.encode(corpus.held_out[0].text[:4000])[: lm.spec.trained_context]
    start = learned.tokenizer.encode(learn.PROMPT)[: heads.LABELLED]
    report = _heads(lm, ids, start, out / "heads.png", say)

    say(title("Act 3: why to trust it"))
    report |= _trust(lm.model, torch.tensor([ids]), quick, say)
    return {
        "state": "done",
        "corpus": {"source": corpus.source, "rule": corpus.rule, "train_bytes": corpus.train_bytes,
                   "held_out_bytes": len(corpus.held_out_bytes)},
        "bits_per_byte": {"model": learned.bits_per_byte, **learned.baselines},
        "below_gzip": learned.below_gzip,
        "verdict": learn.verdict(learned),
        "trained": {"seconds": learned.seconds, "steps": learned.result.steps,
                    "tokens": learned.result.trained_tokens},
        **report,
    }  # fmt: skip


def _heads(lm: LanguageModel, ids: list[int], start: list[int], path: Path, say: Say) -> dict[str, Any]:
    rows = heads.looks([layer.weights() for layer in lm.attention(ids).values()])
    maps = lm.attention(start)
    heads.draw_heads(
        [layer.weights() for layer in maps.values()], [shown(text) for text in maps[0].keys], path
    )
    say(f"\nheads look at different things (on held-out text; drawn in {path}):\n\n{heads.striking(rows)}")
    return {"heads": plain(rows)}


def shown(text: str) -> str:
    """Returns a token's text as a label: spaces and line ends are made visible, and characters that a plot's font may
    lack become boxes."""
    marks = {" ": "·", "\n": "¶"}
    return "".join(marks.get(c) or (c if c.isprintable() and ord(c) < 0x0500 else "□") for c in text)


def _trust(model: Decoder, ids: Tensor, quick: bool, say: Say) -> dict[str, Any]:
    say("cached decode = one full forward, on held-out text, in uneven chunks and then token by token:\n")
    equal = [acts.cached_equals_full(model, ids, dtype) for dtype in (torch.float32, torch.float64)]
    for result in equal:
        figures = "largest difference {difference:.1e} ({tokens} tokens, logits up to {largest:.1f})"
        say(f"  {result['dtype']}: {figures.format(**result)}")

    window = min(p.reach[0] + 1 for p in model.spec.patterns if p.reach[0] is not None)
    say(f"\nthe pages of a layer with window {window} stay as few as they are, however long the text:\n")
    sizes = acts.cache_sizes(model, window)
    say(acts.cache_table(sizes))

    row = acts.time_window(2048 if quick else 8192, 1 if quick else 3)
    say(f"\na causal window, as `headway bench attention` measures it:\n\n{to_text([row])}")
    say(f"\n  {row.ratios['mask']:.1f} times as fast as torch with a mask, here and now, for equal results")
    return {
        "cached_equals_full": plain(equal),
        "cache_sizes": plain(sizes),
        "window": plain(row.to_json()),
    }


def title(text: str) -> str:
    """Returns the heading line of an act."""
    return f"\n== {text} {'=' * max(4, 96 - len(text))}\n"


def about(corpus: Corpus) -> str:
    """Returns a line or two about the training text and the held-out text."""
    groups = sorted({document.group for document in corpus.held_out if document.group})
    names = f" ({', '.join(groups[:8])}{', ..' if len(groups) > 8 else ''})" if groups else ""
    return (
        f"text: {corpus.source}: {len(corpus.train)} files, {corpus.train_bytes / 1e6:.1f} MB to train on; "
        f"{len(corpus.held_out_bytes) / 1e6:.2f} MB {corpus.rule}{names}"
    )


def next_commands(out: Path) -> str:
    """Returns commands to try next on the folder."""
    lines = [
        ("headway generate", f"{out} 'def '", "continue a prompt"),
        ("headway inspect", f"{out}", "what this model is"),
        ("headway plan", "llama-2-7b --context 32768", "what another one would cost here"),
        ("headway eval", f"{out} --data {out / HELD_OUT}", "the bits per byte again"),
        ("headway explain", "masks --out runs/explain", "the next question"),
    ]
    width = max(len(f"{command} {arguments}") for command, arguments, _ in lines)
    return "\n".join(f"  {f'{command} {arguments}':<{width}}   # {why}" for command, arguments, why in lines)


def _keep(out: Path, corpus: Corpus, learned: learn.Learned) -> None:
    """Moves the files to keep from the work folder to their places."""
    for path in sorted(learned.result.model.iterdir()):
        shutil.move(path, out / path.name)
    shutil.move(learned.result.metrics, out / "metrics.jsonl")
    if learned.result.curve is not None:
        shutil.move(learned.result.curve, out / "loss.png")
    learn.save_documents(corpus.train, out / "text" / "train.jsonl")
    learn.save_documents(corpus.held_out, out / HELD_OUT)
    learn.draw_bits(learned, out / "bits.png")
    (out / "samples.txt").write_text(
        "\n\n".join(learn.show(s) for s in learned.samples) + "\n", encoding="utf-8"
    )


def _clear(out: Path) -> None:
    """Empties and creates `out`. Raises ConfigError if it has files that no demo has written."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a folder")
    if out.exists() and any(out.iterdir()):
        if not (out / REPORT).exists():
            raise ConfigError(f"--out {out} holds files that no demo has written; give another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    _write(out, {"state": "not finished"})


def _write(out: Path, report: dict[str, Any]) -> None:
    (out / REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
