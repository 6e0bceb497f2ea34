"""The rows of `headway bench serve --model minilm`: embeddings of texts of 5 to 500 tokens by `headway serve`, whose
clients send one text after the other, compared with sentence-transformers in this process, which gets all texts at
once.

The encoder has MiniLM's sizes, random weights and a vocabulary of made-up words; its limit is the register peak.
"""

import base64
import importlib
import json
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import Any

import numpy
import torch

from headway.api import Embedder
from headway.models import Encoder, Head, ModelSpec, build
from headway.models.cost import prefill_flops
from headway.text import Tokenizer
from headway_lab.bench.attention import Say
from headway_lab.bench.inputs import OURS, Problem, Side, UnsupportedCase
from headway_lab.bench.measure import Effort as Turns
from headway_lab.bench.measure import measured
from headway_lab.bench.rows import Row
from headway_lab.bench.serving import Effort, ours, served

MINILM = "minilm"
SIZES: Mapping[str, Any] = {"width": 384, "layers": 6, "heads": 12, "hidden": 1536, "trained_context": 512}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
SPEC = ModelSpec.of("bert", vocab=30522, **SIZES).with_head(Head("embed", pool="mean", unit=True))
WORDS = SPEC.vocab - len(SPECIAL)
PEER = "sentence-transformers"
LEAST_TEXTS = 32
"""Smallest number of texts in a row: fewer would not have mixed lengths."""


def embed(clients: Sequence[int], *, effort: Effort, say: Say) -> Iterator[Row]:
    """Yields a row for each number of clients."""
    turns = Turns(repeats=effort.rounds, least=effort.rounds, sample=0.0)
    with tempfile.TemporaryDirectory(prefix="headway-bench-") as folder, ExitStack() as servers:
        model = _written(Path(folder))
        port = cache(lambda: servers.enter_context(served(ours, model, 1, 0)))
        peer = cache(partial(_sentence_transformer, model))
        for count in clients:
            name = f"{MINILM} clients={count}"
            say(f"serve {name}")
            problem = partial(_problem, port, peer, count, max(LEAST_TEXTS, count * effort.each))
            row = measured("serve", name, "float32", problem, turns)
            if row.ours_ms is not None:
                rates = {OURS: row.extra["tokens_per_second"], **row.extra["peers_tokens_per_second"]}
                row.extra["figures"] = {side: {"tokens_per_second": rate} for side, rate in rates.items()}
            yield row


def _problem(port: Callable[[], int], theirs: Callable[[], Any], clients: int, count: int) -> Problem:
    draw = Random(count)
    sizes = [draw.randint(3, 498) for _ in range(count)]
    texts = [" ".join(f"w{draw.randrange(WORDS)}" for _ in range(size)) for size in sizes]
    lengths = [size + 2 for size in sizes]  # [CLS] and [SEP]
    work = sum(prefill_flops(SPEC, length) for length in lengths)
    problem = Problem({OURS: over_http(port(), texts, clients)}, work, tokens=sum(lengths))
    problem.add_peers({PEER: lambda: at_once(theirs(), texts)})
    return problem


def _written(folder: Path) -> Path:
    """Writes the encoder and returns its folder."""
    words = folder / "words"
    words.mkdir()
    (words / "vocab.txt").write_text("\n".join([*SPECIAL, *(f"w{i}" for i in range(WORDS))]))
    (words / "config.json").write_text('{"model_type": "bert"}')
    model = build(SPEC, seed=0).eval()
    assert isinstance(model, Encoder)
    Embedder(model, Tokenizer.load(words)).save(folder / "model")
    return folder / "model"


def _sentence_transformer(model: Path) -> Any:
    """Returns the encoder in sentence-transformers. Raises UnsupportedCase if that is not installed."""
    try:
        package = importlib.import_module("sentence_transformers")
    except ImportError as error:
        raise UnsupportedCase("it is not installed; pip install sentence-transformers") from error
    return package.SentenceTransformer(f"{model}", device="cpu")


# -- sides: the vectors of all texts, one per row ---------------------------------------------------------------------


def over_http(port: int, texts: Sequence[str], clients: int) -> Side:
    """Returns a side in which `clients` clients share the texts; each sends one after the other."""

    def vector(text: str) -> numpy.ndarray:
        body = json.dumps({"model": "model", "input": text, "encoding_format": "base64"}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/embeddings", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return numpy.frombuffer(base64.b64decode(json.load(answer)["data"][0]["embedding"]), "<f4")

    def side() -> Sequence[torch.Tensor]:
        with ThreadPoolExecutor(clients) as pool:
            return (torch.from_numpy(numpy.stack([*pool.map(vector, texts)])),)

    return side


def at_once(model: Any, texts: Sequence[str]) -> Side:
    """Returns a side that encodes all texts in one call of sentence-transformers, in its default batches."""
    return lambda: (model.encode(texts, convert_to_tensor=True, show_progress_bar=False),)
