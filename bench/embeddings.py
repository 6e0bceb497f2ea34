"""Embeddings of texts of mixed lengths: `headway serve`, asked by clients, beside sentence-transformers, which has all
texts at once.

    python bench/embeddings.py                                  # sentence-transformers of this environment
    python bench/embeddings.py --python PATH --clients 16 --turns 5 --threads 1

An encoder of MiniLM's sizes with random weights; each side is a process, and they take turns. `texts` are of 5 to 500
tokens. The largest difference of two vectors' numbers is told, so that nobody is fast by computing something else.
"""

from __future__ import annotations

import argparse
import base64
import json
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy

from headway.api import Embedder
from headway.models import Encoder, Head, ModelSpec, build
from headway.text import Tokenizer
from headway_lab.bench.serving import served

VOCAB = 30522
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
OTHER = """
import json, sys, time
import torch
torch.set_num_threads(int(sys.argv[2]))
from sentence_transformers import SentenceTransformer
model = SentenceTransformer(sys.argv[1], device="cpu")
for line in sys.stdin:
    texts, begin = json.loads(line), time.perf_counter()
    vectors = model.encode(texts, batch_size=32, show_progress_bar=False)
    print(json.dumps([time.perf_counter() - begin, vectors.tolist()]), flush=True)
"""


def write(folder: Path) -> Path:
    """The folder of the encoder."""
    words = folder / "words"
    words.mkdir()
    names = [*SPECIAL, *(f"w{i}" for i in range(VOCAB - len(SPECIAL)))]
    (words / "vocab.txt").write_text("\n".join(names))
    (words / "config.json").write_text('{"model_type": "bert"}')
    sizes: dict[str, Any] = {"width": 384, "layers": 6, "heads": 12, "hidden": 1536, "trained_context": 512}
    spec = ModelSpec.of("bert", vocab=VOCAB, **sizes).with_head(Head("embed", pool="mean", unit=True))
    model = build(spec, seed=0).eval()
    assert isinstance(model, Encoder)
    Embedder(model, Tokenizer.load(words)).save(folder / "model")
    return folder / "model"


def over_http(port: int, texts: Sequence[str], clients: int) -> tuple[float, numpy.ndarray]:
    """Seconds until all texts have their vectors, each asked for alone, and the vectors."""

    def ask(text: str) -> numpy.ndarray:
        body = json.dumps({"model": "model", "input": text, "encoding_format": "base64"}).encode()
        head = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/embeddings", body, head)
        with urllib.request.urlopen(request, timeout=300) as answer:
            vector = json.load(answer)["data"][0]["embedding"]
        return numpy.frombuffer(base64.b64decode(vector), "<f4")

    with ThreadPoolExecutor(clients) as pool:
        begin = time.perf_counter()
        vectors = list(pool.map(ask, texts))
        return time.perf_counter() - begin, numpy.stack(vectors)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    draw = Random(1)
    texts = [
        " ".join(f"w{draw.randrange(VOCAB - len(SPECIAL))}" for _ in range(draw.randint(3, 498)))
        for _ in range(args.texts)
    ]

    def command(file: Path, port: int, clients: int, context: int) -> list[str]:
        program = [sys.executable, "-m", "headway", "serve", f"{file}", "--port", f"{port}"]
        return [*program, "--threads", f"{args.threads}"]

    with TemporaryDirectory(prefix="headway-bench-") as folder:
        model = write(Path(folder))
        theirs = [args.python, "-c", OTHER, f"{model}", f"{args.threads}"]
        with (
            served(command, model, 1, 0) as port,
            subprocess.Popen(theirs, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other,
        ):
            assert other.stdin is not None
            assert other.stdout is not None
            ratios = []
            for turn in range(args.turns + 1):
                seconds, vectors = over_http(port, texts, args.clients)
                print(json.dumps(texts), file=other.stdin, flush=True)
                took, expected = json.loads(other.stdout.readline())
                error = abs(vectors - numpy.array(expected, dtype=numpy.float32)).max()
                if turn:  # the first one makes room
                    ratios.append(took / seconds)
                    sides = f"headway {seconds:.2f} s, sentence-transformers {took:.2f} s: {ratios[-1]:.2f}x"
                    print(f"{sides}; numbers differ by {error:.2g}", flush=True)
            print(f"median {statistics.median(ratios):.2f}x")
            other.stdin.close()


if __name__ == "__main__":
    main()
