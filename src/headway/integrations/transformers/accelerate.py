"""Accelerates a loaded model of `transformers` in place, and restores it.

    accelerate(model)                   attention, products of few rows, norms, feed-forwards, cross entropy, caches
    accelerate(model, weights="int8")   also the blocks' weights in 8 or 4 bits
    accelerate(model, weights="compressed")   also bf16 weights in 11 bits, losslessly
    restore(model)                      undoes it

Modules keep their identity, parameters, hooks and names: a module that is known (`modules.TABLE`), and whose output on
random numbers equals that of the replacement, gets the replacement as an instance attribute `forward`."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NoReturn

from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from headway.errors import ConfigError, check_known
from headway.integrations.transformers import attention_layers as layers
from headway.integrations.transformers import products
from headway.integrations.transformers.interface import NAME
from headway.integrations.transformers.loss import output_forward
from headway.integrations.transformers.modules import TOLERANCE, code, difference, is_unchanged, known
from headway.integrations.transformers.own_attention import attention_layers
from headway.integrations.transformers.products import COMPRESSED, linear_forward, put, put_in
from headway.integrations.transformers.steps import STEPS, growing, stack_forward, unequal_reason
from headway.models.quantize import KINDS, check_compressible

STATE = "_headway_accelerated"


@dataclass(frozen=True)
class Report:
    """Which modules `accelerate` replaced, and which it left.

    Attributes:
        taken: number of modules of each kind that headway now computes.
        left: name of each module that computes as before -> why. Containers, and modules that are a single operator of
            torch anyway, are not listed.
    """

    taken: Mapping[str, int]
    left: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{count:>6}  {kind}" for kind, count in self.taken.items()]
        alike: dict[str, list[str]] = {}
        for name, reason in self.left.items():
            alike.setdefault(reason, []).append(name)
        for reason, names in alike.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            lines.append(f"  left  {names[0] or 'the model'}{more}: {reason}")
        return "\n".join(lines)


@dataclass
class State:
    """What `restore` needs: configs with their previous attention implementation, and the parameters that required
    gradients."""

    attention: list[tuple[Any, str | None]] = field(default_factory=list)
    trained: list[nn.Parameter] = field(default_factory=list)

    def __deepcopy__(self, memo: dict[int, Any]) -> "State":
        return State(copy.deepcopy(self.attention, memo), copy.deepcopy(self.trained, memo))

    def __reduce__(self) -> NoReturn:
        raise ConfigError(
            "an accelerated model cannot be pickled; save it with save_pretrained, or restore(model) before pickling "
            "and accelerate the loaded one"
        )


def accelerate(model: nn.Module, weights: str | None = None) -> Report:
    """Accelerates a model of `transformers` in place, and returns what was replaced and what was left.

    Args:
        model: a model with its weights, on any device; the kernels run on the CPU, and elsewhere modules compute as
            before.
        weights: "int8" or "int4" (a scale for each 32 inputs of an output) for the linear layers of the blocks:
            products use rounded weights. "compressed" for all linear layers of bf16: products of up to 64 rows read
            `headway.nn.CompressedWeight`, with bit-identical results. These are kept in addition to the original
            weights, which `state_dict`, `save_pretrained` and `restore` use. The model is frozen, and training raises
            ConfigError.
    Raises ConfigError for a model that is accelerated already, for other values of `weights`, and for "compressed" if
    weights are not bf16 on the CPU; BackendError for "compressed" without native kernels.
    """
    if STATE in model.__dict__:
        raise ConfigError("the model is accelerated already; call restore(model) first")
    if weights == COMPRESSED:
        check_compressible(model)
    elif weights is not None:
        check_known(weights, (*KINDS, COMPRESSED), "accelerate: unknown weights")
    model.__dict__[STATE] = state = State()
    taken: Counter[str] = Counter()
    left: dict[str, str] = {}
    _attention(model, state, taken, left)
    outputs = {id(submodel.get_output_embeddings()) for submodel in _models(model)}
    for name, module in model.named_modules():
        row = known().get(code(type(module).forward) or ())
        if row is None:
            if reason := _unknown(module):
                left.setdefault(name, reason)
            continue
        if put_in(module) is not None:
            left[name] = "its forward was replaced already"
        elif not (gap := difference(module, row)) <= TOLERANCE:
            left[name] = f"{row.kind} that differs from ours by {gap:.1g} of the largest number"
        else:
            is_output = row.forward is linear_forward and id(module) in outputs
            put(module, output_forward if is_output else row.forward)
            taken[row.kind] += 1
            if is_output:
                taken["cross entropy in chunks"] += 1
            # layers of blocks have a number in their name, as "model.layers.0.mlp.up_proj"; the output layer has none,
            # and is included only if nothing is rounded
            takes = weights == COMPRESSED or any(part.isdigit() for part in name.split("."))
            if weights is not None and row.forward is linear_forward and takes:
                products.put_beside(module, weights)
                taken[f"product of {weights} weights"] += 1
    if weights is not None:
        state.trained = [p for p in model.parameters() if p.requires_grad]
        model.requires_grad_(False)
    for submodel in _models(model):
        if hasattr(submodel, "_prepare_cache_for_generation"):
            submodel.__dict__["_prepare_cache_for_generation"] = MethodType(_prepare_growing_cache, submodel)
            taken["cache that grows in place"] += 1
            _steps(model, submodel.base_model, taken, left)
    return Report(dict(taken), left)


def restore(model: nn.Module) -> None:
    """Restores the model to its state before `accelerate`: the same modules, parameters, forwards and config.

    Raises ConfigError for a model that is not accelerated."""
    state = model.__dict__.get(STATE)
    if state is None:
        raise ConfigError("the model is not accelerated, so there is nothing to restore")
    for module in model.modules():
        products.take_back(module)
        for name in (STEPS, "_prepare_cache_for_generation"):
            module.__dict__.pop(name, None)
    _restore_attention(state)
    for parameter in state.trained:
        parameter.requires_grad_(True)
    del model.__dict__[STATE]


def _attention(model: nn.Module, state: State, taken: Counter[str], left: dict[str, str]) -> None:
    """Sets headway's attention in each config whose layers all support it, and undoes that if the model fails to run
    with it."""
    by_config: dict[int, dict[str, Any]] = {}
    for name, layer in attention_layers(model).items():
        by_config.setdefault(id(layer.config), {})[name] = layer
    ours: dict[str, Any] = {}
    for named in by_config.values():
        reasons = {name: layers.unsupported_reason(layer) for name, layer in named.items()}
        refused = {name: reason for name, reason in reasons.items() if reason is not None}
        if refused:
            left |= {name: refused.get(name, "another layer of its config is left") for name in named}
            continue
        ours |= named
        config = next(iter(named.values())).config
        state.attention.append((config, config._attn_implementation))
        config._attn_implementation_internal = NAME
    error = next(filter(None, map(layers.trial_error, _outermost(model))), None) if ours else None
    if error is not None:
        left |= dict.fromkeys(ours, error)
        _restore_attention(state)
        return
    if ours:
        taken["attention"] += len(ours)
    for layer in ours.values():
        if (forward := layers.rotary_forward(layer)) is not None and put_in(layer) is None:
            put(layer, forward)
            taken["rotary"] += 1


def _restore_attention(state: State) -> None:
    for config, name in state.attention:
        config._attn_implementation_internal = name
    state.attention.clear()


def _steps(model: nn.Module, stack: Any, taken: Counter[str], left: dict[str, str]) -> None:
    """Lets the stack compute decoding steps in one native call, if results are equal."""
    name = next((name for name, module in model.named_modules() if module is stack), "")
    reason = unequal_reason(stack) if put_in(stack) is None else "its forward was replaced already"
    if reason is None:
        put(stack, stack_forward)
        taken["step of one token in one native call"] += 1
    else:
        left[name] = reason
        stack.__dict__.pop(STEPS, None)


def _prepare_growing_cache(
    self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any
) -> None:
    """Replaces `_prepare_cache_for_generation`: the layers of a new cache grow in place."""
    existing = {id(value) for value in model_kwargs.values()}
    type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args)
    for value in model_kwargs.values():
        if isinstance(value, Cache) and id(value) not in existing:
            growing(getattr(value, "self_attention_cache", value))


def _models(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, PreTrainedModel))


def _outermost(model: nn.Module) -> Iterator[PreTrainedModel]:
    """Yields the models of `transformers` that are not part of another."""
    if isinstance(model, PreTrainedModel):
        yield model
    else:
        for part in model.children():
            yield from _outermost(part)


def _unknown(module: nn.Module) -> str | None:
    """Returns why a module that computes something itself is left; None for containers and modules not worth
    listing."""
    has_parts = next(module.children(), None) is not None
    owns = any(True for _ in module.parameters(recurse=False))
    if is_unchanged(module) or (has_parts and not owns) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return None
    return f"unknown class {type(module).__name__}"
