"""Converts GGUF's metadata to `ModelSpec` and back, by the layouts of its architectures."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from headway.checkpoints.formats.gguf.architectures import ARCHITECTURES
from headway.checkpoints.formats.gguf.folded import folded
from headway.checkpoints.formats.gguf.layout import (
    BIASES,
    MIXTURES,
    SIZES,
    SPARSE,
    TIED_VALUES,
    WINDOWED,
)
from headway.checkpoints.formats.gguf.mixers import NORM
from headway.checkpoints.formats.gguf.rope import FACTORS, decimal, rounded
from headway.checkpoints.hf.config import own_facts
from headway.checkpoints.hf.config_keys import OURS, Inexpressible, reading
from headway.checkpoints.hf.layouts.base import Layout, differing
from headway.checkpoints.hf.layouts.rules import TensorNames
from headway.errors import CheckpointError, ConfigError, check_known
from headway.models import ModelSpec
from headway.patterns import Causal
from headway.storage.gguf import GGUF, Value
from headway.storage.lazy import LazyTensors

PARTS, EMBEDDING, OUTPUT = "split.count", "token_embd.weight", "output.weight"
FACTS: Mapping[str, tuple[type, ...]] = {
    "family": (str,),
    "max_context": (int,),
    **dict.fromkeys(
        ("dropout", "attention_dropout", "activation_dropout", "final_dropout", "init_std"), (float,)
    ),
}
"""Fields of a spec that GGUF has no key for and other readers can ignore; written under "headway."."""


def names_in(file: GGUF) -> TensorNames:
    """Returns the tensor names of the architecture of a file."""
    return ARCHITECTURES[str(file.metadata["general.architecture"])].tensors


def read_spec(file: GGUF, numbers: LazyTensors) -> ModelSpec:
    """Returns the spec that a file describes; `numbers` are its dequantized tensors.

    Raises CheckpointError for a file that is one of several parts or has no embedding, and, naming key and value, for
    an architecture that is unknown, for keys that are missing, unknown or of another type, and for values that
    contradict each other."""
    metadata, path = file.metadata, file.path
    if metadata.get(PARTS, 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata[PARTS]} parts; merge them first: llama-gguf-split --merge FIRST OUT"
        )
    if EMBEDDING not in numbers or len(numbers.forms[EMBEDDING].shape) != 2:
        raise CheckpointError(
            f"{path} has no matrix {EMBEDDING}: it is not a language model, or has a vocabulary only"
        )
    name, vocab = metadata.get("general.architecture"), numbers.forms[EMBEDDING].shape[0]
    name = str(name)[:80]
    check_known(name, ARCHITECTURES, f"{path}: there is no general.architecture", error=CheckpointError)
    layout, size = ARCHITECTURES[name], f"{name}.{SIZES['vocab']}"
    biases = {field: BIASES[field] in numbers for field in BIASES.keys() & layout.keys.keys()}
    metadata = {key: decimal(value) if isinstance(value, float) else value for key, value in metadata.items()}
    config = {
        size: vocab,
        "tied": OUTPUT not in numbers,
        FACTORS: numbers.get(FACTORS),
        NORM: NORM in numbers,
        # whether any layer has attn_k.weight and no attn_v.weight
        TIED_VALUES: any(n.replace("attn_k.w", "attn_v.w") not in numbers for n in numbers),
        **biases,
        **_below(metadata, f"{name}."),
    }
    facts = {key.removeprefix(f"{OURS}."): value for key, value in _below(metadata, f"{OURS}.").items()}
    with reading(path):
        if config[size] != vocab:
            raise ConfigError(f"{size} is {config[size]}, but {EMBEDDING} has {vocab} rows")
        return _spec(layout, config, own_facts({OURS: facts}, FACTS))


def _below(metadata: Mapping[str, Value], beginning: str) -> dict[str, Any]:
    return {key: value for key, value in metadata.items() if key.startswith(beginning)}


def _spec(layout: Layout, config: Mapping[str, Any], facts: Mapping[str, Any]) -> ModelSpec:
    (name,) = layout.architectures
    # a list with one value for each layer is accepted if all are equal
    layers = config.get(f"{name}.{SIZES['layers']}")
    uniform = {
        key: value[0]
        for key in (f"{name}.{end}" for end in (SIZES["heads"], SIZES["hidden"]))
        if isinstance(value := config.get(key), Sequence) and len(value) == layers and len({*value}) == 1
    }
    spec = layout.spec({**config, **uniform})
    windowed = any(pattern != Causal() for pattern in spec.patterns)
    family = WINDOWED.get(layout.family, spec.family) if windowed else spec.family
    family = MIXTURES.get(layout.family, family) if any(spec.experts) else family
    return replace(spec, **{"family": family, **facts})


def architecture_of(spec: ModelSpec) -> str:
    """Returns the architecture that a spec is written as. Raises ConfigError for a family that has none."""
    names = {
        family: name for name, layout in ARCHITECTURES.items() for family in (layout.family, *layout.also)
    }
    if spec.family not in names:
        raise ConfigError(
            f"a {spec.family} cannot be written as GGUF; supported families are {', '.join(names)}"
        )
    name = names[spec.family]
    return SPARSE.get(name, name) if any(spec.experts) else name


def write_spec(spec: ModelSpec) -> tuple[dict[str, Any], Tensor | None]:
    """Returns the keys of a spec, whose positions must have the pairing of its architecture, and the divisors of its
    rotary frequencies, or None. Reading them again gives the spec, except for coefficients of training losses and for
    what is folded into weights (`folded`).

    Raises ConfigError, naming the fields, for a spec that the keys cannot express."""
    name = architecture_of(spec)
    layout = ARCHITECTURES[name]
    plain = (experts and replace(experts, aux_loss_coef=0.0, z_loss_coef=0.0) for experts in spec.experts)
    spec = replace(spec, experts=tuple(plain))
    try:
        spec, _ = folded(spec)
        config = layout.config(spec)
    except Inexpressible as error:
        raise ConfigError(f"GGUF's {name} cannot express the {error} of this {spec.family}") from error
    config = {key: value for key, value in config.items() if value is not None}
    keys = _below(config, f"{name}.")
    stored = {key: _given_back(value) for key, value in config.items()}
    with reading(Path("the file")):
        back = _spec(layout, stored, {})
    facts = {field: getattr(spec, field) for field in differing(spec, back) if field in FACTS}
    lost = differing(spec, replace(back, **{field: _given_back(value) for field, value in facts.items()}))
    if lost:
        raise ConfigError(f"GGUF's {name} cannot express the {', '.join(lost)} of this {spec.family}")
    return {
        "general.architecture": name,
        **keys,
        **{f"{OURS}.{field}": value for field, value in facts.items()},
    }, config.get(FACTORS)


def _given_back(value: Any) -> Any:
    """Returns a value after a round trip through a file, which holds float32."""
    return decimal(rounded(value)) if isinstance(value, float) else value
