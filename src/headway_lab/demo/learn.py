"""Act 2 of the demo: a tokenizer and a small model trained on real text, compared with compressors."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from headway.checkpoints.restore import as_decoder
from headway.data import Piece, TokenFile, encode_corpus
from headway.generate import GenerationConfig, Sampling, generate
from headway.models import cost
from headway.report import table
from headway.text import Tokenizer, train_bpe
from headway.train import Callback, CallbackContext, TextConfig, TrainResult, train
from headway.train.inputs import make_spec
from headway_lab.demo.corpus import Corpus, Document, gzip_bits, unigram_bits, xz_bits
from headway_lab.draw import BLUE, GREY, ORANGE, saved_figure

PROMPT = "class Reader:\n    def __init__(self, path"
SAMPLE_SECONDS, SAMPLE_TOKENS = 20.0, 48
SHARE_FOR_EVALUATION = 0.08
WORK = "work"

# The training settings of recipes/demo.yaml; a test checks that both agree.
SETTINGS: dict[str, Any] = {
    "family": "qwen3",
    "depth": 4,
    "width": 192,
    "heads": 4,
    "kv_heads": 2,
    "patterns": "Window.last(64); Causal()",
    "context": 256,
    "backend": "sdpa",
    "batch_tokens": 2048,
    "optimizer": "muon",
    "lr": 3e-2,
    "matrix_lr": 0.02,
    "lr_floor": 0.0,
    "weight_decay": 0.0,
}
VOCAB = 4096
QUICK = {**SETTINGS, "depth": 2, "width": 64, "context": 128, "batch_tokens": 1024}
QUICK["patterns"] = "Window.last(32); Causal()"
QUICK_VOCAB, QUICK_BYTES = 512, 300_000


# Bits per byte of the whole held-out text as one stream, without a model.
BASELINES = {"unigram": unigram_bits, "gzip": gzip_bits, "xz": xz_bits}


@dataclass(frozen=True)
class Sample:
    """The model's continuation of the prompt after `seconds` of training."""

    seconds: float
    step: int
    bits_per_byte: float | None
    text: str


@dataclass
class Learned:
    """The results of act 2. `baselines`: bits per byte by compressor name."""

    result: TrainResult
    baselines: dict[str, float]
    tokenizer: Tokenizer
    samples: list[Sample] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Seconds of training alone: the last sample is taken after the last step."""
        return self.samples[-1].seconds if self.samples else self.result.seconds

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte of the trained model on the held-out text."""
        bits = self.result.validation.bits_per_byte if self.result.validation else None
        assert bits is not None, "the held-out text has bytes"
        return bits

    @property
    def below_gzip(self) -> bool:
        return self.bits_per_byte < self.baselines["gzip"]


def prepare(corpus: Corpus, vocab: int, folder: Path) -> tuple[Tokenizer, TokenFile, TokenFile]:
    """Trains the tokenizer on the training text only, and encodes both parts into `folder`."""
    tokenizer = train_bpe((document.text for document in corpus.train), vocab)
    tokenizer.save(folder / "tokenizer")
    for name, documents in (("train", corpus.train), ("held-out", corpus.held_out)):
        pieces = (Piece(document.text, True, document.name) for document in documents)
        encode_corpus(pieces, tokenizer, folder / f"{name}.tokens")
    return tokenizer, TokenFile(folder / "train.tokens"), TokenFile(folder / "held-out.tokens")


def settings(out: Path, seconds: float, quick: bool) -> TextConfig:
    """Returns the configuration of the training run: `seconds` of wall time on the files that `prepare` wrote."""
    values = {
        **(QUICK if quick else SETTINGS),
        "data": str(out / WORK / "train.tokens"),
        "validation": str(out / WORK / "held-out.tokens"),
        "tokenizer": str(out / WORK / "tokenizer"),
        "out": str(out / WORK / "run"),
        "max_seconds": seconds,
        "log_every": 50,
    }
    return TextConfig.of(values, where="the demo's settings")


def learn(corpus: Corpus, out: Path, *, seconds: float, quick: bool, say: Callable[[str], None]) -> Learned:
    """Runs act 2 within about `seconds`: prepares, trains, samples, evaluates. Work files go to `out`/work."""
    began = time.monotonic()
    baselines = {name: bits(corpus.held_out_bytes) for name, bits in BASELINES.items()}
    tokenizer, train_file, held_file = prepare(corpus, QUICK_VOCAB if quick else VOCAB, out / WORK)
    say(
        f"tokenizer of {tokenizer.vocab_size} tokens: {train_file.text_bytes / len(train_file):.2f} bytes a token, "
        f"{len(train_file):,} tokens to train on, {len(held_file):,} held out "
        f"({time.monotonic() - began:.0f} s)"
    )
    training_seconds = max(3.0, seconds * (1 - SHARE_FOR_EVALUATION) - (time.monotonic() - began))
    samples: list[Sample] = []

    def take_sample(context: CallbackContext) -> None:
        samples.append(sample(context, tokenizer))
        say(show(samples[-1]))

    config = settings(out, training_seconds, quick)
    spec = make_spec(config, tokenizer.vocab_size)
    layers = "; ".join(dict.fromkeys(map(str, spec.patterns)))
    say(
        f"model of {cost.parameter_count(spec) / 1e6:.1f} M parameters: {spec.layers} layers of width {spec.width}, "
        f"{spec.heads} query heads on {spec.kv_heads} of keys and values, layers see {layers} in turn"
    )
    result = train(
        config, callbacks=[Callback(take_sample, every_seconds=min(SAMPLE_SECONDS, training_seconds / 2))]
    )
    return Learned(result, baselines, tokenizer, samples)


