"""What `convert` reads: each format as a spec, weights under our names, and a forward pass of its own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from headway.checkpoints.folder import load_folder
from headway.checkpoints.formats import llama2c, meta
from headway.checkpoints.quantized.packed import PackedLayer
from headway.checkpoints.restore import fill
from headway.checkpoints.saving import TokenizerFiles
from headway.errors import CheckpointError, check_known
from headway.models import ModelSpec
from headway.storage.gguf import is_gguf
from headway.storage.lazy import Form, LazyTensors, cast, with_values
from headway.storage.tensors import open_tensors

Format = Literal["auto", "hf", "gguf", "llama2c", "meta"]
FORMATS: tuple[Format, ...] = ("auto", "hf", "gguf", "llama2c", "meta")


@dataclass(frozen=True)
class Source:
    """A model and its own forward pass: `forward(weights, dtype, ids)` are the logits of a row of ids. Of weights of 8
    or 4 bits, `coded` has the layers, by the names of their weights, `weights` what they are in float32, and `state`
    that in the dtype of their scales."""

    format: str
    spec: ModelSpec
    state: LazyTensors
    weights: LazyTensors
    forward: Callable[[Mapping[str, Tensor], torch.dtype, Tensor], Tensor]
    tokenizer: TokenizerFiles | None = None
    generation: Mapping[str, Any] | None = None
    coded: Mapping[str, PackedLayer] = field(default_factory=dict)


def open_source(source: Path, frm: Format, allow_pickle: bool) -> Source:
    check_known(frm, FORMATS, "unknown format", are="known are", error=CheckpointError)
    if not source.exists():
        raise CheckpointError(f"there is no file or folder {source}")
    frm = _detect(source, allow_pickle) if frm == "auto" else frm
    if frm in ("hf", "gguf"):
        folder = load_folder(source, allow_pickle=allow_pickle)
        if folder.format != frm:
            raise CheckpointError(f"{source} is of format {folder.format!r}, and {frm!r} was asked for")

        def forward(weights: Mapping[str, Tensor], dtype: torch.dtype, ids: Tensor) -> Tensor:
            row: Tensor = fill(folder.spec, weights, dtype=dtype)(ids[None])[0]
            return row

        files = TokenizerFiles(folder)
        coded = {f"{name}.weight": layer for name, layer in folder.quantized.items()}
        exact = {name: Form(layer.form.shape, torch.float32) for name, layer in coded.items()}
        weights = with_values(folder.tensors, exact, lambda name: coded[name].read().dequantize())
        return Source(frm, folder.spec, folder.tensors, weights, forward, files, folder.generation, coded)
    model = llama2c.read(source) if frm == "llama2c" else meta.read_pickled(source, allow_pickle=allow_pickle)
    return Source(
        frm,
        model.spec,
        model.state(),
        model.weights,
        lambda weights, dtype, ids: model.logits(cast(weights, dtype), ids),
        generation=llama2c.GENERATION if frm == "llama2c" else None,
    )


def _detect(source: Path, allow_pickle: bool) -> Format:
    if source.is_dir():
        meta_files = not (source / "config.json").exists() and any(source.glob("consolidated.*.pth"))
        return "meta" if meta_files else "hf"
    if is_gguf(source):
        return "gguf"
    if source.suffix == ".bin" and llama2c.looks_like(source):
        return "llama2c"
    pickled = source.suffix in (".pt", ".pth", ".bin")
    if pickled and any(".attention.wq." in name for name in open_tensors(source, allow_pickle=allow_pickle)):
        return "meta"
    raise CheckpointError(
        f"{source} is no format that headway detects (a Hugging Face folder, GGUF, llama2.c's .bin, a pickle of "
        f"Meta's); use --from {', '.join(FORMATS[1:])}"
    )
