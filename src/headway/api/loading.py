"""`headway.load(...)`: loads a folder or a model of the Hugging Face Hub, with its tokenizer, for its task."""

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
    """What a task needs: a kind of model, the command for it, and the class that `load` returns."""

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
    """Options of `load` for all tasks."""

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
    """Loads a model from a Hugging Face folder, or by its id on the Hugging Face Hub (downloaded once).

    The class of the result depends on the model in the folder, and on `task`:

        task          returns         from
        "causal-lm"   LanguageModel   a decoder
        "translation" Translator      an encoder-decoder
        "masked-lm"   MaskedLM        an encoder with a masked-lm head
        "classify"    Classifier      an encoder with a classifier
        "tag"         Tagger          an encoder with a token classifier
        "answer"      Answerer        an encoder with a question-answering head
        "embed"       Embedder        any encoder; pooled as declared in a sentence-transformers folder
        "states"      TextEncoder     any encoder

    Args:
        source: a folder (config.json, model.safetensors, tokenizer.json), or an id such as "owner/name". An adapter's
            folder loads the base model that it names, with the adapter.
        task: the task; None takes the one for which the folder was saved.
        dtype: "float32", "bfloat16", ... or a torch dtype; None or "auto" keeps the file's (float16 becomes
            float32 on a CPU, where float16 is hundreds of times slower): the rule of `headway.storage.dtypes`.
        backend: attention backend; a named one that cannot run is an error, never a fallback.
        revision: branch, tag or commit of a Hub id.
        allow_pickle: whether to read old `.bin` weights too (with torch's restricted unpickler).
        adapter: folders of PEFT adapters, whose effects add up; the tokenizer and generation_config.json come from the
            last adapter that has them.
        any_base: whether to accept adapters that were trained on other base weights, or do not name their base.
        pool, unit: for "embed": pooling over a text's tokens ("first", "last" or "mean"), and whether embeddings have
            unit length. Default: as the folder says, or "mean" and False.
        compress: whether to store bf16 weights in 11 bits each, losslessly (`headway.models.quantize.compress_model`).
        dequantize: whether to expand weights of 4 to 8 bits (of GGUF files and quantized folders). Otherwise they stay
            quantized, and products with them round the activations to 8 bits.
        device: the device of the weights; the CPU by default.
    Raises CheckpointError or ConfigError, which name the file and its fault; ConfigError for a device that torch cannot
    use.
    """
    if task is not None:
        check_known(task, TASKS, "load: there is no task")
    load_dtype, where = named_dtype(dtype), _device(device)
    adapters = [adapter] if isinstance(adapter, str | Path) else adapter
    for place in (source, *(adapters if isinstance(adapters, Sequence) else [adapters])):
        if not isinstance(place, str | Path):
            raise ConfigError(
                f"load: a model or adapter must be a folder, a file or a Hub id, as a str or Path, got {place!r}"
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
    if tokenizer is not None:  # checked before the weights are read
        tokenizer.require_fits(folder.spec.vocab)
    model = build_model(folder, dtype=load_dtype, device=where, backend=backend, dequantize=dequantize)
    if compress:
        compress_model(model)
    return _wrapped(task, model, tokenizer, folder)


def wrong_task(source: str | Path, spec: ModelSpec, task: str) -> ConfigError:
    """Returns the error for a model that does not fit `task`: its kind, the kind that the task needs, and what to
    do."""
    kind = TASKS[spec.task]
    return ConfigError(
        f"{source} is {kind.model} ({spec.family}), and {task!r} needs {TASKS[task].model}; use it with "
        f"headway {kind.command}, or task={spec.task!r}"
    )


def _head(spec: ModelSpec, task: str, sentences: SentenceConfig | None) -> Head:
    """Returns the head that a task needs."""
    if task == "states":
        return Head("states")
    if task != "embed" or (sentences is None and spec.head.task == "embed"):
        return spec.head
    return Head("embed", pool="mean") if sentences is None else sentences.head


def _wrapped(task: str, model: Model, tokenizer: AnyTokenizer | None, folder: Folder) -> AnyModel:
    options: dict[str, Any] = {}
    if isinstance(tokenizer, MarianTokenizer) and not isinstance(model, EncoderDecoder):
        raise ConfigError(
            f"{folder.path}: source.spm needs an encoder-decoder; this model is {folder.spec.family}"
        )
    if isinstance(model, Decoder | EncoderDecoder):
        options["generation"] = folder.generation
    elif task == "classify":
        options["independent"] = folder.config.get("problem_type") == INDEPENDENT
    elif task == "embed":
        options["dimensions"] = folder.config.get(DIMENSIONS) or ()
    wrapped: AnyModel = TASKS[task].wrapper(model, tokenizer, **options)
    return wrapped


def _device(device: str | torch.device | None) -> torch.device:
    """Returns a device, after checking that torch can use it. Raises ConfigError if not."""
    try:
        where = torch.device("cpu" if device is None else device)
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, TypeError) as error:  # for CUDA it is an AssertionError
        why = str(error).partition("\n")[0].partition(". ")[0]
        raise ConfigError(
            f"load: torch cannot use device={device!r} here: {why}; leave device out for the CPU"
        ) from error
    return where


def _tokenizer(home: Path | None) -> AnyTokenizer | None:
    if home is not None and (home / "source.spm").is_file():
        return MarianTokenizer.load(home)
    return Tokenizer.load(home) if home is not None and first_file(home) is not None else None
