"""Reads models strictly: Hugging Face folders, GGUF files, Meta's files and llama2.c's, all as a `Folder`."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from headway.checkpoints.formats import llama2c, meta
from headway.checkpoints.formats.gguf.metadata import names_in, read_spec
from headway.checkpoints.formats.gguf.model import coded_layers, generation_ids, unpacked
from headway.checkpoints.formats.sentence_transformers import read_sentence_config
from headway.checkpoints.hf.config import spec_from_config, tensor_names
from headway.checkpoints.hf.layouts.tensors import imported
from headway.checkpoints.hf.wrapped import text_tensors
from headway.checkpoints.quantized.layers import own_layers, without_empty_biases
from headway.checkpoints.quantized.packed import PackedLayer, dequantized, packed_layers, unpack_mxfp4
from headway.checkpoints.quantized.scheme import split_config
from headway.choice import Choice
from headway.errors import CheckpointError, check_known
from headway.models import Head, ModelSpec
from headway.storage.dtypes import check_dtypes, choose_dtype, dtype_name
from headway.storage.files import current_folder
from headway.storage.gguf import is_gguf, read_gguf
from headway.storage.lazy import LazyTensors
from headway.storage.reading import naming, read_json
from headway.storage.tensors import Tensors, open_tensors

Format = Literal["hf", "gguf", "llama2c", "meta"]
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
START = "decoder_start_token_id"
FINAL = "final"  # the model in the folder of a run
OF_TARGETS = (START, "forced_bos_token_id", "forced_eos_token_id", "bad_words_ids")  # in either of the files
TOKENIZER_FILES = re.compile(
    r"(tokenizer.*|special_tokens_map\.json|added_tokens\.json|chat_template.*|(target_)?vocab\..*|merges\.txt|"
    r"encoder\.json|"
    r"spiece\.model|(source|target)\.spm)$"
)


@dataclass(frozen=True)
class Folder:
    """A checked checkpoint: a folder, or a file of another `Format`.

    Attributes:
        tensors: exactly the names and shapes of the spec; values are read when accessed, and dequantized if the files
            hold quantization codes.
        stored: the tensors of the files, under their own names.
        config: content of config.json; in other formats, its model_type.
        generation: content of generation_config.json.
        unused: names of stored tensors that are ignored: another head's, and those of a class of transformers that
            computes more than this model.
        quantized: layers that are stored as quantization codes, by our names.
        home: where the tokenizer is; None for a format that has none.
        adapters: folders of adapters on top of these weights, whose outputs are summed."""

    path: Path
    spec: ModelSpec
    tensors: LazyTensors
    stored: Tensors = field(repr=False)
    config: Mapping[str, Any] = field(repr=False)
    generation: Mapping[str, Any] = field(repr=False)
    unused: tuple[str, ...] = field(default=(), repr=False)
    quantized: Mapping[str, PackedLayer] = field(default_factory=dict, repr=False)
    format: Format = "hf"
    home: Path | None = None
    adapters: tuple[Path, ...] = ()

    @property
    def weights(self) -> str:
        """The kinds of quantization codes in use; if there are none, the stored dtypes."""
        dtypes = sorted({dtype_name(form.dtype) for form in self.tensors.forms.values()})
        return ", ".join(dict.fromkeys(layer.kept for layer in self.quantized.values()) or dtypes)

    @property
    def kept(self) -> str | None:
        """How many layers are stored as which quantization codes, for reports; None if none is quantized."""
        counts = Counter(layer.kept for layer in self.quantized.values()).most_common()
        return ", ".join(f"{count} layer{'s' * (count > 1)} as {how}" for how, count in counts) or None

    def choose_dtype(
        self, asked: torch.dtype | None = None, device: torch.device | str = "cpu"
    ) -> tuple[torch.dtype, Choice]:
        """Returns the dtype to run in, and why: `headway.storage.dtypes.choose_dtype` for the stored dtypes."""
        stored = {name: form.dtype for name, form in self.tensors.forms.items()}
        return choose_dtype(stored, torch.device(device), asked)


def load_folder(
    path: str | Path,
    *,
    frm: Format | Literal["auto"] = "auto",
    allow_pickle: bool = False,
    head: Head | None = None,
) -> Folder:
    """Reads and checks a folder or a file. Weights are read later, except those that must be checked or measured now:
    tied tensors that are both stored, constants, and F32 tensors of GGUF files.

    `frm` is the format; "auto" detects it. `head` loads an encoder for another task than it was saved for; the tensors
    of that head must be present. A decoder that sentence-transformers uses for embeddings becomes an encoder with the
    decoder's attention patterns.

    Raises ConfigError for a config that is not understood; CheckpointError for files that are broken or missing, and
    for tensors that are missing, unexpected or of another shape, listed together with the nearest names.
    """
    check_known(frm, ("auto", *get_args(Format)), "unknown format", are="known are", error=CheckpointError)
    path = Path(path)
    folder = current_folder(path)
    kind = frm if frm in ("llama2c", "meta") else _detect(path, folder, allow_pickle)
    if frm not in ("auto", kind):
        raise CheckpointError(f"{path} is of format {kind!r}, not {frm!r} as requested (frm, --from)")
    if kind == "hf":
        return _hugging_face(path, folder, allow_pickle, head)
    if kind == "gguf":
        read = _gguf(folder)
    else:
        model = (
            llama2c.read(path) if kind == "llama2c" else meta.read_pickled(path, allow_pickle=allow_pickle)
        )
        config, generation = {"model_type": kind}, llama2c.GENERATION if kind == "llama2c" else {}
        read = Folder(path, model.spec, model.state(), model.weights, config, generation, format=kind)
    if head is not None and head != read.spec.head:
        raise CheckpointError(
            f"{path} holds a decoder, whose head is {read.spec.head.task!r}, not {head.task!r}"
        )
    return read


def _detect(path: Path, folder: Path, allow_pickle: bool) -> Format:
    if folder.is_dir():
        parts = not (folder / "config.json").exists() and any(folder.glob("consolidated.*.pth"))
        return "meta" if parts else "hf"
    # A file named *.gguf that is not GGUF is treated as one, too, so that the error says what it is.
    if is_gguf(folder) or (folder.suffix == ".gguf" and folder.is_file()):
        return "gguf"
    if folder.suffix == ".bin" and folder.exists() and llama2c.looks_like(folder):
        return "llama2c"
    pickled = folder.suffix in (".pt", ".pth", ".bin") and folder.exists()
    if pickled and any(".attention.wq." in name for name in open_tensors(folder, allow_pickle=allow_pickle)):
        return "meta"
    fault = "is a file of unknown format" if folder.exists() else "does not exist"
    raise CheckpointError(
        f"{path} {fault}: a model is a folder with config.json and model.safetensors, a GGUF file, a llama2.c .bin "
        "(--from llama2c), or Meta's consolidated.00.pth (--from meta)"
    )


def _hugging_face(path: Path, folder: Path, allow_pickle: bool, head: Head | None) -> Folder:
    if not (folder / "config.json").exists() and (folder / "adapter_config.json").exists():
        raise CheckpointError(
            f"{path} is an adapter, not a model; merge it into its model first: "
            f"headway surgery merge MODEL OUT --adapter {path}"
        )
    if not (folder / "config.json").exists():
        trained = folder / FINAL
        hint = f"; the model of this run is {trained}" if (trained / "config.json").exists() else ""
        raise CheckpointError(f"{path} has no config.json: it is not a model folder{hint}")
    config = read_json(folder / "config.json")
    with naming(folder / "config.json"):
        described, scheme = split_config(config)
        spec = spec_from_config(described)
    sentences = read_sentence_config(folder)
    if sentences is not None and sentences.model == folder and spec.head.task in ("states", "lm"):
        spec = spec.with_head(sentences.head)
    saved_for = spec.head
    if head is not None and head != saved_for:
        spec = spec.with_head(head)
    stored, names = open_tensors(folder, allow_pickle=allow_pickle), tensor_names(described)
    with naming(path):
        tensors, around = text_tensors(described, stored)
    packed: Mapping[str, PackedLayer] = {}
    plain: LazyTensors = tensors
    if scheme is not None and scheme.form == "mxfp4":
        plain = unpack_mxfp4(tensors, path)
    elif scheme is not None:
        packed = packed_layers(tensors, scheme, path)
        plain = dequantized(tensors, packed, scheme)
    with naming(folder / "config.json", but=(CheckpointError,)):
        plain = without_empty_biases(plain, packed, names, spec) if packed else plain
        quantized = own_layers(packed, names, spec, plain, path) if packed else {}
        ours, unused = imported(names, plain, spec, path, spec.head != saved_for)
        check_dtypes({name: form.dtype for name, form in ours.forms.items()}, path)
    written = folder / "generation_config.json"
    # folders from before generation_config.json have all of these in config.json
    keys = OF_TARGETS if written.exists() else (*TOKEN_IDS, *OF_TARGETS)
    generation = {key: config[key] for key in keys if config.get(key) is not None}
    generation |= read_json(written) if written.exists() else {}
    unused = (*around, *unused)
    return Folder(path, spec, ours, stored, config, generation, unused, quantized, home=folder)


def _gguf(path: Path) -> Folder:
    file = read_gguf(path)
    stored = Tensors(file.tensors)
    numbers = unpacked(file, stored)
    spec = read_spec(file, numbers)
    with naming(path, but=(CheckpointError,)):
        tensors, _ = imported(names_in(file), numbers, spec, path, described_by="its metadata")
    quantized = own_layers(coded_layers(file, stored), names_in(file), spec, stored, path)
    config, generation = {"model_type": file.metadata["general.architecture"]}, generation_ids(file)
    return Folder(path, spec, tensors, stored, config, generation, (), quantized, "gguf", path)
