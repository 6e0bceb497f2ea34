"""Reads PEFT's adapters strictly and writes them atomically.

    adapter_config.json          peft_type LORA, r, lora_alpha, target_modules, rank_pattern, use_dora, ...
    adapter_model.safetensors    base_model.model.MODULE.lora_A.weight [R, I], .lora_B.weight [O, R],
                                 .lora_magnitude_vector [O]

(PEFT, docs/source/developer_guides/checkpoint.md.) MODULE is the layer's name in transformers. Adapters of fused layers
(queries, keys and values in one matrix) are split by rows into adapters of our layers. When written, parts with
different matrices A become one adapter whose rank is the sum of theirs and whose B is block-diagonal: the same
function. The rotary pairing is converted as for weights.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headway.checkpoints.adapter_config import CONFIG, read_config, written_config
from headway.checkpoints.bases import BASE, GENERATION, WEIGHTS, Base
from headway.checkpoints.folder import TOKENIZER_FILES
from headway.checkpoints.heads import in_pairing_of
from headway.checkpoints.hf.layouts import layouts_for
from headway.checkpoints.hf.layouts.rules import Rule, own_shapes
from headway.checkpoints.hf.layouts.tensors import linear_rules, rules_by_name
from headway.checkpoints.saving import AnyTokenizer, check_target
from headway.errors import CheckpointError
from headway.models import Model, ModelSpec, blank
from headway.nn import Adapter, Lora, attach, block_linears
from headway.nn.lora import merged_weight
from headway.positions import in_pairing
from headway.storage.dtypes import USABLE, dtype_name
from headway.storage.files import atomic_folder, current_folder, json_text, write_file
from headway.storage.lazy import Form, changed, compare
from headway.storage.reading import naming, read_json
from headway.storage.safetensors import write_safetensors
from headway.storage.tensors import open_tensors

PREFIX = "base_model.model."
PEFT_TASKS: Mapping[str, str] = {"decoder": "CAUSAL_LM", "encoder-decoder": "SEQ_2_SEQ_LM"}
A, B, MAGNITUDE = "lora_A.weight", "lora_B.weight", "lora_magnitude_vector"


def load_adapter(path: str | Path, spec: ModelSpec) -> Adapter:
    """Returns the adapter in a folder, for a model of `spec`.

    Keys of the config whose value is null, false or empty are ignored. Raises CheckpointError for files that are broken
    or missing, for keys that are unknown or unsupported, and for tensors that are missing, unexpected or of another
    shape than the model and the config imply, listed together."""
    path = Path(path)
    folder = current_folder(path)
    if not (folder / CONFIG).exists():
        reason = "no such folder" if not folder.is_dir() else f"it has no {CONFIG}"
        raise CheckpointError(f"{path} is not an adapter: {reason}")
    config, stored = read_json(folder / CONFIG), open_tensors(folder / WEIGHTS)
    family_spec, modules = _theirs(spec, frozenset(stored.forms))
    with naming(folder / CONFIG):
        loras = read_config(config, modules)
    _compare(stored.forms, loras, modules, family_spec, path)
    layers: dict[str, Lora] = {}
    tensors: dict[str, Tensor] = {}
    for name, lora in loras.items():
        module = modules[name]
        parts = module.split_rows(stored[f"{PREFIX}{name}.{B}"])
        for layer, b in zip(module.layers, parts, strict=True):
            layers[layer] = lora
            tensors[f"{layer}.{A}"], tensors[f"{layer}.{B}"] = stored[f"{PREFIX}{name}.{A}"], b
        if lora.magnitude:
            norms = module.split_rows(stored[f"{PREFIX}{name}.{MAGNITUDE}"])
            tensors |= {f"{layer}.{MAGNITUDE}": m for layer, m in zip(module.layers, norms, strict=True)}
    return Adapter(layers, in_pairing_of(spec, tensors, family_spec))


def attach_folders(model: Model, folders: Sequence[str | Path]) -> None:
    """Attaches the adapters in `folders` to a model, in its dtype; their outputs are summed. Raises as `load_adapter`
    does, and ConfigError if a folder is listed twice."""
    dtype = next(model.parameters()).dtype  # quantized weights have no floating-point dtype themselves
    for folder in folders:
        attach(model, load_adapter(folder, model.spec), str(folder).replace(".", "_"), dtype=dtype)


def save_adapter(
    path: str | Path,
    adapter: Adapter,
    spec: ModelSpec,
    *,
    base: Base | None = None,
    tokenizer: AnyTokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> None:
    """Writes an adapter as a folder that `load_adapter` and PEFT read, atomically.

    `base` is the model that the adapter was trained on (`Base.of(FOLDER)`); its fingerprint is stored with the adapter.
    A model that is loaded with the adapter uses the `tokenizer` and the `generation` settings (generation_config.json)
    that are saved here, if any.

    Raises CheckpointError if `path` exists and is not empty, unless `overwrite` is set, and for adapters that the
    format cannot express: parts of a fused layer that are adapted in different ways."""
    check_target(path, overwrite)
    family_spec, modules = _theirs(spec)
    tensors, loras = in_pairing_of(family_spec, adapter.tensors, spec), dict[str, Lora]()
    stored: dict[str, Tensor] = {}
    for name, module in modules.items():
        if adapted := [layer for layer in module.layers if layer in adapter.layers]:
            loras[name], leaves = _joined(name, module, adapter.layers, adapted, tensors)
            stored |= {f"{PREFIX}{name}.{leaf}": value for leaf, value in leaves.items()}
    check_named(adapter, spec)
    rules = rules_by_name(layouts_for(spec.family)[0].tensors, family_spec)
    layers = {name.removesuffix(".weight") for name in rules}
    config = {
        "base_model_name_or_path": None if base is None else str(base.folder),
        "task_type": PEFT_TASKS.get(spec.kind),
        **written_config(loras, layers),
        "fan_in_fan_out": modules[next(iter(loras))].transposed,
    }
    mine = (CONFIG, WEIGHTS, GENERATION)
    with atomic_folder(path, keep=lambda n: n not in mine and not TOKENIZER_FILES.match(n)) as folder:
        write_file(folder / CONFIG, json_text(config))
        write_safetensors(folder / WEIGHTS, stored, None if base is None else {BASE: base.fingerprint})
        if tokenizer is not None:
            tokenizer.save(folder)
        if generation is not None:
            write_file(folder / GENERATION, json_text(dict(generation)))


def check_named(adapter: Adapter, spec: ModelSpec) -> None:
    """Raises CheckpointError if the adapter adapts layers that have no name in the files of the spec's family."""
    _, modules = _theirs(spec)
    if lost := sorted(
        adapter.layers.keys() - {layer for module in modules.values() for layer in module.layers}
    ):
        more = " ..." if len(lost) > 5 else ""
        raise CheckpointError(
            f"the adapter of {', '.join(lost[:5])}{more} cannot be saved: checkpoints of {spec.family} have no name "
            "for these layers; leave them out of adapter_targets"
        )


