"""The estimated work and memory of a run, without training: `headway train --dry-run`."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from headway.choice import Choice
from headway.data.hub import is_remote
from headway.errors import DataError
from headway.hardware import memory_available
from headway.models import ModelSpec, blank, cost
from headway.nn import Adapter, attach
from headway.parallel import Mesh
from headway.report import size, table
from headway.train.config import TrainConfig
from headway.train.inputs import lora_of, trained_parameters
from headway.train.optimizer import parameter_groups
from headway.train.rows_config import RowsConfig
from headway.train.start import checked


@dataclass(frozen=True)
class DryRun:
    """The plan of a run, with its costs. `data` and `rows` are counted if `exact`, else estimated."""

    spec: ModelSpec
    precision: Choice
    groups: dict[str, int]
    data: Mapping[str, int]
    exact: bool
    rows: int
    rows_per_step: int
    micro_batches: int
    steps: int | None
    train_flops_per_token: float
    workers: Choice
    memory: dict[str, int]
    memory_available: int

    def text(self) -> str:
        """Returns the plan as tables for a terminal."""
        spec, prefix = self.spec, "" if self.exact else "about "
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
            *((name, f"{prefix if 'tokens' in name else ''}{count}") for name, count in self.data.items()),
            ("rows", f"{prefix}{self.rows}"),
            ("rows per step", f"{self.rows_per_step} in {self.micro_batches} forward passes"),
            ("side by side", str(self.workers)),
            ("optimizer steps", "until the time is over" if self.steps is None else self.steps),
            ("FLOPs per token", self.train_flops_per_token),
        ]
        if self.steps is not None:
            trained = self.steps * self.rows_per_step * spec.trained_context
            steps.append(("FLOPs of the run, at most", self.train_flops_per_token * trained))
        byte_counts = {
            **self.memory,
            "together": sum(self.memory.values()),
            "available": self.memory_available,
        }
        memory = [(name, size(count)) for name, count in byte_counts.items()]
        parts = (("model", model), ("plan", steps), ("memory", memory))
        return "\n\n".join(table((name, ""), rows) for name, rows in parts)


def describe_run(config: TrainConfig) -> DryRun:
    """Computes the plan and costs of a run. Reads only as much data as is needed for counting; trains and writes
    nothing.

    Raises ConfigError for invalid settings and for a task without `foresee`, DataError for data of the Hub, which would
    have to be downloaded."""
    for name, value in config.paths.items():
        if is_remote(value):
            raise DataError(f"{name} {value}: a dry run downloads nothing; give a local file")
    task = checked(config, 1 if config.mesh is None else Mesh.read(config.mesh).ranks)
    config, foreseen, dtype = task.config, task.foresee(), task.inputs.dtype
    spec, plan, workers, adapter, frozen = foreseen.spec, foreseen.plan, int(foreseen.workers.what), None, 0
    with torch.device("meta"):
        model = blank(spec)
        if isinstance(config, RowsConfig) and (lora := lora_of(config)) is not None:
            attach(model, Adapter.fresh(model, lora, config.adapter_targets))
            adapter = trained_parameters(config, spec)
            frozen = sum(cost.kept_bytes(spec, cost.Kept(dtype, config.base)).values())
        groups = parameter_groups(model)
    passes = -(-plan.rows_per_step // plan.micro_batch)
    training = cost.training_bytes(
        spec,
        foreseen.context,
        plan.micro_batch * foreseen.texts,
        dtype,
        passes=passes,
        workers=workers,
        adapter=adapter,
        gradient_checkpointing=config.gradient_checkpointing,
    )
    names = {"matrices (decay)": groups.matrices, "embeddings": groups.embeddings, "vectors": groups.vectors}
    return DryRun(
        spec=spec,
        precision=task.inputs.precision,
        groups={name: sum(p.numel() for p in group.values()) for name, group in names.items()},
        data=foreseen.data,
        exact=foreseen.exact,
        rows=plan.rows,
        rows_per_step=plan.rows_per_step,
        micro_batches=passes,
        steps=plan.steps,
        train_flops_per_token=cost.train_flops(spec, foreseen.context),
        workers=foreseen.workers,
        memory=({"frozen weights": frozen} if frozen else {}) | training,
        memory_available=memory_available(),
    )
