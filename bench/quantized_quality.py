r"""What weights of 8 and 4 bits cost a trained model: KL to the model as it is, perplexity and bytes, beside
llama.cpp's q8_0 and q4_0 of the same weights.

    headway train --data TEXT --validation-share 0.02 --vocab 8192 --depth 8 --width 512 --heads 8 --kv-heads 4 \
        --hidden 1408 --no-tied --context 512 --batch-tokens 4096 --steps 600 --dtype bf16 --out runs/32m
    python bench/quantized_quality.py runs/32m/final --data HELD-OUT-TEXT --calibrate TEXT

Every side reads the same rows. KL is the mean over the predicted tokens of KL(p || q), p the model in float32. The
sides of llama.cpp need llama-cpp-python, and are left out, which is said, where it is not there. Bytes are those of
tensors, of GGUF files their own.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints import change_pairing, load_folder, load_model
from headway.checkpoints.folder import Folder
from headway.checkpoints.formats.gguf.model import write_model
from headway.models.cost import weight_bytes
from headway.report import table
from headway.storage.gguf_blocks import BF16, Q4_0, Q8_0
from headway.surgery import Text, quantize_folder
from headway_lab.bench.inputs import UnsupportedCase
from headway_lab.bench.llama_cpp import LlamaCpp

Score = Callable[[Tensor], Tensor]
"""Ids [T] -> logits [T, V]."""


def of_headway(path: Path, dtype: torch.dtype | None = None) -> Score:
    model = load_model(path, dtype=dtype).eval()

    def score(ids: Tensor) -> Tensor:
        with torch.inference_mode():
            return model(ids[None], logits_for=torch.ones(1, len(ids), dtype=torch.bool)).float()

    return score


def of_llama_cpp(path: Path, context: int, stack: ExitStack) -> Score:
    model = LlamaCpp(path, 1, context)
    stack.callback(model.close)
    return lambda ids: model.read(ids.tolist(), every=True)


def sides(
    folder: Folder, calibrate: Path | None, context: int, work: Path, stack: ExitStack
) -> Iterator[tuple[str, int, Score]]:
    """Name, bytes and logits of every side."""
    output = not folder.spec.tied
    yield (
        "headway bf16",
        weight_bytes(folder.spec),
        of_headway(folder.path, torch.bfloat16),
    )
    for weights in ("int8", "int4"):
        for how in ("nearest", "GPTQ") if calibrate else ("nearest",):
            text = stack.enter_context(Text.read(calibrate, folder)) if calibrate and how == "GPTQ" else None
            target = work / f"{weights}-{how}"
            done = quantize_folder(folder, target, weights, output=output, calibrate=text, context=context)
            yield f"headway {weights}, {how}", done.after.stored_bytes, of_headway(target)
    state, spec = change_pairing(folder.tensors, folder.spec, "adjacent")
    for name, kind in (("bf16", BF16), ("q8_0", Q8_0), ("q4_0", Q4_0)):
        path = work / f"{name}.gguf"
        write_model(path, spec, state, kind)
        try:
            yield f"llama.cpp {name}", path.stat().st_size, of_llama_cpp(path, context, stack)
        except UnsupportedCase as why:
            print(f"llama.cpp {name} is left out: {why}", flush=True)


def rows_of(text: Text, context: int, limit: int) -> list[Tensor]:
    ids = torch.from_numpy(text.file.tokens[:limit].astype("int64"))
    return [row for row in ids.split(context) if len(row) > 1]


def compared(right: Score, other: Score, rows: Sequence[Tensor]) -> tuple[float, float]:
    """(nats per token of `other`, KL from `right` to it)."""
    nats, kl, count = 0.0, 0.0, 0
    for row in rows:
        p, q = (score(row)[:-1].log_softmax(-1).double() for score in (right, other))
        nats -= float(q.gather(1, row[1:, None]).sum())
        kl += float((p.exp() * (p - q)).sum())
        count += len(row) - 1
    return nats / count, kl / count


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a trained model")
    parser.add_argument("--data", type=Path, required=True, help="held-out text")
    parser.add_argument("--calibrate", type=Path, help="text for GPTQ [default: the nearest codes alone]")
    parser.add_argument("--context", type=int, default=512, help="tokens of a row")
    parser.add_argument("--limit", type=int, default=32768, help="tokens of the text")
    given = parser.parse_args()
    folder = load_folder(given.folder)
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="headway-") as work, ExitStack() as stack:
        rows = rows_of(stack.enter_context(Text.read(given.data, folder)), given.context, given.limit)
        right = of_headway(folder.path, torch.float32)
        nats, _ = compared(right, right, rows)
        found.append({"side": "headway float32", "MB": None, "perplexity": math.exp(nats), "KL": 0.0})
        for name, size, score in sides(folder, given.calibrate, given.context, Path(work), stack):
            nats, kl = compared(right, score, rows)
            found.append({"side": name, "MB": size / 1e6, "perplexity": math.exp(nats), "KL": kl})
            print(json.dumps(found[-1]), flush=True)
    print(table(tuple(found[0]), [list(one.values()) for one in found]))
    print(f"{sum(len(row) - 1 for row in rows)} predicted tokens of {given.data}, rows of {given.context}")


if __name__ == "__main__":
    main()