def merged_state(state: Mapping[str, Tensor], adapters: Sequence[Adapter]) -> Mapping[str, Tensor]:
    """Returns a model's weights with adapters merged in, computed in float32 and rounded once to the weight's dtype."""

    def change(name: str, value: Tensor) -> Tensor:
        layer = name.removesuffix(".weight")
        parts = [
            adapter.part(layer, value.device, torch.float32)
            for adapter in adapters
            if layer in adapter.layers
        ]
        return merged_weight(value, parts) if parts and name != layer else value

    return changed(state, change)


@lru_cache(maxsize=2)
def _theirs(spec: ModelSpec, stored: frozenset[str] | None = None) -> tuple[ModelSpec, dict[str, Rule]]:
    """Returns the spec in the rotary pairing of its family's files, and the rules of adaptable layers by their names in
    transformers.

    `stored` are the tensor names of an adapter, which may have been trained with another head."""
    layout = layouts_for(spec.family)[0]
    family_spec = replace(spec, positions=in_pairing(spec.positions, layout.pairing))
    names = None if stored is None else [name.removeprefix(PREFIX) for name in stored]
    with torch.device("meta"):
        layers = block_linears(blank(family_spec))
    return family_spec, linear_rules(rules_by_name(layout.tensors, family_spec, names), layers)


