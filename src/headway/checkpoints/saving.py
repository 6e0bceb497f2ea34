"""Writes models as Hugging Face folders, atomically, with their tokenizer."""

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from headway.checkpoints.folder import START, TOKEN_IDS, TOKENIZER_FILES, Folder
from headway.checkpoints.formats.sentence_transformers import write_sentence_config
from headway.checkpoints.heads import change_pairing, pairing_name
from headway.checkpoints.hf.config import bare, config_from_spec, tensor_names, unsupported_by_transformers
from headway.checkpoints.hf.layouts import LAYOUTS, layouts_for
from headway.checkpoints.hf.layouts.pairs import marian_spec
from headway.checkpoints.hf.layouts.rules import own_shapes
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.quantized.layers import packed_state, quantized_state
from headway.checkpoints.quantized.scheme import KEY
from headway.errors import CheckpointError, ConfigError
from headway.models import Model, ModelSpec
from headway.native.panels import Panels
from headway.nn import adapter_names
from headway.positions import rotations
from headway.storage.dtypes import dtype_name
from headway.storage.files import atomic_folder, current_folder, json_text, write_file
from headway.storage.lazy import Form, cast, lazy, with_zeros
from headway.storage.reading import read_json
from headway.storage.tensors import write_tensors
from headway.text import MarianTokenizer, Tokenizer, first_file
from headway.text.tokenizer_config import MORE_TEMPLATES

SHARD_BYTES = 4_000_000_000
_MODEL_FILES = re.compile(
    TOKENIZER_FILES.pattern + r"|.*config.*\.json$|(modules|training)\.json$|\d_[A-Z]\w+$|onnx$|"
    rf"{MORE_TEMPLATES}$|"
    r".*\.(safetensors|bin|pth?|h5|msgpack|onnx|gguf)(\.index\.json)?$"
)
"""Files that belong to a model, whichever program wrote them: configs, weights, tokenizer, training state."""


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a folder, copied file by file; accepted as `tokenizer` by `save_folder` and `save_state`.

    If `context` is set, it replaces `model_max_length` in tokenizer_config.json, if that key is present."""

    folder: Folder
    context: int | None = None

    @property
    def bos(self) -> int | None:
        """Id of the first token of a text, from generation_config.json; None if absent."""
        return self.folder.generation.get("bos_token_id")

    @property
    def eos(self) -> int | None:
        """Id of the last token of a text, from generation_config.json; None if absent."""
        return self.folder.generation.get("eos_token_id")

    def save(self, folder: Path) -> None:
        """Copies the tokenizer's files into `folder`, or converts the tokenizer of a GGUF file, if it has one."""
        home = self.folder.home
        if home is None or home.is_file():
            if home is not None and first_file(home) is not None:
                Tokenizer.load(home).save(folder)
            return
        for file in sorted(home.iterdir()):
            if file.name == MORE_TEMPLATES:
                shutil.copytree(file, folder / file.name)
            if not TOKENIZER_FILES.match(file.name):
                continue
            shutil.copy(file, folder / file.name)
            if self.context is not None and file.name == "tokenizer_config.json":
                config = read_json(file)
                if "model_max_length" in config:
                    text = json_text({**config, "model_max_length": self.context})
                    (folder / file.name).write_text(text, encoding="utf-8")

    def gguf_metadata(self, rows: int) -> dict[str, Any]:
        """Returns `Tokenizer.gguf_metadata` of the folder's tokenizer, or no keys if it has none."""
        home = self.folder.home
        return {} if home is None or first_file(home) is None else Tokenizer.load(home).gguf_metadata(rows)


AnyTokenizer = Tokenizer | MarianTokenizer | TokenizerFiles
"""A tokenizer that can write its files into a folder, with the ids of the first and the last token of a text."""


def save_folder(path: str | Path, model: Model, **how: "Unpack[Saving]") -> None:
    """Writes a model as a folder that `load_model` and transformers read, atomically; the options are those of
    `Saving`.

    Raises CheckpointError if `path` exists and is not empty, unless `overwrite` is set: then the files of the model
    there, its tokenizer included, are removed and other files stay. Raises ConfigError for a model with adapters, which
    have folders of their own."""
    if names := adapter_names(model):
        raise ConfigError(
            f"this model has adapters ({', '.join(names)}): save them by `save_adapter`; to merge a saved one into the "
            "weights: headway surgery merge MODEL OUT --adapter FOLDER"
        )
    save_state(path, model.spec, *quantized_state(model), **how)


class Saving(TypedDict, total=False):
    """Options of `save_folder`.

    tokenizer: is saved too; bos_token_id and eos_token_id are taken from it unless `generation` sets them.
    generation: the content of generation_config.json (`bos_token_id`, `eos_token_id`, ...).
    config: additional keys of config.json.
    dtype: dtype of the stored weights; None keeps their dtype.
    keep_pairing: keeps the weights as they are. By default, weights in another rotary pairing than the family's
        ("halves" for LLaMA) are permuted to it, which is exact, and a translation model of 2017 gets Marian's biases,
        all 0. A folder that keeps another pairing, or a spec that transformers cannot express, has model_type
        "headway", which transformers refuses.
    shard_bytes: maximal number of bytes in one file of weights.
    metadata: additional keys of the header of the weights.
    overwrite: replaces the model at `path`.
    before_publishing: called with the finished folder before it is renamed to `path`; if it raises, `path` is
        unchanged.
    """

    tokenizer: AnyTokenizer | None
    generation: Mapping[str, Any] | None
    config: Mapping[str, Any]
    dtype: torch.dtype | None
    keep_pairing: bool
    shard_bytes: int
    metadata: Mapping[str, str]
    overwrite: bool
    before_publishing: Callable[[Path], None]


