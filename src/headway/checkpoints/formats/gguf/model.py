"""The tensors and token ids of a model in a GGUF file, read lazily; and writing whole models."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from headway.block_quantization import CodedMatrix
from headway.checkpoints.formats.gguf.architectures import ARCHITECTURES
from headway.checkpoints.formats.gguf.folded import folded, times, with_all_rows
from headway.checkpoints.formats.gguf.gemma import unused_keys
from headway.checkpoints.formats.gguf.metadata import architecture_of, write_spec
from headway.checkpoints.formats.gguf.rope import FACTORS
from headway.checkpoints.formats.gguf.writer import write_gguf
from headway.checkpoints.hf.config_keys import ConfigReader, reading
from headway.checkpoints.hf.layouts.rules import Rule
from headway.checkpoints.hf.layouts.tensors import exported, rules_by_name
from headway.checkpoints.quantized.packed import PackedLayer
from headway.errors import CheckpointError
from headway.models import FAMILIES, ModelSpec
from headway.storage.dtypes import dtype_name
from headway.storage.gguf import GGUF
from headway.storage.gguf_blocks import BY_DTYPE, CODED, F32, BlockType, codes, dequantize
from headway.storage.lazy import Form, Made, changed, lazy, with_values
from headway.storage.tensors import PIECE, Tensors

TOKENIZER = "tokenizer.ggml."
SINGLE = {"bos_token_id": "bos_token_id", "pad_token_id": "padding_token_id"}
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of the tokens that end a text: the first is the tokenizer's own, the others are for chats."""
FILE_TYPES: Mapping[str, int] = {
    "F32": 0,
    "F16": 1,
    "BF16": 32,
    "Q4_0": 2,
    "Q8_0": 7,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
}
"""general.file_type: how most matrices are stored (llama.h, `llama_ftype`)."""
QUANTIZATION_VERSION = 2
EXACT = (
    *("ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "ssm_a", "ssm_d", "norm.weight"),
    *("ssm_conv1d.weight", "shortconv.conv.weight"),
    *("mlp.gate.weight", "mlp.shared_expert_gate.weight", ".conv", "_conv"),
    *("altup_correct_coef.weight", "altup_predict_coef.weight", "correction_coefs", "prediction_coefs"),
)
"""Suffixes of names, GGUF's and ours, of matrices that are always F32."""
Values = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]


def coded_layers(file: GGUF, stored: Tensors) -> dict[str, PackedLayer]:
    """Returns the layers whose matrices are stored as quantization codes, by their names in the file."""
    return {
        name.removesuffix(".weight"): PackedLayer(
            Form(entry.numbers, torch.float32), entry.type.name, partial(_codes, stored, name, entry.type)
        )
        for name, entry in file.tensors.items()
        if entry.type.name in CODED and len(entry.numbers) == 2 and name.endswith(".weight")
    }


def _codes(stored: Tensors, name: str, kind: BlockType) -> CodedMatrix:
    return codes(stored[name], kind)


