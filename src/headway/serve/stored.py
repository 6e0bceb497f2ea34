"""Files of what decoders keep for texts to come, from one run of a server to the next: a folder per version of a model.

Keys and values of texts are as telling as the texts: nobody else may read these files.
"""

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
    """A hash of what pages depend on beside texts and adapters: weights, how they are stored (by their bytes), how they
    are computed, and by which headway."""
    assert model.source is not None
    kernels, like = library(), model.lm.model.stack.like
    how = size_of(model.source), like.dtype, model.exact, kernels and kernels.level, __version__
    return hashlib.sha256(f"{fingerprint(load_folder(model.source))} {how}".encode()).hexdigest()[:32]


def save_stored(model: Decoding, folder: Path) -> int:
    """Writes what a model keeps, in the place of what an earlier run wrote; how many pages. Raises CacheError while a
    text is written, CheckpointError where files cannot be."""
    kept = model.between(lambda: take_kept(model.engine.reader.cache))
    names = {f"{i}.{j}": t for i, tensors in enumerate(kept.tensors) for j, t in enumerate(tensors)}
    keys = [[key.hex() for key in some] for some in kept.keys]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with atomic_folder(folder / version(model)) as place:
        place.chmod(0o700)
        write_safetensors(place / FILE, names, {"keys": json.dumps(keys)})
        (place / FILE).chmod(0o600)
    return sum(map(len, keys))


def load_stored(model: Decoding, folder: Path) -> int:
    """Gives a model that keeps nothing yet what an earlier run kept of the same version of it; how many pages. What
    cannot be read is told, and left there."""
    path = folder / version(model) / FILE
    if not path.exists():
        return 0
    try:
        keys = [[bytes.fromhex(key) for key in some] for some in json.loads(read_described(path)[1]["keys"])]
        tensors, layers = open_tensors(path), model.engine.reader.cache.layers
        lists = [[tensors[f"{i}.{j}"] for j in range(len(layer.tensors))] for i, layer in enumerate(layers)]
        model.between(lambda: put_kept(model.engine.reader.cache, Kept(keys, lists)))
    except (HeadwayError, KeyError, TypeError, ValueError) as error:
        LOG.warning("%s: what an earlier run kept cannot be used: %s", path, error)
        return 0
    return sum(map(len, keys))
