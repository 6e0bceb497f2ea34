"""Parameter groups by the structure of the model, the optimizers over them, and the learning rate schedule."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headway.errors import CheckpointError, ConfigError
from headway.nn import adapter_names, linears
from headway.parallel import Parallel, Shards
from headway.parallel.sharded import fill
from headway.storage.lazy import Form, lazy
from headway.train.microbatch_pool import ALONE, MicrobatchPool
from headway.train.rows_config import RowsConfig
from headway.train.sharded_step import OwnedMuon, owners_of, plain_parts


class Groups(NamedTuple):
    """The trainable parameters by name, each in one group.

    Attributes:
        matrices: weights of linear layers (weight decay; Muon if chosen).
        embeddings: embedding tables, and the output matrix, tied or not (no decay).
        vectors: gains, biases and all other parameters with fewer than two axes (no decay).
    """

    matrices: dict[str, nn.Parameter]
    embeddings: dict[str, nn.Parameter]
    vectors: dict[str, nn.Parameter]


def parameter_groups(model: nn.Module) -> Groups:
    """Groups the trainable parameters by the structure of the model, not by their names.

    The weight of an `nn.Embedding` is an embedding, also if it is shared (a tied head); so is the weight of an output
    layer: one marked `is_output`, or a direct child of the model with as many outputs as an embedding has rows. Of the
    others, parameters with two or more axes are matrices, the rest are vectors.

    Raises ConfigError for a model with quantized weights, which cannot be trained, unless it has an adapter.
    """
    packed = {layer.kept.name for layer in linears(model).values() if layer.kept.name != "plain"}
    if packed and not adapter_names(model):
        raise ConfigError(
            f"weights in {' and '.join(sorted(packed))} cannot be trained: train an adapter (adapter=lora), or train "
            "the unquantized model and quantize it afterwards (headway quantize)"
        )
    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    sizes = {m.num_embeddings for m in tables}
    heads: list[nn.Linear] = [layer for layer in linears(model).values() if layer.is_output]
    heads += [m for m in model.children() if isinstance(m, nn.Linear) and m.out_features in sizes]
    entries = {id(m.weight) for m in (*tables, *heads)}
    groups = Groups({}, {}, {})
    for name, p in model.named_parameters():
        if p.requires_grad:
            by_axes = groups.matrices if p.dim() >= 2 else groups.vectors
            group = groups.embeddings if id(p) in entries else by_axes
            group[name] = p
    return groups


class Optimizer:
    """Several of torch's optimizers with one learning rate schedule, and their state as named tensors.

    Args:
        parameters: all trainable parameters by name.
        parts: pairs of the peak learning rate and the optimizer; together the optimizers have all `parameters`.
        workers: pool that steps the parts in parallel [default: one after the other].
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        parts: Sequence[tuple[float, torch.optim.Optimizer]],
        workers: MicrobatchPool = ALONE,
    ) -> None:
        self.parameters, self._parts, self.workers = dict(parameters), list(parts), workers
        self._shards: Shards | None = None

    @staticmethod
    def of(groups: Groups, config: RowsConfig, workers: MicrobatchPool = ALONE) -> "Optimizer":
        """Returns AdamW over all groups, or Muon over the matrices and AdamW over the rest.

        AdamW: Loshchilov and Hutter 2019, with decoupled decay, for matrices only. Muon: the momentum of matrices,
        orthogonalised by five Newton-Schulz steps (`torch.optim.Muon`) and scaled by sqrt(max(1, rows/columns)).
        """
        others = [*groups.embeddings.values(), *groups.vectors.values()]
        matrices, decay = list(groups.matrices.values()), config.weight_decay
        adam: list[dict[str, Any]] = [{"params": others, "weight_decay": 0.0}]
        if config.optimizer == "adamw":
            adam.append({"params": matrices, "weight_decay": decay})
        adam = [group for group in adam if group["params"]]
        betas = config.beta1, config.beta2
        adamw = torch.optim.AdamW(adam, lr=config.lr, betas=betas, eps=config.eps, fused=True)
        parts: list[tuple[float, torch.optim.Optimizer]] = [(config.lr, adamw)]
        if config.optimizer == "muon":
            rate = config.matrix_lr or MATRIX_LR
            for share in shares(matrices, workers.count):
                muon = torch.optim.Muon(share, lr=rate, weight_decay=decay, momentum=0.95)
                parts.append((rate, muon))
        return Optimizer(groups.matrices | groups.embeddings | groups.vectors, parts, workers)

    @staticmethod
    def single(model: nn.Module, optimizer: torch.optim.Optimizer) -> "Optimizer":
        """Wraps one of torch's optimizers over all trainable parameters of `model`; its current learning rate is the
        peak."""
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        return Optimizer(trained, [(optimizer.param_groups[0]["lr"], optimizer)])

    def own(self, parallel: Parallel, shards: Shards | None = None) -> None:
        """Distributes the work of Muon's matrices over the processes (`OwnedMuon`); to be called before the first step.

        They stay as they are if there is one process, if the workers of each process share the matrices already, or if
        processes have different experts. `shards`: which parameters ranks have parts of, or alone (axes tp, expert)."""
        self._shards = shards
        muons = [part for _, part in self._parts if isinstance(part, torch.optim.Muon)]
        if parallel.mesh.ranks == 1 or parallel.mesh.expert > 1 or len(muons) != 1:
            return
        muon = muons[0]
        (group,) = muon.param_groups
        options = {name: value for name, value in group.items() if name not in ("params", "initial_lr")}
        sharded = {} if shards is None else shards.axes
        axes: dict[Tensor, int] = {p: sharded[name] for name, p in self.parameters.items() if name in sharded}
        owned = OwnedMuon(group["params"], parallel, axes, **options)
        self._parts = [(rate, owned if part is muon else part) for rate, part in self._parts]

    @property
    def peak_lr(self) -> float:
        """Peak learning rate of the first part."""
        return self._parts[0][0]

    def step(self, factor: float) -> None:
        """Makes one step at `factor` times the peak learning rates, and frees the gradients."""

        def run(item: tuple[float, torch.optim.Optimizer]) -> None:
            peak, part = item
            for group in part.param_groups:
                group["lr"] = peak * factor
            with nullcontext() if isinstance(part, OwnedMuon) else plain_parts(part):
                part.step()
            part.zero_grad(set_to_none=True)

        list(self.workers.map(run, self._parts))

    def state_tensors(self) -> dict[str, Tensor]:
        """Returns the optimizer state as named tensors: `PARAMETER/exp_avg`, `PARAMETER/step`, ...; for sharded
        parameters, DTensors."""
        names = {id(p): name for name, p in self.parameters.items()}
        return {
            f"{names[id(p)]}/{key}": self._placed(names[id(p)], value.detach())
            for _, part in self._parts
            for p, state in part.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor], *, strict: bool = True) -> int:
        """Loads the tensors of `state_tensors`, one at a time; returns the number of parameters whose state was loaded.

        Raises CheckpointError for missing, unexpected or misshapen tensors. If not `strict`, the state may be that of
        another optimizer: what does not fit is skipped, and parameters without a state begin with zeros."""
        states: dict[str, dict[str, Form]] = {}
        for key, form in lazy(tensors).forms.items():
            name, _, field = key.rpartition("/")
            if self._shards is not None and name in self._shards.elsewhere:
                continue
            states.setdefault(name, {})[field] = form
        misfits = {name: reason for name, state in states.items() if (reason := self._misfit(name, state))}
        fit = [name for name in states if name not in misfits]
        missing = sorted(self.parameters.keys() - fit)
        if strict and misfits:
            raise CheckpointError(next(iter(misfits.values())))
        if strict and states and missing:
            raise CheckpointError(f"the optimizer's state lacks {', '.join(missing)}")
        for name in fit:
            self._take(name, states[name], tensors)
        for name in () if strict else missing:
            p, owner = self.parameters[name], self._owner(name)
            owner.state[p] = self._fresh(p, type(owner).__name__)
        return len(fit)

    @staticmethod
    def _fresh(p: nn.Parameter, kind: str) -> dict[str, Tensor]:
        """Returns the state with which an optimizer of this kind begins its first step."""
        return {field: torch.zeros(()) if field == "step" else torch.zeros_like(p) for field in STATE[kind]}

    def _owner(self, name: str) -> torch.optim.Optimizer:
        p = self.parameters[name]
        return next(o for _, o in self._parts if any(p is q for g in o.param_groups for q in g["params"]))

    def _placed(self, name: str, value: Tensor) -> Tensor:
        return value if self._shards is None else self._shards.placed(name, value)

    def _misfit(self, name: str, state: Mapping[str, Form]) -> str | None:
        """Returns the reason why `state` cannot be the state of a parameter; None if it can."""
        if name not in self.parameters:
            return f"the optimizer's state has {name!r}, but the model has no such parameter"
        p, kind = self._placed(name, self.parameters[name].detach()), type(self._owner(name)).__name__
        if state.keys() != STATE[kind]:
            return (
                f"the optimizer's state of {name} holds {sorted(state)}, but {kind} keeps {sorted(STATE[kind])}; "
                "resume with the optimizer of the run"
            )
        for field, form in state.items():
            if form.shape not in ((), tuple(p.shape)):
                return f"the optimizer's {name}/{field} has shape {form.shape}, the parameter has {tuple(p.shape)}"
        return None

    def _take(self, name: str, state: Mapping[str, Form], tensors: Mapping[str, Tensor]) -> None:
        p, loaded = self.parameters[name], dict[str, Tensor]()
        for field, form in state.items():
            like = torch.empty_like(p, dtype=form.dtype, requires_grad=False)
            loaded[field] = like if form.shape else torch.empty((), dtype=form.dtype)
            fill(self._placed(name, loaded[field]), tensors, f"{name}/{field}")
        self._owner(name).state[p] = loaded


