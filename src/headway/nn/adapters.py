"""Adapters of a model: creating, attaching, combining, merging and unmerging them.

    adapter = Adapter.fresh(model, Lora(rank=8, alpha=16))    # of every linear layer of the blocks
    attach(model, adapter, "mine")                            # all other parameters are frozen
    set_active(model, ["mine"])                               # several may be attached; the active ones add up
    detach(model, "mine")                                     # removed
    merge(model), unmerge(model)                              # into the weights, and out of them bit for bit

Legend: I inputs, O outputs, R rank.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headway.errors import ConfigError, check_known, did_you_mean
from headway.nn.block import Block
from headway.nn.linear import Linear, linears
from headway.nn.lora import Lora, LowRank


@dataclass(frozen=True)
class Adapter:
    """One adapter, separate from a model.

    Attributes:
        layers: how each layer is adapted, by the layer's name in the model.
        tensors: LAYER.lora_A.weight [R, I], LAYER.lora_B.weight [O, R] and, with magnitudes,
            LAYER.lora_magnitude_vector [O].
    """

    layers: Mapping[str, Lora]
    tensors: Mapping[str, Tensor]

    @staticmethod
    def fresh(model: nn.Module, lora: Lora, targets: Sequence[str] = (), seed: int = 0) -> "Adapter":
        """Returns a new adapter, which does not change the model yet: A uniform in +-1 / sqrt(I), drawn from `seed`; B
        = 0; m = |W|.

        `targets` are the last parts of layer names ("q_proj", ...), by default all linear layers of the blocks.
        Raises ConfigError for an unknown one."""
        generator, tensors = torch.Generator("cpu").manual_seed(seed), {}
        layers = target_layers(model, targets)
        for name, layer in layers.items():
            weight, bound = layer.kept, layer.in_features**-0.5
            a = torch.empty(lora.rank, layer.in_features, device="cpu")
            a.uniform_(-bound, bound, generator=generator)
            dtype = torch.promote_types(weight.dtype, torch.float32)
            tensors[f"{name}.lora_A.weight"] = a.to(weight.device, dtype)
            tensors[f"{name}.lora_B.weight"] = torch.zeros(
                layer.out_features, lora.rank, device=weight.device, dtype=dtype
            )
            if lora.magnitude:
                norm = torch.linalg.vector_norm(weight.dequantize().detach(), dim=1, dtype=dtype)
                tensors[f"{name}.lora_magnitude_vector"] = norm
        return Adapter(dict.fromkeys(layers, lora), tensors)

    @staticmethod
    def of(model: nn.Module, name: str, state: Mapping[str, Tensor] | None = None) -> "Adapter":
        """Returns the adapter attached to `model` as `name`, with its tensors taken from `state`, a state dict of
        the model (by default the current one). Raises ConfigError if there is no adapter of this name."""
        layers: dict[str, Lora] = {}
        tensors: dict[str, Tensor] = {}
        state = model.state_dict() if state is None else state
        for place, layer in adapted(model):
            if name not in layer.adapters:
                continue
            part = layer.adapters[name]
            assert isinstance(part, LowRank)
            layers[place] = part.lora
            for leaf, _ in part.named_parameters():
                stored = leaf if "magnitude" in leaf else f"{leaf}.weight"
                tensors[f"{place}.{stored}"] = state[f"{place}.adapters.{name}.{leaf}"].detach()
        _check_attached(model, name)
        return Adapter(layers, tensors)

    def part(self, layer: str, device: torch.device, dtype: torch.dtype) -> LowRank:
        """Returns a copy of this adapter's part for one layer."""
        leaves = ("lora_A.weight", "lora_B.weight", "lora_magnitude_vector")
        values = [self.tensors[name] for leaf in leaves if (name := f"{layer}.{leaf}") in self.tensors]
        a, b, *m = (value.to(device, dtype, copy=True) for value in values)
        return LowRank(self.layers[layer], a, b, m[0] if m else None)


def block_linears(model: nn.Module) -> dict[str, Linear]:
    """Returns every linear layer of the blocks by its name, adapted or not; neither embeddings nor the output layer."""
    layers: dict[str, Linear] = {}
    for name, block in model.named_modules():
        if isinstance(block, Block):
            layers |= {f"{name}.{inner}": layer for inner, layer in linears(block).items()}
    return layers


