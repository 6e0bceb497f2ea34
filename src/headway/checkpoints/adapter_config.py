"""Reads and writes PEFT's `adapter_config.json`: which layers are adapted, and with which LoRA settings."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from headway.errors import CheckpointError, as_error, did_you_mean
from headway.nn import Lora

CONFIG = "adapter_config.json"
KNOWN = (
    *("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern", "target_modules"),
    *("use_rslora", "use_dora"),
    # these have no effect here
    *("auto_mapping", "base_model_name_or_path", "fan_in_fan_out", "inference_mode", "megatron_core"),
    *("peft_version", "qalora_group_size", "revision", "runtime_config", "task_type"),
)
ONLY: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # other initializations change the weights of the base model
    "init_lora_weights": (True, "gaussian", "orthogonal", "eva"),
}
USUAL = 8  # PEFT's default for rank and alpha


def read_config(config: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Lora]:
    """Returns the LoRA settings of each adapted layer, by name; `modules` are the linear layers of the model's blocks.

    Keys whose value is null, false or empty are ignored. Raises CheckpointError for other keys that are unknown or
    unsupported, and if the targets match none of the modules."""
    _check_keys(config)
    return {name: _lora(config, name) for name in _targets(config, list(modules))}


def written_config(loras: Mapping[str, Lora], others: Iterable[str]) -> dict[str, Any]:
    """Returns the keys of adapter_config.json that say how modules are adapted.

    `others` are the names of all modules of the model: if a short target name would match one that is not adapted, the
    full names of the adapted modules are written instead. rsLoRA, DoRA and dropout are taken from the first module,
    since the format has one value for all."""
    ranks = Counter(lora.rank for lora in loras.values())
    alphas = Counter(lora.alpha for lora in loras.values())
    (rank, _), (alpha, _) = ranks.most_common(1)[0], alphas.most_common(1)[0]
    first = next(iter(loras.values()))
    targets = sorted({name.rpartition(".")[2] for name in loras})
    if any(_matches(targets, name) for name in others if name not in loras):
        targets = sorted(loras)
    return {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": first.dropout,
        "target_modules": targets,
        "rank_pattern": {name: lora.rank for name, lora in loras.items() if lora.rank != rank},
        "alpha_pattern": {name: lora.alpha for name, lora in loras.items() if lora.alpha != alpha},
        "use_rslora": first.stabilized,
        "use_dora": first.magnitude,
        "bias": "none",
        "inference_mode": True,
    }


def _check_keys(config: Mapping[str, Any]) -> None:
    for key, value in {"peft_type": None, **config}.items():
        if key in ONLY:
            if value not in ONLY[key] and (value or key == "peft_type"):
                accepted = " or ".join(map(repr, ONLY[key]))
                raise CheckpointError(f'"{key}" is {value!r}, which is unsupported; accepted is {accepted}')
        elif value and key not in KNOWN:
            hint = did_you_mean(key, [*KNOWN, *ONLY])
            raise CheckpointError(
                f'"{key}" is {value!r}{hint}, which is unsupported: only LoRA adapters of linear layers in the blocks '
                "are read"
            )


def _targets(config: Mapping[str, Any], modules: Sequence[str]) -> list[str]:
    """Returns the modules that the config adapts."""
    targets = config.get("target_modules")
    all_names = isinstance(targets, list) and all(isinstance(target, str) for target in targets)
    if not targets or not (all_names or isinstance(targets, str)):
        raise CheckpointError(
            f'"target_modules" must be a list of module names or a regular expression, got {targets!r}'
        )
    if targets == "all-linear":
        return list(modules)
    fits: Callable[[Any, str], bool] = _fits if isinstance(targets, str) else _matches
    adapted = [name for name in modules if fits(targets, name)]
    if not adapted:
        leaves = sorted({name.rpartition(".")[2] for name in modules})
        raise CheckpointError(
            f'"target_modules" {targets!r} match no linear layer in the blocks of this model; the adapter belongs to '
            f"another model (layers here: {', '.join(leaves)})"
        )
    return adapted


def _matches(targets: Sequence[str], module: str) -> bool:
    return any(module == target or module.endswith(f".{target}") for target in targets)


def _fits(pattern: str, module: str) -> bool:
    with as_error(CheckpointError, f"{pattern!r} is no regular expression", re.error):
        return re.fullmatch(pattern, module) is not None


def _lora(config: Mapping[str, Any], module: str) -> Lora:
    """Returns the LoRA settings of a module."""
    numbers = {
        "rank": _by_pattern(config, "rank_pattern", module, config.get("r", USUAL)),
        "alpha": _by_pattern(config, "alpha_pattern", module, config.get("lora_alpha", USUAL)),
        "dropout": config.get("lora_dropout", 0.0),
    }
    for field, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int if field == "rank" else int | float):
            kind = "whole number" if field == "rank" else "number"
            raise CheckpointError(f"the {field} of {module} must be a {kind}, got {value!r}")
    return Lora(**numbers, stabilized=bool(config.get("use_rslora")), magnitude=bool(config.get("use_dora")))


def _by_pattern(config: Mapping[str, Any], key: str, module: str, usual: Any) -> Any:
    """Returns the value of the first pattern that matches the end of the module's name, or `usual` if none does."""
    patterns = config.get(key) or {}
    if not isinstance(patterns, dict):
        raise CheckpointError(f'"{key}" must be an object, got {patterns!r}')
    return next(
        (value for pattern, value in patterns.items() if _fits(rf"(.*\.)?({pattern})", module)), usual
    )