def _joined(
    name: str,
    module: Rule,
    adapted: Mapping[str, Lora],
    layers: Sequence[str],
    tensors: Mapping[str, Tensor],
) -> tuple[Lora, dict[str, Tensor]]:
    """Returns the adapter of one layer of transformers, joined from the adapters of our layers that it fuses.

    Two layers of ranks 2 and 3 with different A give A = [A1; A2], [5, I], and B = [[B1, 0], [0, B2]]:
    B A = [B1 A1; B2 A2]."""
    loras = {adapted[layer] for layer in layers}
    first = adapted[layers[0]]
    partly = first.magnitude and len(layers) < len(module.layers)
    if len({replace(lora, rank=1, alpha=lora.scale) for lora in loras}) > 1 or partly:
        raise CheckpointError(
            f"{name} is one layer in PEFT's files, which fuses {', '.join(module.layers)}: these need the same LoRA "
            "settings, and with DoRA magnitudes all of them must be adapted; got "
            f"{', '.join(map(str, loras))} on {', '.join(layers)}"
        )
    a, b = [tensors[f"{layer}.{A}"] for layer in layers], [tensors[f"{layer}.{B}"] for layer in layers]
    shared = all(torch.equal(matrix, a[0]) for matrix in a)
    rank = len(a[0]) if shared else sum(map(len, a))
    rows, parts = module.rows or (len(b[0]),), dict(zip(layers, b, strict=True))
    blocks: Sequence[Tensor] = [
        parts.get(layer, b[0].new_zeros(n, rank if shared else 0))
        for layer, n in zip(module.layers, rows, strict=True)
    ]
    if not shared:
        blocks = torch.block_diag(*blocks).split(rows)
    alpha = first.scale * (rank**0.5 if first.stabilized else rank)
    joined = {A: (a[0] if shared else torch.cat(a)).contiguous(), B: module.join_rows(blocks)}
    if first.magnitude:
        joined[MAGNITUDE] = module.join_rows([tensors[f"{layer}.{MAGNITUDE}"] for layer in module.layers])
    return first if len(module.layers) == 1 else replace(first, rank=rank, alpha=alpha), joined


def _compare(
    forms: Mapping[str, Form],
    loras: Mapping[str, Lora],
    modules: Mapping[str, Rule],
    spec: ModelSpec,
    path: Path,
) -> None:
    """Raises CheckpointError that lists the tensors that are missing, unexpected or of another shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, lora in loras.items():
        weights = [own_shapes(spec)[weight].shape for weight in modules[name].ours]
        rows = sum(shape[0] for shape in weights)
        shapes[f"{PREFIX}{name}.{A}"] = (lora.rank, weights[0][1])
        shapes[f"{PREFIX}{name}.{B}"] = (rows, lora.rank)
        if lora.magnitude:
            shapes[f"{PREFIX}{name}.{MAGNITUDE}"] = (rows,)
    faults = [
        f"dtype: {name} is {dtype_name(form.dtype)}, and the numbers of an adapter are floating point"
        for name, form in forms.items()
        if name in shapes and form.dtype not in USABLE
    ]
    compare(
        *(path, forms, shapes, forms.keys() - shapes.keys()),
        fault="the adapter does not fit this model",
        says=f"this model and {CONFIG} say",
        more=faults,
    )
