"""The base model of an adapter: where it is, and the fingerprint that distinguishes its weights from others of the same
shape.

An adapter is numbers added to the weights of one model; on any other model of that shape they are noise. The
fingerprint of the base model is therefore stored with its adapter, in the header of adapter_model.safetensors, which
PEFT ignores: "headway.base". PEFT writes none; an adapter without it is accepted with a warning.

One model has one fingerprint, however its weights are stored:

    float32, bfloat16          the same one: it is computed from the numbers rounded to bfloat16
    our int8, int4             that of the model that `headway quantize` read, which the header of the weights names
                               ("headway.quantized_from"): an adapter of a bf16 model runs on its int4 version
    --base nf4                 that of the folder: the 4-bit weights are made from it in memory, and never saved
    another rotary pairing     the same one
    int4, GGUF of others       a different one, since nothing says which weights they were made from
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
"""Number of values of a tensor that a fingerprint covers: all of a small one, else evenly spaced rows. Training and
merging change all rows, and the weights of 7 B parameters need not all be read before a word is generated."""


class Base(NamedTuple):
    """The base model of an adapter: its folder and its fingerprint."""

    folder: Path
    fingerprint: str

    @staticmethod
    def of(folder: str | Path) -> "Base":
        """Returns the base in a folder. Raises as `load_folder` does."""
        return Base(Path(folder), fingerprint(load_folder(folder)))


def fingerprint(folder: Folder) -> str:
    """Returns the fingerprint of the weights of a folder: 32 hexadecimal digits of the SHA-256 of all names, shapes and
    numbers (for large tensors about `SAMPLE` of them) in bfloat16, in the rotary pairing of the family; for weights
    that `headway quantize` has written, the fingerprint of the model that it read."""
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
        # e.g. 4096 x 4096 numbers are 64 SAMPLE: every 64th row
        rows = value[:: -(-value.numel() // SAMPLE)] if value.dim() else value
        digest.update(f"{name} {list(form.shape)}\n".encode())
        digest.update(rows.to(torch.bfloat16).contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()[:32]


def is_adapter(path: Path) -> bool:
    """Returns whether a folder holds an adapter and no model."""
    return (path / CONFIG).exists() and not (path / "config.json").exists()


def base_of(path: Path) -> Path:
    """Returns the folder of the base model that an adapter's config names (base_model_name_or_path). Raises
    CheckpointError if it names none, or one that is neither local nor can be downloaded."""
    base = _named(path)
    give = f"headway.load(MODEL, adapter={str(path)!r}), or MODEL --adapter {path}"
    if base is None:
        raise CheckpointError(
            f"{path / CONFIG} does not name its base model (base_model_name_or_path); pass the model: {give}"
        )
    try:
        return local_model(base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{path} is an adapter of {base}, which could not be loaded ({error}); pass the model: {give}"
        ) from error


def with_base(source: str | Path, adapters: Sequence[str | Path] = ()) -> tuple[str | Path, list[str | Path]]:
    """Returns a model and its adapters: if `source` is an adapter's folder, the base model that it names, and the
    adapter before `adapters`. Raises as `base_of` does."""
    if is_adapter(current_folder(source)):
        return base_of(Path(source)), [source, *adapters]
    return source, list(adapters)


def check_bases(adapters: Iterable[str | Path], model: Folder, *, any_base: bool = False) -> None:
    """Raises CheckpointError, with both fingerprints, for an adapter that was trained on another model than `model`,
    and warns about one without a fingerprint; with `any_base` all are accepted.

    Folders that are not adapters are skipped here: `load_adapter` refuses them. Raises ConfigError for `any_base`
    without an adapter."""
    paths = [Path(path) for path in adapters]
    if any_base:
        if not paths:
            raise ConfigError(
                f"any_base (--any-base) applies to adapters only, and {model.path} is loaded without one; remove it"
            )
        return
    ours = None
    for path in paths:
        file = current_folder(path) / WEIGHTS
        if not file.is_file() or not (file.parent / CONFIG).is_file():
            continue
        recorded, named = read_described(file)[1].get(BASE), _named(path) or "a model that it does not name"
        if recorded is None:
            warnings.warn(
                f"{path} was trained on {named}, but stores no fingerprint of its base weights (adapters saved by PEFT "
                f"have none): it cannot be checked that {model.path} has the same weights; --any-base (any_base=True) "
                "skips this check",
                stacklevel=3,
            )
            continue
        ours = fingerprint(model) if ours is None else ours
        if recorded != ours:
            raise CheckpointError(
                f"{path} was trained on {named}, whose weights have the fingerprint {recorded}, but {model.path} has "
                f"{ours}: the adapter does not fit other weights. Pass its own base model, or, for a model derived "
                "from that one, skip this check by --any-base (any_base=True)"
            )


def with_adapters(folder: Folder, adapters: Iterable[str | Path], *, any_base: bool = False) -> Folder:
    """Returns a model with the adapters in these folders. Its tokenizer and generation settings are those of the last
    adapter that has its own, else the model's. Raises as `check_bases` does."""
    paths = tuple(map(Path, adapters))
    check_bases(paths, folder, any_base=any_base)
    home, generation = folder.home, folder.generation
    for source in map(current_folder, paths):
        if first_file(source) is not None or (source / "source.spm").is_file():
            home = source
        if (source / GENERATION).exists():
            generation = {**folder.generation, **read_json(source / GENERATION)}
    return replace(folder, adapters=paths, home=home, generation=generation)


def _named(path: Path) -> str | None:
    """Returns the name of the base model in an adapter's config, or None if absent."""
    base = read_json(current_folder(path) / CONFIG).get("base_model_name_or_path")
    return base if isinstance(base, str) and base else None
