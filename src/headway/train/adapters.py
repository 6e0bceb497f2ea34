"""A run that trains an adapter: the model of its settings, frozen, and what is trained beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from headway.checkpoints import Base
from headway.errors import CheckpointError, ConfigError
from headway.models import Model, ModelSpec, cost
from headway.nn import Adapter, Lora, attach, block_linears
from headway.nn.weights import WEIGHTS
from headway.parallel.sharded import fill, own_state
from headway.storage.lazy import forms
from headway.train.rows_config import RowsConfig

NAME = "default"
RANK, ALPHA = 16, 32.0


def lora_of(config: RowsConfig) -> Lora | None:
    """How layers are adapted; None where the model itself is trained."""
    if config.adapter is None:
        return None
    return Lora(
        rank=config.rank or RANK,
        alpha=config.alpha or ALPHA,
        stabilized=config.adapter == "rslora",
        magnitude=config.adapter == "dora",
        dropout=config.adapter_dropout or 0.0,
    )


def trained_parameters(config: RowsConfig, spec: ModelSpec) -> int:
    """Numbers that a run trains."""
    lora = lora_of(config)
    if lora is None:
        return cost.parameter_count(spec)
    return cost.adapter_parameters(spec, lora, config.adapter_targets)


def check_base(config: RowsConfig) -> None:
    """Raise ConfigError for an adapter beside fresh weights."""
    if config.adapter is not None and not Path(config.model or "").is_dir():
        raise ConfigError(
            f"adapter={config.adapter} is trained beside the model of a folder, and model={config.model} is none"
        )


def adapt(model: Model, config: RowsConfig, dtype: torch.dtype) -> Base | None:
    """Freeze a model in `dtype`, in 4 bits where the settings say so, and put a fresh adapter in float32 on it. None,
    and nothing is done, where the settings have no adapter.

    Raises ConfigError for a model whose head would stay untrained, and for targets that it has not."""
    lora = lora_of(config)
    if lora is None:
        return None
    assert config.model is not None, "the settings ask for one"
    if model.spec.head.outputs:
        raise ConfigError(
            f"adapter={config.adapter}: the head of this model ({model.spec.head.task}) lies outside of the blocks, "
            "and would stay as it is; leave adapter out, and train the model itself"
        )
    model.to(dtype)
    if config.base is not None:
        for layer in block_linears(model).values():
            layer.keep(WEIGHTS[config.base].pack(layer.matrix))
    adapter = Adapter.fresh(model, lora, config.adapter_targets, config.seed)
    attach(model, adapter, NAME, dtype=torch.float32)
    return Base.of(Path(config.model).resolve())


def trained_adapter(model: Model) -> Adapter:
    """The one that `adapt` put on a model; what is a part of a tensor is a DTensor."""
    return Adapter.of(model, NAME, own_state(model))


def restore_adapter(model: Model, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fill the adapter of a model. Raises CheckpointError for tensors that are not its own."""
    own = trained_adapter(model).tensors
    here, there = ({name: form.shape for name, form in forms(state).items()} for state in (own, tensors))
    if wrong := sorted(n for n in here.keys() | there.keys() if here.get(n) != there.get(n)):
        raise CheckpointError(
            f"{path} holds another adapter than the settings make: {', '.join(wrong[:5])}; resume with its own settings"
        )
    with torch.no_grad():
        for name, value in own.items():
            fill(value, tensors, name)
