"""Describes a model folder or a GGUF file without loading it: its spec, the effective positions and windows, sizes."""

import math
from collections import Counter
from pathlib import Path
from typing import Any

from headway.checkpoints.folder import TOKENIZER_FILES, Folder, load_folder
from headway.checkpoints.hf.config import transformers_verdict
from headway.checkpoints.hf.config_keys import OURS
from headway.models import cost
from headway.models.description import patterns_by_layer, positions_in_words
from headway.models.head import TASKS
from headway.positions import Rotary
from headway.storage.reading import open_regular
from headway.text import Tokenizer, first_file

BY_CONVERSION = "loads what `headway convert` makes of it"


def inspect(path: str | Path, *, allow_pickle: bool = False) -> dict[str, Any]:
    """Returns everything that `headway inspect` reports, by name, from the config, the headers and the tokenizer of a
    folder or a GGUF file; weights are read only as far as `load_folder` checks them.

        kind                     "decoder", "encoder" or "encoder-decoder"
        gives                    what a call returns, and its shape
        spec                     `ModelSpec`
        rotary                   the effective rotation: radians per position of each pair, and the longest and shortest
                                 wavelength in tokens; None if positions are not rotary
        context_limit            the longest sequence that the model can run
        kv_bytes_per_token       bytes that decoding caches for each token, in the dtype that the model runs in; None if
                                 nothing cached grows with the sequence (encoders, and models without attention layers)
        memory_bytes_per_token   bytes that an encoder-decoder caches for each source token; None without an encoder
        weights                  how quantized layers are stored; None if none is quantized
        unused                   names of stored tensors that this model does not need
        transformers             whether transformers can load the folder's model

    Raises as `load_folder` does.
    """
    folder = load_folder(path, allow_pickle=allow_pickle)
    spec, tensors = folder.spec, folder.stored
    dtype, runs_in = folder.choose_dtype()
    per_token = cost.kv_bytes_per_token(spec, dtype) or None
    return {
        "path": folder.path,
        "model_type": str(folder.config.get("model_type")),
        "kind": spec.kind,
        "gives": f"{spec.head.task}: {TASKS[spec.head.task]}",
        "spec": spec,
        "rotary": _rotary(folder),
        "positions": positions_in_words(spec),
        "patterns": patterns_by_layer(spec),
        "parameters": cost.parameters(spec),
        "parameter_count": cost.parameter_count(spec),
        "stored_bytes": tensors.nbytes,
        "stored_dtypes": dict(Counter(sorted(f.stored_as for f in tensors.forms.values())).most_common()),
        "runs_in": str(runs_in),
        "context_limit": spec.context_limit,
        "kv_bytes_per_token": per_token if spec.causal else None,
        "memory_bytes_per_token": None if spec.encoder is None else cost.memory_bytes(spec, 1, dtype),
        "weights": folder.kept,
        "unused": folder.unused,
        "files": tuple(file.name for file in tensors.files),
        "tokenizer": _tokenizer(folder),
        "generation": dict(folder.generation),
        "transformers": transformers_verdict(spec) if folder.format == "hf" else BY_CONVERSION,
    }


def _rotary(folder: Folder) -> dict[str, Any] | None:
    rotary, head_dim = folder.spec.positions, folder.spec.head_dim
    if not isinstance(rotary, Rotary):
        return None
    who, pairing = {"hf": "transformers' ", "gguf": "GGUF's "}.get(folder.format, ""), rotary.pairing
    kind = folder.config.get("model_type")
    rotates = f"{who}{kind} rotates {pairing}{'' if pairing == 'halves' else ' pairs'}"
    frequencies = rotary.frequencies(head_dim)
    waves = 2 * math.pi / frequencies
    return {
        "pairing": str(pairing),
        "pairing_because": "recorded in config.json" if kind == OURS else rotates,
        "theta": rotary.theta,
        "dims": rotary.rotated_dims(head_dim),
        "scaling": None if rotary.scaling is None else repr(rotary.scaling),
        "before_scaling": getattr(rotary.scaling, "trained_context", None),
        "amplitude": rotary.amplitude,
        "frequencies": tuple(frequencies.tolist()),
        "longest_wave": float(waves.max()),
        "shortest_wave": float(waves.min()),
        "length_dependent": rotary.length_dependent,
    }


def _tokenizer(folder: Folder) -> dict[str, Any] | None:
    home = folder.home
    if home is None:
        return None
    files = sorted(p for p in home.iterdir() if TOKENIZER_FILES.match(p.name)) if home.is_dir() else [home]
    for file in files:
        open_regular(file).close()  # raises an error that names the file if it is a pipe
    if first_file(home) is None:
        return None
    tokenizer = Tokenizer.load(home)
    return {
        "files": [file.name for file in files],
        "kind": type(tokenizer.backend.model).__name__,
        "tokens": tokenizer.vocab_size,
        "fits": tokenizer.vocab_size <= folder.spec.vocab,
        "chat_template": tokenizer.chat_template is not None,
    }
