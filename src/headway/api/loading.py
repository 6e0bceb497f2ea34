"""`headway.load(...)`: a folder, or an id of the Hub, becomes a model with its tokenizer."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import torch

from headway.api.language import LanguageModel
from headway.checkpoints.dtypes import choose_dtype
from headway.checkpoints.files import current_folder
from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import as_decoder, build_model
from headway.errors import CheckpointError, ConfigError, did_you_mean
from headway.text import Tokenizer, first_file

TASKS = ("causal-lm",)
DTYPES = {
    **dict.fromkeys(("float32", "fp32"), torch.float32),
    **dict.fromkeys(("bfloat16", "bf16"), torch.bfloat16),
    **dict.fromkeys(("float16", "fp16"), torch.float16),
    "float64": torch.float64,
}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.spm", "vocab.txt", "merges.txt"]


def load(
    source: str | Path,
    *,
    task: str = "causal-lm",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
) -> LanguageModel:
    """A model from a Hugging Face folder, or by its id on the Hugging Face Hub (downloaded once).

    Args:
        source: a folder (config.json, model.safetensors, tokenizer.json), or an id such as "owner/name".
        task: what it is for; there is "causal-lm".
        dtype: "float32", "bfloat16", ... or a torch dtype; None or "auto" keeps the file's (float16 becomes
            float32 on a CPU, where float16 is hundreds of times slower).
        backend: of attention; a named one fails rather than falls back.
        revision: of a Hub id: branch, tag or commit.
        allow_pickle: read old `.bin` weights, too (with torch's restricted unpickler).
    Raises CheckpointError or ConfigError, saying which file and what is wrong with it.
    """
    if task not in TASKS:
        raise ConfigError(
            f"load: there is no task {task!r}{did_you_mean(task, TASKS)}; there is {', '.join(TASKS)}"
        )
    here = current_folder(source).exists()
    path = Path(source) if here else _fetch(str(source), revision, allow_pickle)
    if revision is not None and here:
        raise ConfigError(f"load: revision {revision!r} is for ids of the Hub, but {source} is a folder here")
    wanted = _dtype(dtype)
    where = torch.device("cpu" if device is None else device)
    folder = load_folder(path, allow_pickle=allow_pickle)
    _, choice = choose_dtype({n: e.dtype for n, e in folder.tensors.forms.items()}, where, wanted)
    if wanted == torch.float16 and where.type == "cpu":
        warnings.warn(f"{choice.what} on a CPU: {choice.why}", stacklevel=2)
    tokenizer = _tokenizer(current_folder(path))
    if tokenizer is not None:
        tokenizer.require_fits(folder.spec.vocab)
    model = as_decoder(build_model(folder, dtype=wanted, device=where, backend=backend))
    return LanguageModel(model, tokenizer, generation=folder.generation)


def _dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return None
    if isinstance(dtype, torch.dtype):
        return dtype
    name = dtype.removeprefix("torch.")
    if name not in DTYPES:
        raise ConfigError(
            f"load: there is no dtype {dtype!r}{did_you_mean(name, DTYPES)}; there are {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def _tokenizer(folder: Path) -> Tokenizer | None:
    return Tokenizer.load(folder) if first_file(folder) is not None else None


def _fetch(source: str, revision: str | None, allow_pickle: bool) -> Path:
    if not _HUB_ID.fullmatch(source):
        parent = Path(source).parent
        near = [p.name for p in parent.iterdir() if p.is_dir()] if parent.is_dir() else []
        raise CheckpointError(f"{source}: no such folder{did_you_mean(Path(source).name, near)}")
    from huggingface_hub import snapshot_download

    files = [*_HUB_FILES, *(["*.bin", "*.pth"] if allow_pickle else [])]
    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=files))
    except Exception as error:  # its many kinds all mean that there is nothing to load
        raise CheckpointError(
            f"{source}: no such folder here, and as an id of the Hugging Face Hub it could not be fetched "
            f"({type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else 'no more is said'}). "
            "Check the name and the network; HF_HUB_OFFLINE=1 forbids fetching, HF_TOKEN opens gated models"
        ) from error
