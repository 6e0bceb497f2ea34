"""The model that an adapter was trained beside: where it is, and what tells its weights from others of the same shape.

An adapter is numbers added to the weights of one model, and on any other model of that shape they are noise. The
fingerprint of the model therefore goes with the folder of its adapter, in the header of adapter_model.safetensors,
which PEFT leaves unread: "headway.base". PEFT writes none; such an adapter is taken with a warning.

One model has one fingerprint, however its weights are kept:

    float32, bfloat16          the same one: it is that of the numbers rounded to bfloat16
    int8, int4 of ours         that of the model that `headway quantize` read, which the header of the weights names
                               ("headway.quantized_from"): an adapter of a bf16 model runs on its int4
    --base nf4                 that of the folder: weights in 4 bits are made of it in memory, and never saved
    another rotary pairing     the same one
    int4, GGUF of others       one of their own, since nothing says what they were made of
"""

import hashlib
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from headway.checkpoints.adapter_config import CONFIG
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.heads import change_pairing
from headway.checkpoints.hf.layouts import layouts_for
from headway.checkpoints.remote import local_model
from headway.errors import CheckpointError, ConfigError
from headway.positions import rotations
from headway.storage.files import current_folder
from headway.storage.lazy import lazy
from headway.storage.reading import read_json
from headway.storage.safetensors import read_described
from headway.text import first_file

WEIGHTS, GENERATION = "adapter_model.safetensors", "generation_config.json"
BASE, QUANTIZED_FROM = "headway.base", "headway.quantized_from"
SAMPLE = 1 << 18
"""How many numbers of a tensor a fingerprint covers: all of a small one, else rows evenly apart. Training and merging
change all rows, and the weights of 7 B parameters need not be read as a whole before a word is generated."""


class Base(NamedTuple):
    """A model beside which an adapter is trained: its folder, and what tells its weights from others."""

    folder: Path
    fingerprint: str

    @staticmethod
    def of(folder: str | Path) -> "Base":
        """The base in a folder. Raises as `load_folder` does."""
        return Base(Path(folder), fingerprint(load_folder(folder)))


def fingerprint(folder: Folder) -> str:
    """Identifies the weights of a folder: 32 digits of the SHA-256 of all names, shapes and numbers (of large tensors
    `SAMPLE` of them) in bfloat16, in the rotary pairing of the family; of weights that `headway quantize` has written,
    the fingerprint of the model that it read."""
    if folder.quantized and folder.format == "hf":
        _, metadata = read_described(folder.stored.files[0])
        if QUANTIZED_FROM in metadata:
            return metadata[QUANTIZED_FROM]
    spec = folder.spec
    state: Mapping[str, Tensor] = folder.tensors
    if rotations(spec.positions):
        state, _ = change_pairing(state, spec, layouts_for(spec.family)[0].pairing)
    digest = hashlib.sha256()
    for name, form in lazy(state).forms.items():
        value = state[name]
        rows = value[:: -(-value.numel() // SAMPLE)] if value.dim() else value
        digest.update(f"{name} {list(form.shape)}\n".encode())
        digest.update(rows.to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def is_adapter(path: Path) -> bool:
    """Whether a folder holds an adapter, and no model."""
    return (path / CONFIG).exists() and not (path / "config.json").exists()


def base_of(path: Path) -> Path:
    """The folder of the base model that an adapter's config names (base_model_name_or_path). Raises CheckpointError
    where it names none, and where that is no local folder."""
    base = _named(path)
    give = f"headway.load(MODEL, adapter={str(path)!r}), or MODEL --adapter {path}"
    if base is None:
        raise CheckpointError(
            f"{path / CONFIG} does not say which model it adapts (base_model_name_or_path); give it yourself: {give}"
        )
    try:
        return local_model(base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is an adapter of {base}, which is no folder here; give the model yourself: {give} ({error})"
        ) from error


def with_base(source: str | Path, adapters: Sequence[str | Path] = ()) -> tuple[str | Path, list[str | Path]]:
    """A model and its adapters: where `source` is an adapter's folder, the base model that it names and that adapter.
    Raises as `base_of` does."""
    if is_adapter(current_folder(source)):
        return base_of(Path(source)), [source, *adapters]
    return source, list(adapters)


def check_bases(adapters: Iterable[str | Path], model: Folder, *, any_base: bool = False) -> None:
    """Raise CheckpointError, with both fingerprints, for an adapter that was trained on another model than `model`,
    and warn of one without a fingerprint; with `any_base` all are accepted. Folders that are no adapters are skipped
    here: `load_adapter` refuses them.

    Raises ConfigError for `any_base` without an adapter."""
    places = [Path(path) for path in adapters]
    if any_base:
        if not places:
            raise ConfigError(
                f"any_base (--any-base) takes adapters of other models, and {model.path} is loaded without an adapter"
            )
        return
    ours = None
    for place in places:
        file = current_folder(place) / WEIGHTS
        if not file.is_file() or not (file.parent / CONFIG).is_file():
            continue
        recorded, named = read_described(file)[1].get(BASE), _named(place) or "a model that it does not name"
        if recorded is None:
            warnings.warn(
                f"{place} was trained beside {named}, and bears no fingerprint of it (folders of PEFT do not): whether "
                f"{model.path} has the same weights cannot be told, and on others an adapter is noise; --any-base "
                "(any_base=True) takes it without this remark",
                stacklevel=3,
            )
            continue
        ours = fingerprint(model) if ours is None else ours
        if recorded != ours:
            raise CheckpointError(
                f"{place} was trained beside {named}, whose weights have the fingerprint {recorded}, and {model.path} "
                f"has {ours}: on other weights an adapter is noise. Give the model that it was trained beside; or take "
                "this one by --any-base (any_base=True), where you know that it was made of that one"
            )


def with_adapters(folder: Folder, adapters: Iterable[str | Path], *, any_base: bool = False) -> Folder:
    """A model with the adapters in these folders beside it; the last of them that has a tokenizer or generation
    settings brings these along, else they are the model's own. Raises as `check_bases`."""
    places = tuple(map(Path, adapters))
    check_bases(places, folder, any_base=any_base)
    home, generation = folder.home, folder.generation
    for place in map(current_folder, places):
        if first_file(place) is not None or (place / "source.spm").is_file():
            home = place
        if (place / GENERATION).exists():
            generation = {**folder.generation, **read_json(place / GENERATION)}
    return replace(folder, adapters=places, home=home, generation=generation)


def _named(path: Path) -> str | None:
    """The base model that an adapter's config names."""
    base = read_json(current_folder(path) / CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None
