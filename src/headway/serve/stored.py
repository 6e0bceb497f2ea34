"""Saves the prefix caches of decoders to files and loads them in the next run of the server: a folder per model
version.

Keys and values reveal the texts that they were computed from, so the files are readable by their owner only."""

import hashlib
import json
import logging
from pathlib import Path

from headway import __version__
from headway.cache import Kept, put_kept, take_kept
from headway.checkpoints import load_folder
from headway.checkpoints.bases import fingerprint
from headway.errors import HeadwayError
from headway.native.loader import library
from headway.serve.models import size_of
from headway.serve.served import Decoding
from headway.storage.files import atomic_folder
from headway.storage.safetensors import read_described, write_safetensors
from headway.storage.tensors import open_tensors

FILE = "pages.safetensors"
LOG = logging.getLogger(__name__)


def version(model: Decoding) -> str:
    """Returns a hash of all that pages depend on besides tokens and adapters: the weights and their storage (by their
    bytes), dtype, exactness, level of the native kernels, and the version of headway."""
    assert model.source is not None
    kernels, like = library(), model.lm.model.stack.like
    settings = size_of(model.source), like.dtype, model.exact, kernels and kernels.level, __version__
    return hashlib.sha256(f"{fingerprint(load_folder(model.source))} {settings}".encode()).hexdigest()[:32]


def save_stored(model: Decoding, folder: Path) -> int:
    """Writes the prefix cache of a model, replacing that of an earlier run; returns the number of pages. Raises
    CacheError while a sequence is being generated, CheckpointError if the files cannot be written."""
    kept = model.between(lambda: take_kept(model.engine.reader.cache))
    names = {f"{i}.{j}": t for i, tensors in enumerate(kept.tensors) for j, t in enumerate(tensors)}
    keys = [[key.hex() for key in kind] for kind in kept.keys]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_folder(folder / version(model)) as target:
        target.chmod(0o700)
        write_safetensors(target / FILE, names, {"keys": json.dumps(keys)})
        (target / FILE).chmod(0o600)
    return sum(map(len, keys))


def load_stored(model: Decoding, folder: Path) -> int:
    """Loads the prefix cache that an earlier run saved for the same version of the model into an empty cache; returns
    the number of pages. A file that cannot be used is logged and kept."""
    path = folder / version(model) / FILE
    if not path.exists():
        return 0
    try:
        keys = [[bytes.fromhex(key) for key in kind] for kind in json.loads(read_described(path)[1]["keys"])]
        tensors, layers = open_tensors(path), model.engine.reader.cache.layers
        lists = [[tensors[f"{i}.{j}"] for j in range(len(layer.tensors))] for i, layer in enumerate(layers)]
        model.between(lambda: put_kept(model.engine.reader.cache, Kept(keys, lists)))
    except (HeadwayError, KeyError, TypeError, ValueError) as error:
        LOG.warning("%s: the saved prefix cache cannot be used: %s", path, error)
        return 0
    return sum(map(len, keys))
