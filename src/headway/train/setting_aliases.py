"""Settings under the names that other trainers give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headway.errors import did_you_mean

# What other trainers call it, where no similarity of letters would find ours.
ELSEWHERE = {
    "objective": "task",
    "learning_rate": "lr",
    "max_lr": "lr",
    "grad_clip": "clip",
    "max_grad_norm": "clip",
    "max_steps": "steps",
    "max_iters": "steps",
    "num_train_epochs": "epochs",
    "num_epochs": "epochs",
    "per_device_train_batch_size": "micro_batch",
    "micro_batch_size": "micro_batch",
    "batch_size": "batch_tokens",
    "gradient_accumulation_steps": "batch_tokens",
    "output_dir": "out",
    "out_dir": "out",
    "model_name_or_path": "model",
    "data_path": "data",
    "block_size": "context",
    "model_max_length": "context",
    "warmup_ratio": "warmup",
    "warmup_steps": "warmup",
    "logging_steps": "log_every",
    "eval_steps": "eval_every",
    "save_steps": "save_every",
    "save_total_limit": "keep_last",
    "num_layers": "depth",
    "n_layer": "depth",
    "bf16": "dtype",
    "vocab_size": "vocab",
}


def known_as(key: str, fields: Mapping[str, Any]) -> str:
    """` (here it is "lr": ...)` for a foreign name, else the nearest of ours, else the empty string."""
    ours = ELSEWHERE.get(key.removeprefix("--").replace("-", "_"))
    if ours is not None and ours in fields:
        return f' (here it is "{ours}": {fields[ours].description})'
    return did_you_mean(key, fields)
