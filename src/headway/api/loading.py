"""`headway.load(...)`: a folder, or an id of the Hub, becomes a model with its tokenizer, ready for its task."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import torch

from headway.api.classification import INDEPENDENT, Answerer, Classifier, Tagger
from headway.api.encoders import DIMENSIONS, Embedder, MaskedLM, TextEncoder
from headway.api.language import LanguageModel
from headway.api.translator import Translator
from headway.checkpoints.bases import with_adapters, with_base
from headway.checkpoints.folder import Folder, load_folder
from headway.checkpoints.formats.sentence_transformers import SentenceConfig, read_sentence_config
from headway.checkpoints.remote import local_model
from headway.checkpoints.restore import build_model
from headway.errors import ConfigError, check_known
from headway.generate.sequences import AnyTokenizer
from headway.models import Decoder, EncoderDecoder, Head, Model, ModelSpec
from headway.models.head import Pool
from headway.models.quantize import compress_model
from headway.storage.dtypes import named_dtype
from headway.storage.files import current_folder
from headway.text import MarianTokenizer, Tokenizer, first_file

AnyModel = LanguageModel | TextEncoder | Translator


class Kind(NamedTuple):
    """The model that a task needs, the command that does it, and the class that `load` returns for it."""

    model: str
    command: str
    wrapper: Any


TASKS: Mapping[str, Kind] = {
    "causal-lm": Kind("a decoder", "generate", LanguageModel),
    "translation": Kind("an encoder-decoder", "translate", Translator),
    "masked-lm": Kind("an encoder that fills masks", "fill-mask", MaskedLM),
    "classify": Kind("an encoder with a classifier", "classify", Classifier),
    "tag": Kind("an encoder with a classifier of tokens", "classify", Tagger),
    "answer": Kind("an encoder that marks answers", "answer", Answerer),
    "embed": Kind("an encoder", "embed", Embedder),
    "states": Kind("an encoder", "embed", TextEncoder),
}


class Loading(TypedDict, total=False):
    """Options of `load` for every task."""

    dtype: str | torch.dtype | None
    device: str | torch.device | None
    backend: str
    revision: str | None
    allow_pickle: bool
    adapter: str | Path | Sequence[str | Path]
    any_base: bool
    compress: bool
    dequantize: bool


@overload
def load(source: str | Path, *, task: Literal["causal-lm"], **how: Unpack[Loading]) -> LanguageModel: ...
@overload
def load(source: str | Path, *, task: Literal["translation"], **how: Unpack[Loading]) -> Translator: ...
@overload
def load(source: str | Path, *, task: Literal["masked-lm"], **how: Unpack[Loading]) -> MaskedLM: ...
@overload
def load(source: str | Path, *, task: Literal["classify"], **how: Unpack[Loading]) -> Classifier: ...
@overload
def load(source: str | Path, *, task: Literal["tag"], **how: Unpack[Loading]) -> Tagger: ...
@overload
def load(source: str | Path, *, task: Literal["answer"], **how: Unpack[Loading]) -> Answerer: ...
@overload
def load(
    source: str | Path,
    *,
    task: Literal["embed"],
    pool: Pool | None = ...,
    unit: bool | None = ...,
    **how: Unpack[Loading],
) -> Embedder: ...
@overload
def load(source: str | Path, *, task: str | None = ..., **how: Unpack[Loading]) -> Any: ...


def load(
    source: str | Path,
    *,
    task: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    backend: str = "auto",
    revision: str | None = None,
    allow_pickle: bool = False,
    adapter: str | Path | Sequence[str | Path] = (),
    any_base: bool = False,
    pool: Pool | None = None,
    unit: bool | None = None,
    compress: bool = False,
    dequantize: bool = False,
) -> AnyModel:
    """A model from a Hugging Face folder, or by its id on the Hugging Face Hub (downloaded once).

    What is returned follows from what the folder holds, and `task` makes sure of it:

        task          returns         from
        "causal-lm"   LanguageModel   a decoder
        "translation" Translator      an encoder-decoder
        "masked-lm"   MaskedLM        an encoder with a masked-lm head
        "classify"    Classifier      an encoder with a classifier
        "tag"         Tagger          an encoder with a classifier of tokens
        "answer"      Answerer        an encoder with a head for answers
        "embed"       Embedder        any encoder; pooled as a folder of sentence-transformers declares
        "states"      TextEncoder     any encoder

    Args:
        source: a folder (config.json, model.safetensors, tokenizer.json), or an id such as "owner/name". The folder
            of an adapter stands for the model that it says it adapts, with it.
        task: what it is for; None takes what the folder was saved for.
        dtype: "float32", "bfloat16", ... or a torch dtype; None or "auto" keeps the file's (float16 becomes
            float32 on a CPU, where float16 is hundreds of times slower): the rule of `headway.storage.dtypes`.
        backend: of attention; a named one fails rather than falls back.
        revision: of a Hub id: branch, tag or commit.
        allow_pickle: read old `.bin` weights, too (with torch's restricted unpickler).
        adapter: folders of adapters (PEFT's), which add up; the last of them that has a tokenizer or a
            generation_config.json brings these along.
        any_base: take adapters that were trained beside other weights, or do not say beside which.
        pool, unit: of "embed": "first", "last" or "mean" of a text's tokens, and whether vectors have length 1. Unless
            given, the folder's own, or "mean" and False.
        compress: keep bf16 weights in 11 bits each, without loss (`headway.models.quantize.compress_model`).
        dequantize: make plain weights of codes of 4 to 8 bits (of GGUF files and quantized folders), which are kept
            otherwise: products with codes round their other factor to 8 bits.
        device: where its weights are put; the CPU unless given.
    Raises CheckpointError or ConfigError, saying which file and what is wrong with it; ConfigError for a device that is
    not there.
    """
    if task is not None:
        check_known(task, TASKS, "load: there is no task")
    load_dtype, where = named_dtype(dtype), _device(device)
    adapters = [adapter] if isinstance(adapter, str | Path) else adapter
    for place in (source, *(adapters if isinstance(adapters, Sequence) else [adapters])):
        if not isinstance(place, str | Path):
            raise ConfigError(
                f"load: a model or an adapter is a folder, a file or an id of the Hub, as text or a path, got {place!r}"
            )
    source, adapters = with_base(source, adapters)
    path = local_model(source, revision=revision, allow_pickle=allow_pickle)
    sentences = read_sentence_config(current_folder(path)) if task in (None, "embed") else None
    path = path if sentences is None else sentences.model
    folder = with_adapters(load_folder(path, allow_pickle=allow_pickle), adapters, any_base=any_base)
    task = task or ("embed" if sentences is not None else folder.spec.task)
    if task != "embed" and (pool is not None or unit is not None):
        raise ConfigError(f'load: pool and unit are for task="embed", and the task is {task!r}')
    if task != folder.spec.task and (task not in ("embed", "states") or folder.spec.causal):
        raise wrong_task(source, folder.spec, task)
    head = _head(folder.spec, task, sentences)
    head = replace(head, pool=head.pool if pool is None else pool, unit=head.unit if unit is None else unit)
    if head != folder.spec.head:
        headed = load_folder(path, allow_pickle=allow_pickle, head=head)
        folder = replace(headed, adapters=folder.adapters, home=folder.home, generation=folder.generation)
    longest = None if sentences is None else sentences.longest
    if longest is not None and longest < folder.spec.trained_context:
        folder = replace(folder, spec=replace(folder.spec, trained_context=longest))
    tokenizer = _tokenizer(folder.home)
    if tokenizer is not None:  # before the weights are read
        tokenizer.require_fits(folder.spec.vocab)
    model = build_model(folder, dtype=load_dtype, device=where, backend=backend, dequantize=dequantize)
    if compress:
        compress_model(model)
    return _wrapped(task, model, tokenizer, folder)


def wrong_task(source: str | Path, spec: ModelSpec, task: str) -> ConfigError:
    """The error for a model that `task` cannot use: what it is, what is needed, what to do."""
    kind = TASKS[spec.task]
    return ConfigError(
        f"{source} is {kind.model} ({spec.family}), and {task!r} needs {TASKS[task].model}; use it with "
        f"headway {kind.command}, or task={spec.task!r}"
    )


def _head(spec: ModelSpec, task: str, sentences: SentenceConfig | None) -> Head:
    """The head that a task needs."""
    if task == "states":
        return Head("states")
    if task != "embed" or (sentences is None and spec.head.task == "embed"):
        return spec.head
    return Head("embed", pool="mean") if sentences is None else sentences.head


def _wrapped(task: str, model: Model, tokenizer: AnyTokenizer | None, folder: Folder) -> AnyModel:
    options: dict[str, Any] = {}
    if isinstance(tokenizer, MarianTokenizer) and not isinstance(model, EncoderDecoder):
        raise ConfigError(f"{folder.path}: source.spm is a translator's, and this is a {folder.spec.family}")
    if isinstance(model, Decoder | EncoderDecoder):
        options["generation"] = folder.generation
    elif task == "classify":
        options["independent"] = folder.config.get("problem_type") == INDEPENDENT
    elif task == "embed":
        options["dimensions"] = folder.config.get(DIMENSIONS) or ()
    wrapped: AnyModel = TASKS[task].wrapper(model, tokenizer, **options)
    return wrapped


def _device(device: str | torch.device | None) -> torch.device:
    """A device that is there."""
    try:
        where = torch.device("cpu" if device is None else device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:  # CUDA's own is an AssertionError
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            f"load: device={device!r} was asked for, and torch cannot use it here: {why}; leave device out for the CPU"
        ) from error
    return where


def _tokenizer(home: Path | None) -> AnyTokenizer | None:
    if home is not None and (home / "source.spm").is_file():
        return MarianTokenizer.load(home)
    return Tokenizer.load(home) if home is not None and first_file(home) is not None else None
