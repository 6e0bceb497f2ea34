"""Converts quantized layers between a family's names and ours: codes, scales and zero points move as rows of weights
do."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headway.checkpoints.heads import in_pairing_of
from headway.checkpoints.hf.layouts.rules import Rule, TensorNames
from headway.checkpoints.hf.layouts.tensors import linear_rules, rules_by_name
from headway.checkpoints.quantized.packed import PackedLayer, leaf_forms, to_leaves
from headway.checkpoints.quantized.scheme import Scheme, written_config
from headway.errors import CheckpointError
from headway.models import Model, ModelSpec, blank
from headway.native.panels import Panels
from headway.nn import Keeps, Linear, linears
from headway.nn.weights import Rounded
from headway.quantization import QuantizedMatrix
from headway.storage.lazy import Form, LazyTensors, lazy, with_values


def own_layers(
    layers: Mapping[str, PackedLayer], names: TensorNames, spec: ModelSpec, tensors: LazyTensors, path: Path
) -> dict[str, PackedLayer]:
    """Returns the quantized layers of the checkpoint `tensors`, under our names.

    Raises CheckpointError for a quantized layer that is neither linear nor an embedding, or is stored [in, out], and
    for one expert's matrix if the family's files hold those of all experts in one tensor."""
    rules = rules_by_name(names, spec, tensors)
    with torch.device("meta"):
        linear = linear_rules(
            rules, {name for name, m in blank(spec).named_modules() if isinstance(m, Keeps)}
        )
    together = next((rule.theirs for rule in rules.values() if rule.stacked), None)
    ours: dict[str, PackedLayer] = {}
    for theirs, layer in layers.items():
        if f"{theirs}.weight" not in rules and ".experts." in theirs and together is not None:
            raise CheckpointError(
                f"{path}: {theirs} is the quantized matrix of one expert, but checkpoints of {spec.family} have all "
                f"experts in one tensor ({together}), quantized in mxfp4 only; use an mxfp4 or an unquantized "
                "checkpoint"
            )
        if f"{theirs}.weight" not in rules:
            continue  # of another head, or unexpected, which `imported` reports
        if (rule := rules[f"{theirs}.weight"]).changes and not rule.keeps_rows:
            continue  # is dequantized: groups of codes cannot follow a change of columns
        if theirs not in linear or linear[theirs].transposed:
            raise CheckpointError(
                f"{path}: {theirs} is quantized, but 8-bit and 4-bit weights are supported only in linear layers and "
                "embeddings stored as [out, in]"
            )
        ours |= {name: _part(layer, linear[theirs], i) for i, name in enumerate(linear[theirs].layers)}
    return ours


def without_empty_biases(
    tensors: LazyTensors, layers: Iterable[str], names: TensorNames, spec: ModelSpec
) -> LazyTensors:
    """Returns the tensors of a folder without the all-zero biases that AutoGPTQ writes for layers that have none."""
    rules = rules_by_name(names, spec, tensors)
    extra = {
        name for name in (f"{layer}.bias" for layer in layers) if name in tensors.forms and name not in rules
    }
    empty = {name for name in extra if not tensors[name].any()}
    return tensors.renamed({name: name for name in tensors if name not in empty})


def quantized_state(model: Model) -> tuple[dict[str, Tensor], dict[str, Panels]]:
    """Returns a model's state dict, with weights on the device "meta" for its quantized layers, and the panels of these
    layers. A quantized embedding is dequantized, since folders cannot hold its codes.

    Raises CheckpointError for linear layers that are quantized in a form that folders cannot hold."""
    state, panels = model.state_dict(), dict[str, Panels]()
    dtype = next(model.parameters()).dtype
    for name, layer in model.named_modules():
        if not isinstance(layer, Keeps) or not layer.coded:
            continue
        weight = layer.kept
        for buffer in weight.tensors():
            del state[f"{name}.{buffer}"]
        if not isinstance(layer, Linear):
            state[f"{name}.weight"] = weight.dequantize(dtype)
        elif isinstance(weight, Rounded):
            panels[name] = weight.panels
            state[f"{name}.weight"] = torch.empty(weight.shape, device="meta", dtype=dtype)
        else:
            raise CheckpointError(
                f"{name} has weights in {weight.name}, but a folder can store int8 and int4 only; load the model with "
                "dequantize=True to save it unquantized"
            )
    return state, panels


def packed_state(
    state: Mapping[str, Tensor],
    layers: Mapping[str, Panels],
    names: TensorNames,
    frm: ModelSpec,
    spec: ModelSpec,
) -> tuple[LazyTensors, dict[str, Any]]:
    """Returns the tensors `state` of a folder with packed codes, scales and zero points instead of the weights of
    quantized layers, and the `quantization_config`. `layers` are in the rotary pairing of `frm`, the folder in that of
    `spec`.

    Raises CheckpointError for layers that are quantized in different ways, and for a layer of the folder that is
    quantized only in part, stored [in, out], split by transformers, or one tensor with other experts."""
    scheme, output = _scheme(layers), names.outputs.get(spec.head.task)
    with torch.device("meta"):
        model = blank(spec)
    plain = {name for name, module in model.named_modules() if type(module) is nn.Linear}  # gates of experts
    rules = rules_by_name(names, spec)
    linear = linear_rules(rules, plain.union(linears(model)))
    forms = lazy(state).forms
    dtype = next(iter(forms.values())).dtype
    quantized: dict[str, Rule] = {}
    ignore = [
        name for name in (rule.removesuffix(".weight") for rule in rules) if name.endswith(names.linears)
    ]
    for theirs, rule in linear.items():
        coded = [name in layers for name in rule.layers]
        split = names.split and len(coded) > 1
        if any(coded) and (not all(coded) or rule.transposed or split):
            raise CheckpointError(
                f"{theirs}.weight cannot be saved in 8 or 4 bits: checkpoints of {spec.family} store "
                f"{', '.join(rule.layers)} as one layer, or as [in, out]; "
                + (
                    "transformers splits it, and does not read it quantized"
                    if split
                    else "quantize all of them, or none"
                )
            )
        if any(coded):
            quantized[theirs] = rule
        else:
            ignore.append(output if output is not None and rule.layers == ("lm_head",) else theirs)
    if stacked := layers.keys() - {name for rule in quantized.values() for name in rule.layers}:
        raise CheckpointError(
            f"{min(stacked)} cannot be saved in 8 or 4 bits: checkpoints of {spec.family} store it in one tensor with "
            "other experts; save the model before it is quantized"
        )
    if output is not None and "lm_head" not in layers:
        ignore.append(output)
    unquantized = lazy(state).renamed(
        {name: name for name in forms if name.removesuffix(".weight") not in quantized}
    )
    leaves = {
        f"{theirs}.{leaf}": form
        for theirs in quantized
        for leaf, form in leaf_forms(forms[f"{theirs}.weight"].shape, scheme, dtype).items()
    }

    def moved(weight: str) -> QuantizedMatrix:
        matrix = layers[weight.removesuffix(".weight")].unpack()
        return matrix.moved(lambda part: in_pairing_of(spec, {weight: part}, frm)[weight])

    def make(name: str) -> Tensor:
        theirs, _, leaf = name.rpartition(".")
        parts = [moved(weight) for weight in quantized[theirs].ours]
        return to_leaves(_joined(parts, quantized[theirs]), scheme, dtype)[leaf]

    return with_values(unquantized, leaves, make), written_config(scheme, [*dict.fromkeys(ignore)])


def _scheme(layers: Mapping[str, Panels]) -> Scheme:
    """Returns the quantization that all layers share."""
    bits = {panels.bits for panels in layers.values()}
    groups = {panels.group for panels in layers.values() if panels.has_scales}
    whole = [panels for panels in layers.values() if not panels.has_scales]
    group = groups.pop() if groups else None
    if len(bits) > 1 or groups or (group is not None and any(panels.inputs > group for panels in whole)):
        raise CheckpointError(
            "the layers of this model are quantized with different bits or group sizes, but a folder can store one of "
            "each; quantize all layers alike"
        )
    zeros = any(panels.has_zeros for panels in layers.values())
    return Scheme("pack-quantized", bits.pop(), group, zeros)


def _joined(parts: list[QuantizedMatrix], rule: Rule) -> QuantizedMatrix:
    zero = (
        None
        if all(part.zero is None for part in parts)
        else rule.join([part.zero_or_middle for part in parts])
    )
    return replace(
        parts[0],
        codes=rule.join([part.codes for part in parts]),
        scale=rule.join([part.scale for part in parts]),
        zero=zero,
    )


def _part(layer: PackedLayer, rule: Rule, i: int) -> PackedLayer:
    """Returns the rows of a stored layer that belong to our layer `i` of those that it fuses."""
    outputs, inputs = layer.form.shape
    form = Form((rule.rows[i] if rule.rows else outputs, inputs), layer.form.dtype)
    return PackedLayer(form, layer.kept, lambda: layer.read().moved(lambda rows: rule.split(rows)[i]))
