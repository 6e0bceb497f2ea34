"""What a run would do and take, before anything is done: `headway train --dry-run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from headway.choice import Choice
from headway.data import TokenFile
from headway.data.hub import is_remote
from headway.errors import ConfigError, DataError
from headway.hardware import memory_available
from headway.models import ModelSpec, blank, cost
from headway.nn import Adapter, attach
from headway.report import size, table
from headway.train.adapters import lora_of, trained_parameters
from headway.train.config import TrainConfig
from headway.train.inputs import TOKENS, given_tokenizer, model_spec
from headway.train.microbatch_pool import DTYPES, choose_precision, choose_workers
from headway.train.optimizer import parameter_groups
from headway.train.start import with_local_model
from headway.train.tasks import text_task_of, text_tasks
from headway.train.tasks.rows import Plan
from headway.train.text_config import TextConfig

BYTES_PER_TOKEN = 3.0  # of English or source text under a BPE of a few thousand entries; only for estimates


@dataclass(frozen=True)
class DryRun:
    """A run on paper. `tokens` is exact for token files and an estimate for text (`tokens_exact`)."""

    spec: ModelSpec
    precision: Choice
    groups: dict[str, int]
    tokens: int
    tokens_exact: bool
    rows: int
    rows_per_step: int
    micro_batches: int
    steps: int | None
    train_flops_per_token: float
    workers: Choice
    memory: dict[str, int]
    memory_available: int

    def text(self) -> str:
        """For a terminal."""
        spec, about = self.spec, "" if self.tokens_exact else "about "
        model: list[tuple[str, object]] = [
            ("family", spec.family),
            ("layers x width", f"{spec.layers} x {spec.width}"),
            ("heads / kv heads x dims", f"{spec.heads} / {spec.kv_heads} x {spec.head_dim}"),
            ("feed-forward, vocab", f"{spec.hidden}, {spec.vocab}"),
            ("patterns", ", ".join(dict.fromkeys(map(str, spec.patterns)))),
            ("parameters", cost.parameter_count(spec)),
            *((f"  {name}", count) for name, count in self.groups.items()),
            ("precision", str(self.precision)),
        ]
        steps: list[tuple[str, object]] = [
            ("training tokens", f"{about}{self.tokens}"),
            ("rows", f"{about}{self.rows}"),
            ("rows per step", f"{self.rows_per_step} in {self.micro_batches} forward passes"),
            ("side by side", str(self.workers)),
            ("optimizer steps", "until the time is over" if self.steps is None else self.steps),
            ("FLOPs per token", self.train_flops_per_token),
        ]
        if self.steps is not None:
            trained = self.steps * self.rows_per_step * spec.trained_context
            steps.append(("FLOPs of the run, at most", self.train_flops_per_token * trained))
        held = {**self.memory, "together": sum(self.memory.values()), "available": self.memory_available}
        memory = [(name, size(count)) for name, count in held.items()]
        parts = (("model", model), ("plan", steps), ("memory", memory))
        return "\n\n".join(table((name, ""), rows) for name, rows in parts)


def describe_run(config: TrainConfig) -> DryRun:
    """Reads sizes and headers; trains, encodes and writes nothing. Raises ConfigError for a task that does not train on
    text."""
    if not isinstance(config, TextConfig):
        raise ConfigError(f"a dry run is for training on text; task {config.task} has none")
    config = with_local_model(config)
    assert isinstance(config, TextConfig)
    precision = choose_precision(config.dtype)
    dtype = DTYPES[precision.what]
    tokenizer = given_tokenizer(config)
    tokens, exact = _tokens(config)
    spec = model_spec(config, None if tokenizer is None else tokenizer.vocab_size)
    task = text_tasks()[config.task or text_task_of(spec)]
    task.check(config, spec)
    with torch.device("meta"):
        model = blank(spec)
        if (lora := lora_of(config)) is not None:
            attach(model, Adapter.fresh(model, lora, config.adapter_targets))
        groups = parameter_groups(model)
    rows = -(-tokens // config.context)
    if exact and tokenizer is not None:
        rows = len(task.rows(TokenFile(config.data), config, tokenizer, spec))
    trained = trained_parameters(config, spec)
    workers = choose_workers(config, spec, trained * dtype.itemsize)
    plan = Plan.of(config, max(1, rows), int(workers.what))
    passes = -(-plan.rows_per_step // plan.micro_batch)
    frozen = 0 if lora is None else cost.frozen_bytes(spec, dtype, nf4=config.base is not None)
    trains = cost.training_bytes(
        spec,
        config.context,
        plan.micro_batch,
        dtype,
        passes=passes,
        workers=int(workers.what),
        adapter=None if lora is None else trained,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    names = {"matrices (decay)": groups.matrices, "embeddings": groups.embeddings, "vectors": groups.vectors}
    return DryRun(
        spec=spec,
        precision=precision,
        groups={name: sum(p.numel() for p in group.values()) for name, group in names.items()},
        tokens=tokens,
        tokens_exact=exact,
        rows=rows,
        rows_per_step=plan.rows_per_step,
        micro_batches=passes,
        steps=plan.steps,
        train_flops_per_token=cost.train_flops(spec, config.context),
        workers=workers,
        memory=({"frozen weights": frozen} if frozen else {}) | trains,
        memory_available=memory_available(),
    )


def _tokens(config: TextConfig) -> tuple[int, bool]:
    """(tokens, whether that is exact)."""
    if is_remote(config.data):
        raise DataError(f"{config.data}: a dry run fetches nothing; give a local file")
    path = Path(config.data)
    if not path.exists():
        raise DataError(f"{config.data}: no such file or folder")
    if path.suffix == TOKENS:
        return len(TokenFile(path)), True
    files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
    size_bytes = sum(p.stat().st_size for p in files) * (1.0 - config.validation_share)
    return max(2, int(size_bytes / BYTES_PER_TOKEN)), False
