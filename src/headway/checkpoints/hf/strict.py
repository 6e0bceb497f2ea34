"""A checkpoint's tensors under exactly the names of our modules, or an error that lists what differs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import torch

from headway.checkpoints.hf.layouts import Layout
from headway.checkpoints.hf.layouts.tensors import compare, imported, own_shapes
from headway.checkpoints.storage.dtypes import check_dtypes
from headway.checkpoints.storage.lazy import LazyTensors
from headway.errors import CheckpointError
from headway.models import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
OTHERS = "head."
"""What the names of an encoder's head begin with."""
_DERIVED = re.compile(r"\.rotary_emb\.inv_freq$")  # written by old versions; a function of the config


def strict(
    tensors: LazyTensors, spec: ModelSpec, path: Path, layout: Layout | None = None, other_head: bool = False
) -> LazyTensors:
    """The tensors under our names: by the rules of a layout, or as they are where LLaMA's names are ours; with
    `other_head`, those of the head that they were saved with are not needed.

    Raises CheckpointError for tensors that are missing, unexpected or of another shape, and for tied ones that
    differ."""
    if layout is not None:
        found = imported(layout, tensors, spec, path, other_head)
    else:
        found = tensors.renamed(_stored(tensors, spec, path, other_head))
    check_dtypes({name: form.dtype for name, form in found.forms.items()}, path)
    return found


def other_heads(tensors: LazyTensors, found: LazyTensors) -> tuple[str, ...]:
    """Names in a checkpoint under our names that `strict` does not read: those of another head."""
    return tuple(name for name in tensors.forms if name.startswith(OTHERS) and name not in found.forms)


def _stored(tensors: LazyTensors, spec: ModelSpec, path: Path, other_head: bool) -> Mapping[str, str]:
    wanted = {name: tuple(value.shape) for name, value in own_shapes(spec).items()}
    found = {name: form for name, form in tensors.forms.items() if not _DERIVED.search(name)}
    stored = dict(zip(wanted, wanted, strict=True))
    if spec.tied and HEAD in found and HEAD not in wanted:
        if EMBEDDING not in found:
            found[EMBEDDING] = found[HEAD]
            stored[EMBEDDING] = HEAD
        elif not torch.equal(tensors[HEAD], tensors[EMBEDDING]):
            raise CheckpointError(
                f"{path}: config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ; "
                "set tie_word_embeddings to false if the output layer is a matrix of its own"
            )
        del found[HEAD]
    tip = ""
    if HEAD in wanted and HEAD not in found and EMBEDDING in found:
        tip = f"\n{HEAD} is missing: if it is the embedding itself, config.json must say tie_word_embeddings: true"
    spare = {name for name in found if name not in wanted and not (other_head and name.startswith(OTHERS))}
    compare(found, wanted, spare, path, tip)
    return stored