def write_model(
    path: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    requested: BlockType | None,
    *,
    packed: Mapping[str, BlockType] = MappingProxyType({}),
    tokenizer: Mapping[str, Any] | None = None,
    generation: Mapping[str, Any] = MappingProxyType({}),
    check: Callable[[Path], object] = lambda path: None,
) -> None:
    """Writes weights under our names as a GGUF file, each in its `stored_type`; those in `packed` are rows of blocks of
    these types already, uint8 [O, bytes].

    `tokenizer` are the keys of the tokenizer (`headway.text.gguf`), `generation` is the content of
    generation_config.json, of which the ids that begin and end a text are written, and `check` is that of `write_gguf`.
    Raises ConfigError for a spec that GGUF cannot express, CheckpointError if more tokens end a text than there are
    keys."""
    state = with_all_rows(state, spec)
    (keys, factors), (spec, of_weights) = write_spec(spec), folded(spec)
    names = ARCHITECTURES[architecture_of(spec)].tensors
    state = changed(state, partial(times, of_weights)) if of_weights else state
    rules, ours = rules_by_name(names, spec), exported(names, state, spec)
    values = {name: change for name in ours.forms if (change := _values(name, spec.norm_offset)) is not None}
    forms = {name: Form(ours.forms[name].shape, torch.float32) for name in values}
    weights = with_values(ours, forms, lambda name: values[name][0](ours[name].float()))
    types = {name: _type(name, rules[name], form, requested, packed) for name, form in weights.forms.items()}
    extra = {**({} if factors is None else {FACTORS: factors}), **unused_keys(spec)}
    weights = with_values(weights, lazy(extra).forms, extra.__getitem__)
    types |= dict.fromkeys(extra, F32)
    known = weights.forms
    wide = [name for name, form in known.items() if len(form.shape) > 1]
    matrices = [types[name].name for name in wide if not name.endswith(EXACT)]
    architecture = {"general.architecture": keys.pop("general.architecture")}
    about = {
        "general.file_type": FILE_TYPES[max(matrices, key=matrices.count)],
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    write_gguf(
        path,
        {**architecture, **about, **keys, **_ids(tokenizer or {"tokenizer.ggml.model": "none"}, generation)},
        weights,
        types,
        check=check,
    )


def _type(
    name: str, rule: Rule, form: Form, requested: BlockType | None, packed: Mapping[str, BlockType]
) -> BlockType:
    """Returns the type of a stored tensor: that of its rows if they are packed already, else its `stored_type`."""
    kinds = {packed.get(weight) for weight in rule.ours}
    if len(kinds) > 1:
        raise CheckpointError(
            f"{name} is one matrix in GGUF, but its parts ({', '.join(rule.ours)}) are quantized in different types; "
            "choose one type by dtype"
        )
    (kind,) = kinds
    if name.endswith(".bias"):
        return F32
    return stored_type(name, form, requested if rule.keeps_rows else None) if kind is None else kind


def without_codes(spec: ModelSpec) -> set[str]:
    """Returns the names of our matrices that a file stores with columns in another order: they are never packed, since
    codes cannot follow."""
    rules = rules_by_name(ARCHITECTURES[architecture_of(spec)].tensors, spec)
    return {name for rule in rules.values() if not rule.keeps_rows for name in rule.ours}


def stored_type(name: str, form: Form, requested: BlockType | None) -> BlockType:
    """Returns the type in which a tensor of that name (GGUF's or ours) is stored: F32 for vectors and names in `EXACT`;
    for other matrices the requested type if its blocks divide their rows, else their own dtype. Raises CheckpointError
    for a dtype that GGUF has no type for."""
    if len(form.shape) == 1 or name.endswith(EXACT):
        return F32
    if requested is not None and form.shape[-1] % requested.block == 0:
        return requested
    if form.dtype not in BY_DTYPE:
        raise CheckpointError(
            f"GGUF has no type for matrices of {dtype_name(form.dtype)}; set dtype to one of "
            f"{', '.join(map(dtype_name, BY_DTYPE))}"
        )
    return BY_DTYPE[form.dtype]


def unpacked(file: GGUF, stored: Tensors) -> Made:
    """Returns the numbers of every tensor, dequantized when read.

    Packed numbers are returned as float32, which holds them exactly; if a family's norms multiply by 1 + w (Gemma's),
    the file holds 1 + w. Vectors and routers in float32 are returned in the dtype of the matrices (bfloat16 or float16)
    if that rounds none of their numbers, so that the model runs in that dtype; to see that, they are read at once."""
    layout = ARCHITECTURES.get(str(file.metadata.get("general.architecture")))
    offset = 0.0 if layout is None else FAMILIES[layout.family].defaults.get("norm_offset", 0.0)
    dtypes = {name: entry.type.given_as for name, entry in file.tensors.items()}
    matrices = {name: entry.type for name, entry in file.tensors.items() if len(entry.numbers) > 1}
    of_matrices = {dtypes[name] for name, kind in matrices.items() if kind is not F32} or {torch.float32}

    values = {name: change for name in file.tensors if (change := _values(name, offset)) is not None}

    def exact(name: str) -> Tensor:
        entry = file.tensors[name]
        value = dequantize(stored[name], entry.type).view(entry.numbers)
        return values[name][1](value) if name in values else value

    if len(of_matrices) == 1 and torch.float32 not in of_matrices:
        (narrow,) = of_matrices
        for name, entry in file.tensors.items():
            if entry.type is F32 and _holds(narrow, exact(name), values.get(name)):
                dtypes[name] = narrow

    def make(name: str) -> Tensor:
        return exact(name).to(dtypes[name])

    def copy(name: str, target: Tensor) -> None:
        entry = file.tensors[name]
        if name in values:
            target.copy_(make(name))
            return
        if entry.type.unpack is None:
            stored.copy_into(name, target)
            return
        raw = stored[name]
        step = max(1, PIECE // max(1, raw[0].numel()))
        # piecewise, since dequantized rows take several times their packed bytes
        for begin in range(0, len(raw), step):
            target[begin : begin + step].copy_(dequantize(raw[begin : begin + step], entry.type))

    def part(name: str, box: tuple[slice, ...]) -> Tensor:
        if name in values:
            return make(name)[box]
        _, *inner = stored.forms[name].shape
        raw = stored.part(name, (box[0], *(slice(0, size) for size in inner)))
        entry = file.tensors[name]
        value = dequantize(raw, entry.type).view(len(raw), *entry.numbers[1:])
        return value[(slice(None), *box[1:])].to(dtypes[name])

    forms = {name: Form(entry.numbers, dtypes[name]) for name, entry in file.tensors.items()}
    return Made(forms, make, copy, part)


def _values(name: str, offset: float) -> Values | None:
    """Returns the functions that convert our value to the file's and back if they differ, else None: a norm is stored
    as 1 + w (except the one inside a delta layer), a rate as the decay -e^rate."""
    if name.endswith("ssm_a"):
        return (lambda rate: -rate.exp()), (lambda decay: (-decay).log())
    if not offset or not name.endswith("norm.weight") or name.endswith("ssm_norm.weight"):
        return None
    return (lambda w: w + offset), (lambda factor: factor - offset)


def _holds(dtype: torch.dtype, value: Tensor, values: Values | None) -> bool:
    """Returns whether rounding a value to a dtype loses nothing, as the file stores it."""
    narrow = value.to(dtype).float()
    in_file = (lambda x: x) if values is None else values[0]
    return torch.equal(in_file(narrow), in_file(value.float()))


def generation_ids(file: GGUF) -> dict[str, Any]:
    """Returns the content that generation_config.json would have: the ids that begin, pad and end a text."""
    keys = ConfigReader(file.metadata, {}, TOKENIZER)
    with reading(file.path):
        ids = {
            name: keys.whole(name, least=0)
            for name in (*SINGLE.values(), *ENDS)
            if keys.get(name) is not None
        }
    content: dict[str, Any] = {role: ids[name] for role, name in SINGLE.items() if name in ids}
    ends = list(dict.fromkeys(ids[name] for name in ENDS if name in ids))
    return {**content, **({"eos_token_id": ends if len(ends) > 1 else ends[0]} if ends else {})}


def _ids(tokenizer: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the tokenizer's keys, and those of the token ids that only `generation` has."""
    keys = dict(tokenizer)
    for role, name in SINGLE.items():
        if generation.get(role) is not None and tokenizer.keys() <= {"tokenizer.ggml.model"}:
            keys[TOKENIZER + name] = generation[role]
    end_ids = generation.get("eos_token_id")
    first = [keys[TOKENIZER + ENDS[0]]] if TOKENIZER + ENDS[0] in keys else []
    ends = list(
        dict.fromkeys(
            [*first, *(end_ids if isinstance(end_ids, list) else [] if end_ids is None else [end_ids])]
        )
    )
    if len(ends) > len(ENDS):
        raise CheckpointError(
            f"eos_token_id has {len(ends)} tokens ({ends}), but GGUF can store at most {len(ENDS)}: {', '.join(ENDS)}"
        )
    return {**keys, **{TOKENIZER + name: token for name, token in zip(ENDS, ends, strict=False)}}
