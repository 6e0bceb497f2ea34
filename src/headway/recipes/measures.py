"""What a finished stage is measured by."""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

import headway
from headway.generate import GenerationConfig, generate
from headway.models import Decoder, cost
from headway.recipes.surgery import opened
from headway.train.checkpoint import FINAL
from headway.train.config import TrainConfig
from headway.train.metrics import METRICS, read_metrics
from headway.train.microbatch_pool import DTYPES, choose_precision

ROWS, NEW_TOKENS, TIMES = 8, 16, 5


def measures(folder: Path, config: TrainConfig, decode: int | None) -> dict[str, Any]:
    """What a finished run measured: its last step's, the last held-out ones (`val_..`), those before the first step
    (`start_..`), the median speed, and what its model is; of decoders, with `decode`, the speed behind such prompts."""
    lines = read_metrics(folder / METRICS)
    steps = [line for line in lines if "loss" in line]
    last = steps[-1] if steps else {}
    names = ("loss", "accuracy", "bits_per_byte", "trained_tokens", "seconds")
    found: dict[str, Any] = {"steps": last.get("step", 0)} | {n: last[n] for n in names if n in last}
    if steps:
        found["tokens_per_s"] = statistics.median(line["tokens_per_s"] for line in steps)
    for line in lines:
        held = {name: value for name, value in line.items() if name.startswith("val_")}
        found |= held
        if line.get("step") == 0:
            found |= {f"start_{name.removeprefix('val_')}": value for name, value in held.items()}
    spec, dtype = opened(folder / FINAL).spec, DTYPES[choose_precision(config.dtype).what]
    found["parameters"] = cost.parameter_count(spec)
    if spec.causal:
        found["kv_bytes_per_token"] = cost.kv_bytes_per_token(spec, dtype)
        if decode is not None:
            model = headway.load(folder / FINAL, task="causal-lm", dtype=dtype).model
            found["decode_tokens_per_s"] = decoding_speed(model, decode)
    return found


def decoding_speed(model: Decoder, prompt: int) -> float:
    """Tokens per second of `ROWS` texts together, greedily, behind prompts of `prompt` tokens: the median of `TIMES`
    runs of `NEW_TOKENS` steps, without the prompt's time."""
    noise = torch.Generator().manual_seed(0)
    prompts = torch.randint(model.spec.vocab, (ROWS, prompt), generator=noise).tolist()

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        generate(model, prompts, GenerationConfig(max_new_tokens=tokens, beyond_context=True))
        return time.perf_counter() - begin

    seconds(2)
    spent = [seconds(NEW_TOKENS + 1) - seconds(1) for _ in range(TIMES)]
    return ROWS * NEW_TOKENS / statistics.median(spent)
