"""Parameter groups by structure, and the optimizers over them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headway.errors import CheckpointError
from headway.nn import OutputLayer
from headway.train.microbatch_pool import MicrobatchPool
from headway.train.text_config import TextConfig


@dataclass(frozen=True)
class Groups:
    """Every trainable parameter once, by what it is.

    Attributes:
        matrices: weights of linear layers (they mix features: decay, and Muon where asked for).
        embeddings: rows that are looked up, and the output matrix, tied or not (no decay).
        vectors: gains, biases and whatever else has fewer than two axes (no decay).
    """

    matrices: dict[str, nn.Parameter]
    embeddings: dict[str, nn.Parameter]
    vectors: dict[str, nn.Parameter]

    @property
    def count(self) -> int:
        """Trainable numbers over all groups."""
        return sum(p.numel() for group in self for p in group.values())

    def __iter__(self) -> Iterator[dict[str, nn.Parameter]]:
        return iter((self.matrices, self.embeddings, self.vectors))


def parameter_groups(model: nn.Module) -> Groups:
    """Sort the trainable parameters by the structure of the model, not by names.

    A parameter of an `nn.Embedding`, and one that an embedding shares (a tied head), is an embedding, and so
    is the last linear layer, whose rows are vocabulary entries as well when its width is the vocabulary's.
    Otherwise two axes or more make a matrix, fewer a vector. The groups are asserted to hold every trainable
    parameter exactly once.
    """
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    looked_up = {id(m.weight) for m in tables}
    sizes = {m.num_embeddings for m in tables}
    heads = {id(m.weight) for m in model.modules() if isinstance(m, OutputLayer)}
    heads |= {id(m.weight) for m in model.children() if isinstance(m, nn.Linear) and m.out_features in sizes}
    groups = Groups({}, {}, {})
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if id(p) in looked_up or id(p) in heads:
            groups.embeddings[name] = p
        elif p.dim() >= 2:
            groups.matrices[name] = p
        else:
            groups.vectors[name] = p
    assert groups.count == sum(p.numel() for p in model.parameters() if p.requires_grad)
    return groups


class Optimizer:
    """Several of torch's optimizers behind one learning rate, and their state as named tensors.

    Args:
        parameters: every trainable parameter by its name.
        parts: the peak learning rate of each optimizer, and the optimizer; together they hold all of `parameters`.
        workers: what steps the parts side by side; one after the other unless given.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        parts: Sequence[tuple[float, torch.optim.Optimizer]],
        workers: MicrobatchPool | None = None,
    ) -> None:
        self.parameters, self._parts, self.workers = (
            dict(parameters),
            list(parts),
            workers or MicrobatchPool(1),
        )

    @staticmethod
    def of(groups: Groups, config: TextConfig, workers: MicrobatchPool | None = None) -> Optimizer:
        """AdamW over all groups, or Muon over the matrices and AdamW over the rest.

        AdamW: Loshchilov and Hutter 2019, decay decoupled, only for matrices. Muon: momentum of matrices,
        orthogonalised by five Newton-Schulz steps (`torch.optim.Muon`), scaled by sqrt(max(1, rows/columns)).
        """
        workers = workers or MicrobatchPool(1)
        rest = [*groups.embeddings.values(), *groups.vectors.values()]
        matrices = list(groups.matrices.values())
        adam: list[dict[str, Any]] = [{"params": rest, "weight_decay": 0.0}]
        if config.optimizer == "adamw":
            adam.append({"params": matrices, "weight_decay": config.weight_decay})
        parts: list[tuple[float, torch.optim.Optimizer]] = [
            (
                config.lr,
                torch.optim.AdamW(
                    [group for group in adam if group["params"]],
                    lr=config.lr,
                    betas=(config.beta1, config.beta2),
                    eps=config.eps,
                    fused=True,
                ),
            )
        ]
        if config.optimizer == "muon" and matrices:
            rate = config.matrix_lr or MATRIX_LR
            for share in shares(matrices, workers.count):
                muon = torch.optim.Muon(share, lr=rate, weight_decay=config.weight_decay, momentum=0.95)
                parts.append((rate, muon))
        return Optimizer({name: p for group in groups for name, p in group.items()}, parts, workers)

    @staticmethod
    def single(model: nn.Module, optimizer: torch.optim.Optimizer) -> Optimizer:
        """One of torch's optimizers over all parameters of `model`; its peak learning rate is the one it has."""
        return Optimizer(dict(model.named_parameters()), [(optimizer.param_groups[0]["lr"], optimizer)])

    @property
    def peak_lr(self) -> float:
        """Of the first part."""
        return self._parts[0][0]

    def step(self, factor: float) -> None:
        """One step at `factor` times the peak learning rates; gradients are dropped afterwards."""

        def run(item: tuple[float, torch.optim.Optimizer]) -> None:
            peak, part = item
            for group in part.param_groups:
                group["lr"] = peak * factor
            part.step()
            part.zero_grad(set_to_none=True)

        for _ in self.workers.map(run, self._parts):
            pass

    def state_tensors(self) -> dict[str, Tensor]:
        """The optimizer's state as named tensors: `PARAMETER/exp_avg`, `PARAMETER/step`, ..."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            f"{names[id(p)]}/{key}": value.detach()
            for _, part in self._parts
            for p, state in part.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """The inverse of `state_tensors`, strict: CheckpointError for what is missing, left over or misshapen."""
        parameters = self.parameters
        owner = {id(p): part for _, part in self._parts for g in part.param_groups for p in g["params"]}
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, field = key.rpartition("/")
            if name not in parameters:
                raise CheckpointError(f"the optimizer's state holds {key!r}, but the model has no {name!r}")
            if value.dim() and value.shape != parameters[name].shape:
                raise CheckpointError(
                    f"the optimizer's {key} has shape {tuple(value.shape)}, the parameter has "
                    f"{tuple(parameters[name].shape)}"
                )
            states.setdefault(name, {})[field] = value.clone()
        if states and (missing := parameters.keys() - states.keys()):
            raise CheckpointError(f"the optimizer's state lacks {', '.join(sorted(missing))}")
        for name, state in states.items():
            p = parameters[name]
            kind = type(owner[id(p)]).__name__
            if state.keys() != STATE[kind]:
                raise CheckpointError(
                    f"the optimizer's state of {name} holds {sorted(state)}, but {kind} keeps "
                    f"{sorted(STATE[kind])}; resume with the optimizer of the run"
                )
            owner[id(p)].state[p] = dict(state)


def shares(matrices: list[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """The matrices in at most `count` groups of about equal work; how they are grouped changes no bit."""
    groups: list[list[nn.Parameter]] = [[] for _ in range(count)]
    load = [0] * count
    for p in sorted(matrices, key=lambda p: -p.numel()):
        least = load.index(min(load))
        groups[least].append(p)
        load[least] += p.numel() * min(p.shape)
    return [group for group in groups if group]


MATRIX_LR = 0.02
ADAM = {"step", "exp_avg", "exp_avg_sq"}
STATE = {"Adam": ADAM, "AdamW": ADAM, "Muon": {"momentum_buffer"}}
