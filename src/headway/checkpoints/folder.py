"""The Hugging Face folder in and out: strict when read, atomic when written."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from headway.checkpoints.config import spec_from_config
from headway.checkpoints.config_out import config_from_spec
from headway.checkpoints.dtypes import check_dtypes, choose_dtype, dtype_name
from headway.checkpoints.files import atomic_folder, current_folder, json_text, write_file
from headway.checkpoints.lazy import cast, copy_into, forms, renamed
from headway.checkpoints.pairing import change_pairing
from headway.checkpoints.reading import naming, read_json
from headway.checkpoints.sizes import check_stored
from headway.checkpoints.tensors import Tensors, open_tensors
from headway.checkpoints.write import write_tensors
from headway.errors import CheckpointError, did_you_mean
from headway.models import Decoder, ModelSpec, blank
from headway.positions import Rotary

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SHARD_BYTES = 4_000_000_000
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # written by old versions; a function of the config
_WEIGHTS = re.compile(r"(model|pytorch_model|consolidated).*\.(safetensors|bin|pth|index\.json)$")
TOKENIZER_FILES = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|chat_template.*|vocab\..*|merges\.txt)$"
)


class SavesItself(Protocol):
    """What `save_folder` needs of a tokenizer: its files, and the ids that begin and end a text."""

    @property
    def bos(self) -> int | None:
        """Id that begins a text."""

    @property
    def eos(self) -> int | None:
        """Id that ends a text."""

    def save(self, folder: Path) -> object:
        """Write the tokenizer's files into a folder."""


@dataclass(frozen=True)
class Folder:
    """A checked checkpoint. `tensors` has exactly the names and shapes of the spec; values are read when
    asked for."""

    path: Path
    spec: ModelSpec
    tensors: Tensors
    config: Mapping[str, Any] = field(repr=False)
    generation: Mapping[str, Any] = field(repr=False)


def load_folder(path: str | Path, *, allow_pickle: bool = False) -> Folder:
    """Read and check a folder; no weights are read yet (tied weights, when both are stored, are compared).

    Raises ConfigError for a config that is not understood; CheckpointError for files that are broken or
    missing, and for tensors that are missing, unexpected or of another shape, listed together with the
    nearest names.
    """
    path = Path(path)
    folder = current_folder(path)
    if not folder.is_dir():
        what = "a file, not a folder" if folder.exists() else "not there"
        raise CheckpointError(
            f"{path} is {what}: a model is a folder with config.json and model.safetensors "
            "(`headway convert` makes one of llama2.c's, Meta's and torchtune's files)"
        )
    if not (folder / "config.json").exists():
        raise CheckpointError(f"{path} has no config.json: it is not a model folder")
    config = read_json(folder / "config.json")
    with naming(folder / "config.json"):
        spec = spec_from_config(config)
    tensors = open_tensors(folder, allow_pickle=allow_pickle)
    check_stored(spec, tensors, path)
    tensors = _strict(tensors, spec, path)
    generation = folder / "generation_config.json"
    return Folder(
        path, spec, tensors, config, read_json(generation) if generation.exists() else _token_ids(config)
    )


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
    allow_pickle: bool = False,
) -> Decoder:
    """The decoder of a folder, in evaluation mode.

    `dtype` None keeps the file's, but float16 becomes float32 on a CPU and a mix becomes its widest
    (`choose_dtype`). Raises as `load_folder` does.
    """
    return build_model(
        load_folder(path, allow_pickle=allow_pickle), dtype=dtype, device=device, backend=backend
    )


def build_model(
    folder: Folder,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    backend: str = "auto",
) -> Decoder:
    """The decoder of a folder that `load_folder` has read; arguments as in `load_model`."""
    where = torch.device("cpu" if device is None else device)
    wanted, _ = choose_dtype({n: e.dtype for n, e in folder.tensors.entries.items()}, where, dtype)
    return fill(folder.spec, folder.tensors, dtype=wanted, device=where, backend=backend)


def fill(
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    backend: str = "auto",
) -> Decoder:
    """A decoder of `spec` with the weights of `state` (copied, cast to `dtype`), in evaluation mode."""
    with torch.device("meta"):
        model = blank(spec, backend).to(dtype)
    model = model.to_empty(device=device)
    own = model.state_dict()
    assert own.keys() == state.keys(), sorted(own.keys() ^ state.keys())
    with torch.no_grad():
        for name, value in own.items():
            copy_into(state, name, value)
    return model.eval()