def shares(matrices: Sequence[nn.Parameter], count: int) -> list[list[nn.Parameter]]:
    """Splits the matrices into at most `count` groups of about equal work. The grouping does not change any bit of the
    results."""
    numbers = owners_of([p.shape for p in matrices], count)
    groups = [[p for p, number in zip(matrices, numbers, strict=True) if number == i] for i in range(count)]
    return [group for group in groups if group]


def learning_rate(progress: float, *, warmup: float, floor: float) -> float:
    """Returns the factor of the peak learning rate: a linear warm-up, then a half cosine down to `floor`. With
    p = progress and w = warmup:

        p < w:   p / w
        p >= w:  floor + (1 - floor) (1 + cos(pi (p - w) / (1 - w))) / 2

    `progress` is the share of the run that is done when the step *ends*, in (0, 1]: (step + 1) / steps, or the elapsed
    share of a time budget. So the first step of a run with a warm-up has a rate above 0, and the last step has the
    floor. `warmup` is a share of the run, `floor` a share of the peak.
    """
    p = min(max(progress, 0.0), 1.0)
    if p < warmup or warmup == 1.0:
        return p / warmup
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * (p - warmup) / (1.0 - warmup)))


MATRIX_LR = 0.02
ADAM = {"step", "exp_avg", "exp_avg_sq"}
MUON = {"momentum_buffer"}
STATE = {"Adam": ADAM, "AdamW": ADAM, "Muon": MUON, "OwnedMuon": MUON}
