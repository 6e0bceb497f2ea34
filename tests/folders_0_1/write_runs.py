"""Writes `trained/`: runs that were interrupted, and what they came to when they went on. See README.md."""

import json
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Mapping
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

import torch

from headway.checkpoints import save_folder
from headway.data import encode_corpus
from headway.models import ModelSpec
from headway.patterns import parse
from headway.positions import Rotary
from headway.train import Interrupted, TrainConfig, loop, train
from headway.train.hooks import Every, Moment
from headway.train.sources import read_settings
from headway.train.translation import _Translation, train_translation
from headway.train.translation_config import TranslationConfig
from tests.folders_0_1.common import HERE, kernels
from tests.folders_0_1.words import WORDS, words
from tests.folders_0_1.write_models import SIZE, drawn

COMMON: dict[str, Any] = {"out": "run", "steps": 6, "keep_last": 1, "log_every": 1, "threads": 1}
SMALL = {**COMMON, "context": 16, "batch_tokens": 96, "width": 8, "heads": 2, "hidden": 8}
STOP = 3  # steps that were done when the run was interrupted


def interrupt(moment: Moment) -> None:
    if moment.step == STOP - 1:  # the signal is looked at behind the next step
        os.kill(os.getpid(), signal.SIGINT)


def texts(count: int, seed: int) -> list[str]:
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(3, 20))) for _ in range(count)]


def write_text(path: Path, seed: int) -> None:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts(40, seed)), "utf-8")


def causal() -> Mapping[str, Any]:
    """Windows, held-out text, micro batches side by side, AdamW, samples."""
    write_text(Path("text.jsonl"), 1)
    words().save(Path("words"))
    return {
        **SMALL, "data": "text.jsonl", "tokenizer": "words", "validation_share": 0.2, "depth": 2, "kv_heads": 1,
        "patterns": "Window.last(4); Causal()", "micro_batch": 2, "workers": 2, "eval_every": 2, "dtype": "fp32",
        "lr": 0.05, "warmup": 0.5, "sample_prompts": ["one"], "sample_tokens": 3,
    }  # fmt: skip


def masked() -> Mapping[str, Any]:
    """An encoder with dropout, so that torch's generator is part of the state, on a tokenizer that was given."""
    write_text(Path("text.jsonl"), 2)
    words().save(Path("words"))
    return {
        **SMALL, "data": "text.jsonl", "tokenizer": "words", "family": "roformer", "depth": 1, "dropout": 0.2,
        "objective": "masked-lm", "mask_share": 0.3, "pack": False, "dtype": "fp32", "weight_decay": 0.0, "lr": 0.05,
    }  # fmt: skip


def muon() -> Mapping[str, Any]:
    """Token files; Muon over fp32 weights, products in bfloat16; blocks computed again; an epoch that does not end
    with a whole step."""
    words().save(Path("words"))
    for name, seed in {"text": 3, "held": 4}.items():
        write_text(Path("text.jsonl"), seed)
        encode_corpus("text.jsonl", words(), Path(f"{name}.tokens"), bos=True, eos=True)
    Path("text.jsonl").unlink()
    return {
        **SMALL | {"steps": None}, "data": "text.tokens", "validation": "held.tokens", "tokenizer": "words",
        "family": "qwen3", "depth": 2, "optimizer": "muon", "matrix_lr": 0.05, "gradient_checkpointing": True,
        "dtype": "bf16", "epochs": 2, "lr": 0.03, "micro_batch": 4, "clip": 0.5, "beta2": 0.99, "lr_floor": 0.0,
    }  # fmt: skip


def continued() -> Mapping[str, Any]:
    """From a model folder that no family can say, with trained rotary frequencies and a sink."""
    write_text(Path("text.jsonl"), 5)
    spec = ModelSpec.of(
        "llama", **SIZE, patterns=parse("Causal() & (Window.last(4) | Sink(2))"), attention_dropout=0.1,
        positions=Rotary(pairing="adjacent", schedule="linear", trainable=True),
    )  # fmt: skip
    save_folder(Path("start"), drawn(spec, 9), tokenizer=words(), keep_pairing=True)
    return {
        **COMMON, "context": 16, "batch_tokens": 96, "data": "text.jsonl", "model": "start", "dtype": "fp32",
        "micro_batch": 2, "seed": 5,
    }  # fmt: skip


def translation() -> Mapping[str, Any]:
    """Pairs of sentences on a byte-level BPE of their own, with dropout and smoothing."""
    sentences = [text.split()[:6] for text in texts(30, 6)]
    Path("a.en").write_text("".join(" ".join(s) + "\n" for s in sentences), "utf-8")
    Path("a.de").write_text("".join(" ".join(w.title() for w in s[::-1]) + "\n" for s in sentences), "utf-8")
    return {
        **COMMON, "source": "a.en", "target": "a.de", "validation_source": "a.de", "validation_target": "a.en",
        "vocab": 258, "layers": 1, "width": 8, "heads": 2, "hidden": 8, "context": 40, "batch_tokens": 200,
        "dtype": "fp32", "warmup": 4, "lr_scale": 0.3, "dropout": 0.1, "eval_every": 2,
    }  # fmt: skip


RUNS = {f.__name__: f for f in (causal, masked, muon, continued)}


def interrupted_translation(config: TranslationConfig) -> None:
    plain = _Translation.step

    def step(run: _Translation) -> dict[str, Any]:
        if run.state.progress.step == STOP - 1:
            os.kill(os.getpid(), signal.SIGINT)
        return plain(run)

    _Translation.step = step  # type: ignore[method-assign]
    try:
        train_translation(config, quiet=True)
    finally:
        _Translation.step = plain  # type: ignore[method-assign]


def write_run(name: str) -> None:
    """The interrupted run, and beside it what today's code makes of it."""
    here = HERE / "trained" / name
    with tempfile.TemporaryDirectory() as scratch:
        with chdir(scratch), suppress(Interrupted):
            if name == "translation":
                interrupted_translation(TranslationConfig.of(translation()))
            else:
                train(TrainConfig.of(RUNS[name]()), callbacks=[Every(interrupt, steps=1)], quiet=True)
        shutil.copytree(scratch, here)
        with chdir(scratch):
            if name == "translation":
                train_translation(
                    read_settings(TranslationConfig, "run/config.yaml"), resume="auto", quiet=True
                )
            else:
                train(read_settings(TrainConfig, "run/config.yaml"), resume="auto", quiet=True)
        (here / "expected").mkdir()
        shutil.copy(Path(scratch, "run", "metrics.jsonl"), here / "expected")
        for file in ("config.json", "model.safetensors"):
            shutil.copy(Path(scratch, "run", "final", file), here / "expected")


def write_runs() -> None:
    shutil.rmtree(HERE / "trained", ignore_errors=True)
    loop.gemm_peak = lambda dtype: 1e12  # type: ignore[assignment]  # measuring takes a second, and is not compared
    for name in (*RUNS, "translation"):
        write_run(name)
    (HERE / "trained" / "kernels.json").write_text(json.dumps(kernels()) + "\n", "utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_runs()