def sample(context: CallbackContext, tokenizer: Tokenizer) -> Sample:
    """Continues the prompt with the current model, with the same random numbers every time."""
    context_length = context.model.spec.trained_context
    ids = tokenizer.encode(PROMPT)[: context_length // 2]
    config = GenerationConfig(
        max_new_tokens=min(SAMPLE_TOKENS, context_length - len(ids)),
        sampling=Sampling(temperature=0.7),
        eos=() if tokenizer.eos is None else (tokenizer.eos,),
    )
    (generation,) = generate(as_decoder(context.model), [ids], config, tokenizer=tokenizer)
    return Sample(context.seconds, context.step, context.record.get("bits_per_byte"), generation.text)


def show(sample: Sample) -> str:
    """Returns a sample for a terminal: the prompt and its continuation, behind a bar."""
    bits = "" if sample.bits_per_byte is None else f", {sample.bits_per_byte:.2f} bits per byte in training"
    printable = "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in PROMPT + sample.text
    )
    text = "\n".join("    | " + line for line in printable.split("\n"))
    return f"  after {sample.seconds:.0f} s, step {sample.step}{bits}:\n{text}"


def comparison(learned: Learned, corpus: Corpus) -> str:
    """Returns a table of bits per byte of the held-out text, for a terminal."""
    base = learned.baselines
    trained = f"{learned.seconds:.0f} s of training on {corpus.train_bytes / 1e6:.1f} MB of other text"
    rows = [
        ("bytes one by one (entropy)", f"{base['unigram']:.3f}", ""),
        ("gzip -9", f"{base['gzip']:.3f}", "the whole held-out text as one stream"),
        ("xz -9e", f"{base['xz']:.3f}", "the whole held-out text as one stream"),
        ("this model", f"{learned.bits_per_byte:.3f}", trained),
    ]
    return table(("held-out text", "bits per byte", ""), rows)


def verdict(learned: Learned) -> str:
    """Returns a sentence that says whether the model is below gzip."""
    bits, gzip, xz = learned.bits_per_byte, learned.baselines["gzip"], learned.baselines["xz"]
    if learned.below_gzip:
        than_xz = "and below xz" if bits < xz else "but not below xz"
        return f"{bits:.3f} bits per byte: below gzip -9 ({gzip:.3f}) {than_xz} ({xz:.3f})"
    return (
        f"{bits:.3f} bits per byte: NOT below gzip -9 ({gzip:.3f}); this machine trained too little in the time it "
        "had; --seconds gives it more"
    )


def draw_bits(learned: Learned, path: Path) -> None:
    """Draws the comparison as bars."""
    names = ["bytes one by one", "gzip -9", "xz -9e", "this model"]
    bits = [*learned.baselines.values(), learned.bits_per_byte]
    colours = [GREY, GREY, GREY, ORANGE if learned.below_gzip else BLUE]
    with saved_figure(path, 7.5, 2.8) as figure:
        axes = figure.subplots()
        bars = axes.barh(names, bits, color=colours, height=0.62)
        axes.bar_label(bars, [f"{value:.3f}" for value in bits], padding=4)
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        title = f"{learned.result.trained_tokens:,} tokens trained in {learned.seconds:.0f} s"
        label = "bits per byte of held-out text (less is better)"
        axes.set(title=title, xlabel=label, xlim=(None, max(bits) * 1.12))


def smaller(corpus: Corpus, most: int) -> Corpus:
    """Returns a corpus of about `most` bytes of training text and an eighth of that held out, for `--quick`."""
    train, held_out = _first(corpus.train, most), _first(corpus.held_out, most // 8)
    return Corpus(corpus.source, corpus.rule + ", in part", train, held_out)


def _first(documents: tuple[Document, ...], most: int) -> tuple[Document, ...]:
    sizes = accumulate(len(document.text.encode()) for document in documents)
    return documents[: 1 + sum(size < most for size in sizes)]


def save_documents(documents: tuple[Document, ...], path: Path) -> None:
    """Writes one JSON object per line: {"name": .., "text": ..}."""
    lines = (json.dumps({"name": document.name, "text": document.text}) + "\n" for document in documents)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(lines), encoding="utf-8")