def target_layers(model: nn.Module, targets: Sequence[str] = ()) -> dict[str, Linear]:
    """Returns the layers of the blocks whose names end with one of `targets`, or all if there are no targets. Raises
    ConfigError for a target that is no layer."""
    layers = block_linears(model)
    known = sorted({name.rpartition(".")[2] for name in layers})
    for target in targets:
        check_known(target, known, "adapters: the blocks have no linear layer")
    return {name: m for name, m in layers.items() if not targets or name.rpartition(".")[2] in targets}


def attach(
    model: nn.Module, adapter: Adapter, name: str = "default", *, dtype: torch.dtype | None = None
) -> None:
    """Attaches an adapter to `model`, in place, and makes it active; all parameters except those of adapters are
    frozen.

    `dtype` is the dtype of the adapter's parameters, by default that of the layer's weight. Raises ConfigError for a
    name that is taken or invalid, for layers that the model does not have, and if adapters are merged."""
    if not name or "." in name or name in adapter_names(model):
        what = "exists already" if name in adapter_names(model) else "is empty or has a dot"
        raise ConfigError(f"attach: the adapter name {name!r} {what}; choose another name")
    layers = block_linears(model)
    if unknown := sorted(adapter.layers.keys() - layers.keys()):
        raise ConfigError(f"attach: the model has no layer {unknown[0]}{did_you_mean(unknown[0], layers)}")
    _check_unmerged(model)
    model.requires_grad_(False)
    for place in adapter.layers:
        layer = layers[place]
        weight = layer.kept
        layer.adapters[name] = adapter.part(place, weight.device, dtype or weight.dtype).train(layer.training)
        layer.active = (*layer.active, name)
    for _, layer in adapted(model):
        layer.adapters.requires_grad_(True)


def detach(model: nn.Module, name: str) -> None:
    """Removes an adapter from `model`, in place. Raises ConfigError for an unknown name, and if adapters are merged."""
    _check_attached(model, name)
    _check_unmerged(model)
    for _, layer in [*adapted(model)]:
        layer.active = tuple(other for other in layer.active if other != name)
        layer.adapters.pop(name) if name in layer.adapters else None


def adapted(model: nn.Module) -> Iterator[tuple[str, Linear]]:
    """Yields (name, layer) for each layer that has adapters."""
    return ((name, layer) for name, layer in linears(model).items() if len(layer.adapters))


def adapter_names(model: nn.Module) -> list[str]:
    """Returns the names of the attached adapters, in the order of attaching."""
    return list(dict.fromkeys(name for _, layer in adapted(model) for name in layer.adapters))


def beside(model: nn.Module) -> list[str]:
    """Returns the names of the adapters that are computed beside the layers: active, and not merged."""
    return list(dict.fromkeys(name for _, layer in adapted(model) for name in layer.beside))


def named_adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) for all attached adapters: the trained parameters of an adapted model."""
    for place, layer in adapted(model):
        yield from layer.adapters.named_parameters(f"{place}.adapters")


def set_active(model: nn.Module, active: Sequence[str]) -> None:
    """Sets which adapters are added, none for an empty list. Raises ConfigError for an unknown name, and if adapters
    are merged."""
    for name in active:
        _check_attached(model, name)
    _check_unmerged(model)
    for _, layer in adapted(model):
        layer.active = tuple(name for name in active if name in layer.adapters)


def merge(model: nn.Module) -> None:
    """Merges the active adapters into the weights; the original weights are kept, too. Raises ConfigError for
    quantized weights."""
    for place, layer in adapted(model):
        if reason := layer.kept.merge_reason():
            raise ConfigError(
                f"merge: {place} {reason}; merge the adapter into the unquantized model: headway surgery merge"
            )
    for _, layer in adapted(model):
        layer.merge()


def unmerge(model: nn.Module) -> None:
    """Restores the original weights that `merge` kept, bit for bit."""
    for _, layer in adapted(model):
        layer.unmerge()


def _check_unmerged(model: nn.Module) -> None:
    if any(layer.merged for _, layer in adapted(model)):
        raise ConfigError("the adapters are merged into the weights; unmerge(model) first")


def _check_attached(model: nn.Module, name: str) -> None:
    check_known(name, adapter_names(model), "there is no adapter")