def save_folder(
    path: str | Path,
    model: Decoder,
    *,
    tokenizer: SavesItself | None = None,
    generation: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    keep_pairing: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a folder that `load_model` and transformers read, replacing `path` as a whole in one step.

    An existing folder's model files are replaced; its other files stay, and its tokenizer too unless one is
    given. `generation` is the content of generation_config.json (`bos_token_id`, `eos_token_id`, ...).
    Weights in another rotary pairing than transformers' "halves" are permuted to it (exact), unless
    `keep_pairing`: such a folder, like one of a spec that transformers cannot say, has model_type
    "headway", which transformers refuses.
    """
    state: Mapping[str, Tensor] = model.state_dict()
    save_state(
        path,
        model.spec,
        state,
        tokenizer=tokenizer,
        generation=generation,
        dtype=dtype,
        keep_pairing=keep_pairing,
        shard_bytes=shard_bytes,
    )


def save_state(
    path: str | Path,
    spec: ModelSpec,
    state: Mapping[str, Tensor],
    *,
    tokenizer: SavesItself | None = None,
    generation: Mapping[str, Any] | None = None,
    dtype: torch.dtype | None = None,
    keep_pairing: bool = False,
    shard_bytes: int = SHARD_BYTES,
    before_publishing: Callable[[Path], None] | None = None,
) -> None:
    """`save_folder` for weights that are not in a module: `state` has the names of `Decoder.state_dict()`.

    `before_publishing` is called with the finished folder before it takes its name; if it raises, `path`
    stays as it was.
    """
    state = _strict_state(state, spec)
    rotary = spec.positions
    if isinstance(rotary, Rotary) and rotary.pairing != "halves" and not keep_pairing:
        state, spec = change_pairing(state, spec, "halves")
    if dtype is not None:
        state = cast(state, dtype)
    config = config_from_spec(spec)
    named = dtype_name(next(iter(forms(state).values())).dtype)
    ends = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos} if tokenizer is not None else {}
    generation = {**ends, **(generation or {})}
    ids = {key: generation.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = {**config, **ids, "dtype": named, "torch_dtype": named}
    pairing = spec.positions.pairing if isinstance(spec.positions, Rotary) else "none"

    def stays(name: str) -> bool:
        ours = name in ("config.json", "generation_config.json") or _WEIGHTS.match(name) is not None
        return not ours and (tokenizer is None or TOKENIZER_FILES.match(name) is None)

    with atomic_folder(path, keep=stays) as folder:
        write_file(folder / "config.json", json_text(config))
        write_file(folder / "generation_config.json", json_text({**ids, **generation}))
        if tokenizer is not None:
            tokenizer.save(folder)
        write_tensors(folder, state, shard_bytes, {"headway.pairing": str(pairing)})
        if before_publishing is not None:
            before_publishing(folder)


def _strict_state(state: Mapping[str, Tensor], spec: ModelSpec) -> Mapping[str, Tensor]:
    """The weights in the one order of `Decoder`. Raises CheckpointError when names or shapes are not the
    spec's."""
    wanted = _shapes(spec)
    found = forms(state)
    wrong = [
        *(wanted.keys() ^ found.keys()),
        *(n for n in wanted.keys() & found.keys() if found[n].shape != wanted[n]),
    ]
    if wrong:
        raise CheckpointError(f"these weights are not those of the spec: {', '.join(sorted(wrong)[:8])}")
    return renamed(state, {name: name for name in wanted})


def _shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in blank(spec).state_dict().items()}


def _token_ids(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None
    }


def _strict(tensors: Tensors, spec: ModelSpec, path: Path) -> Tensors:
    """The tensors under exactly the names of the spec, or an error that lists what differs."""
    wanted = _shapes(spec)
    found = {name: entry for name, entry in tensors.entries.items() if not _DERIVED.search(name)}
    stored = dict(zip(wanted, wanted, strict=True))
    if spec.tied and HEAD in found:
        if EMBEDDING not in found:
            found[EMBEDDING] = found[HEAD]
            stored[EMBEDDING] = HEAD
        elif not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            raise CheckpointError(
                f"{path}: config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ; "
                "set tie_word_embeddings to false if the output layer is a matrix of its own"
            )
        del found[HEAD]
    lines = [f"missing: {n}{_hint(n, set(found) - set(wanted))}" for n in wanted if n not in found]
    lines += [f"unexpected: {n}{did_you_mean(n, wanted)}" for n in found if n not in wanted]
    lines += [
        f"shape: {n} is {list(found[n].shape)}, the config says {list(shape)}"
        for n, shape in wanted.items()
        if n in found and found[n].shape != shape
    ]
    if lines:
        more = [f"... and {len(lines) - 20} more"] if len(lines) > 20 else []
        tip = ""
        if HEAD in wanted and HEAD not in found and EMBEDDING in found:
            tip = f"\n{HEAD} is missing: if it is the embedding itself, config.json must say tie_word_embeddings: true"
        raise CheckpointError(
            f"{path}: the weights do not fit config.json ({len(lines)} differences)\n  "
            + "\n  ".join(lines[:20] + more)
            + tip
        )
    check_dtypes({name: found[name].dtype for name in wanted}, path)
    return tensors.renamed(stored)


def _hint(name: str, spare: set[str]) -> str:
    return did_you_mean(name, spare).replace("did you mean", "nearest there:").replace("?", "")