def save_state(
    path: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    quantized: Mapping[str, Panels] = MappingProxyType({}),
    *,
    tokenizer: AnyTokenizer | None = None,
    generation: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] = MappingProxyType({}),
    dtype: torch.dtype | None = None,
    keep_pairing: bool = False,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] = MappingProxyType({}),
    overwrite: bool = False,
    before_publishing: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes a folder as `save_folder` does, from weights that are not in a module.

    `state` has the names of the module's `state_dict()`. The layers in `quantized` are written in the
    compressed-tensors format; of their weights in `state` only the shapes are used."""
    check_target(path, overwrite)
    state = _strict_state(state, spec)
    source = spec
    if rotations(spec.positions) and not keep_pairing:
        state, spec = change_pairing(state, spec, layouts_for(spec.family)[0].pairing)
    marian = None if keep_pairing else marian_spec(spec)
    if marian is not None and unsupported_by_transformers(marian) is None:
        stored_dtype, shapes = next(iter(lazy(state).forms.values())).dtype, own_shapes(marian)
        absent = {n: Form(tuple(value.shape), stored_dtype) for n, value in shapes.items() if n not in state}
        state, spec = with_zeros(state, absent), marian
    if dtype is not None:
        state = cast(state, dtype)
    described, spec = spec, bare(spec)
    spec_config, stored = config_from_spec(spec), next(iter(lazy(state).forms.values())).dtype
    state = exported(tensor_names(spec_config), state, spec)
    if quantized:
        state, spec_config[KEY] = packed_state(state, quantized, tensor_names(spec_config), source, spec)
    with atomic_folder(path, keep=lambda name: _MODEL_FILES.match(name) is None) as folder:
        describe(folder, spec_config, stored, tokenizer, generation, config)
        if described.head != spec.head:
            write_sentence_config(folder, described)
        write_tensors(folder, state, shard_bytes, {"headway.pairing": pairing_name(spec), **metadata})
        before_publishing(folder)


def describe(
    folder: Path,
    spec_config: Mapping[str, Any],
    dtype: torch.dtype,
    tokenizer: AnyTokenizer | None,
    generation: Mapping[str, Any] | None,
    config: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Writes all files except the weights into a folder that is being filled (see `atomic_folder`).

    `spec_config` is the `config.json` of the spec; `config` and `generation` are as in `Saving`."""
    ends = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos} if tokenizer is not None else {}
    generation = {**ends, **(generation or {})}
    ids, layout = {key: generation.get(key) for key in TOKEN_IDS}, LAYOUTS.get(str(spec_config["model_type"]))
    token_ids = {key: n for key, n in ids.items() if n is not None or layout is None or key not in layout.ids}
    decoder_start = {START: generation[START]} if START in generation else {}
    name = dtype_name(dtype)
    # spec_config comes after the ids: a token id that a layout writes must win, since its positions depend on it
    config = {**token_ids, **decoder_start, **spec_config, "dtype": name, "torch_dtype": name, **config}
    write_file(folder / "config.json", json_text(config))
    write_file(folder / "generation_config.json", json_text({**ids, **generation}))
    if tokenizer is not None:
        tokenizer.save(folder)


def check_target(target: str | Path, overwrite: bool) -> None:
    """Raises CheckpointError that describes what is at `target`, unless it may be replaced or is absent or empty."""
    existing = current_folder(target)
    if overwrite or not existing.exists() or (existing.is_dir() and not any(existing.iterdir())):
        return
    raise CheckpointError(
        f"{target} exists; choose another name, or use --overwrite (overwrite=True) to replace what is there: "
        f"{_described(existing)}"
    )


def _described(path: Path) -> str:
    if not path.is_dir():
        return "a file"
    with suppress(CheckpointError):
        return f"a folder with a model of model_type {read_json(path / 'config.json').get('model_type')!r}"
    names = sorted(entry.name for entry in path.iterdir())
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return f"a folder with {', '.join(names[:4])}{more}"


def _strict_state(state: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, Tensor]:
    """Returns the weights in the order of the module's `state_dict()`.

    Raises CheckpointError if names or shapes differ from the spec's."""
    expected = {name: tuple(value.shape) for name, value in own_shapes(spec).items()}
    shapes = {name: form.shape for name, form in lazy(state).forms.items()}
    if wrong := sorted(n for n in expected.keys() | shapes.keys() if expected.get(n) != shapes.get(n)):
        raise CheckpointError(f"names or shapes of these weights do not fit the spec: {', '.join(wrong[:8])}")
    return lazy(state).renamed({name: name for name in expected})
