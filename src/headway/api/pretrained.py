"""Base classes of models with a tokenizer, and the options of their calls besides the prompts.

Generation options are the fields of `GenerationConfig`, of its `Sampling` (temperature, top_k, ...) and of `Beams`
(length_penalty, n_best, ...), by name; `beams` is a number of beams, or a `Beams`. Fields that the model or the call
sets itself are not options: forbidden ids, forced ids, and the prefix."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypedDict, TypeVar, overload

from headway.checkpoints.saving import save_folder
from headway.errors import ConfigError, DataError, check_known, did_you_mean
from headway.generate import Beams, Draft, GenerationConfig, ModelDraft, NgramDraft, Sampling
from headway.generate.loop import OpenEngine
from headway.models import Decoder, Model, ModelSpec, cost
from headway.text import MarianTokenizer, Tokenizer
from headway.text.tokenizer import Text

BATCH = 32  # default batch size, in texts
AModel = TypeVar("AModel", bound=Model)
Item = TypeVar("Item")
Result = TypeVar("Result")
P = ParamSpec("P")
ATokenizer = TypeVar("ATokenizer", bound=Tokenizer | MarianTokenizer)


class OneOrSeveral(Generic[Item, P, Result]):
    """A method of several texts that also takes a single one (an instance of `Pretrained.single`), and then returns its
    result alone."""

    def __init__(
        self, method: Callable[Concatenate[Any, Sequence[Item], P], list[Result]], model: Any = None
    ) -> None:
        update_wrapper(self, method)
        self._method, self._model = method, model

    def __get__(self, model: Any, kind: type) -> "OneOrSeveral[Item, P, Result]":
        return self if model is None else OneOrSeveral(self._method, model)

    @overload
    def __call__(self, texts: Item, *args: P.args, **named: P.kwargs) -> Result: ...

    @overload
    def __call__(self, texts: Sequence[Item], *args: P.args, **named: P.kwargs) -> list[Result]: ...

    def __call__(self, texts: Any, *args: P.args, **named: P.kwargs) -> Any:
        if isinstance(texts, self._model.single):
            return self._method(self._model, [texts], *args, **named)[0]
        return self._method(self._model, texts, *args, **named)


def refuse_empty(texts: Sequence[Text]) -> None:
    """Raises DataError for a text, or a pair, that is empty or white space: the output of a model for it would be
    meaningless."""
    for number, text in enumerate(texts):
        if not "".join(text).strip():
            raise DataError(f"text {number} is empty: there is nothing to read; leave it out")


class Pretrained(Generic[AModel, ATokenizer]):
    """A model with its tokenizer, or None if its folder has none. `config_keys`: keys of config.json that are not in
    the spec.

    Raises CheckpointError if the tokenizer has ids that the model lacks."""

    single: ClassVar[tuple[type, ...]] = (str,)
    """The types of a single text."""

    def __init__(
        self,
        model: AModel,
        tokenizer: ATokenizer | None = None,
        *,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.require_fits(model.spec.vocab)
        self.model, self.tokenizer, self.generation = model, tokenizer, dict(generation or {})
        self.config_keys: dict[str, Any] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    def need_tokenizer(self) -> ATokenizer:
        """Returns the tokenizer. Raises DataError if there is none."""
        if self.tokenizer is None:
            raise DataError("this model has no tokenizer: give token ids, or a folder with a tokenizer")
        return self.tokenizer

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes a Hugging Face folder that `headway.load` and `transformers` read; all of it, or nothing.

        Raises CheckpointError if `folder` is not empty, unless `overwrite`: then nothing remains of the model in it."""
        save_folder(
            folder, self.model, tokenizer=self.tokenizer, generation=self.generation, config=self.config_keys,
            overwrite=overwrite,
        )  # fmt: skip

    def __repr__(self) -> str:
        count = f"{cost.parameter_count(self.spec):,} parameters"
        return f"{type(self).__name__}({self.spec.family}, {count}, {self.tokenizer!r})"


class Writer(Pretrained[AModel, ATokenizer]):
    """The base of models that generate text. Its one engine stays open; calls from several threads are batched
    together."""

    @cached_property
    def engine(self) -> OpenEngine:
        """The engine that generates. Its `keep` bounds the memory that the prefix cache retains."""
        return OpenEngine()

    def close(self) -> None:
        """Frees the memory that earlier calls left, once running calls have ended. Later calls still work."""
        self.engine.close()


def check_options(call: str, options: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError for an unknown option."""
    for name in options:
        check_known(name, known, f"{call} has no option")


_SAMPLING, _BEAMS, _CONFIG = (
    tuple(field.name for field in fields(kind) if field.name not in excluded)
    for kind, excluded in (
        (Sampling, ()),
        (Beams, ("width",)),
        (GenerationConfig, ("sampling", "forbidden", "prefix", "forced_first", "forced_last")),
    )
)


class Scoring(TypedDict, total=False):
    """Options of scoring.

    batch_size: rows read at once; changes results by rounding only.
    beyond_context: whether to go beyond the trained context.
    special: whether control tokens written in the texts are control tokens, not text.
    """

    batch_size: int
    beyond_context: bool
    special: bool


def config_of(
    call: str, options: Mapping[str, Any], unused: Sequence[int], also: Sequence[str] = ()
) -> tuple[GenerationConfig, dict[str, Any]]:
    """Returns the generation config of a call's options, for a model that never generates an `unused` id; and the
    options named in `also`.

    Raises ConfigError for an unknown option, for beam search options without a number of beams, and as
    `GenerationConfig` does."""
    check_options(call, options, (*_CONFIG, *_SAMPLING, *_BEAMS, *also))
    sampling, search, extra, settings = (
        {name: options[name] for name in names if name in options}
        for names in (_SAMPLING, _BEAMS, also, _CONFIG)
    )
    if isinstance(settings.get("beams"), int):
        settings["beams"] = Beams(settings["beams"], **search)
    elif search:
        raise ConfigError(
            f"{next(iter(search))} needs a beam search, with beams as a number; add beams=4 (--beams 4), or leave it "
            "out"
        )
    return GenerationConfig(**settings, sampling=Sampling(**sampling), forbidden=unused), extra


def scoring_of(call: str, how: Scoring) -> tuple[dict[str, Any], bool]:
    """Returns the options for `headway.generate.score`, and `special`."""
    check_options(call, how, tuple(Scoring.__annotations__))
    options: dict[str, Any] = {"batch_size": BATCH, **how}
    return options, options.pop("special", False)


AnyDraft = str | Draft | Pretrained[Any, Any]


def make_draft(draft: AnyDraft | None, tokens: int | None, target: Pretrained[Any, Any]) -> Draft | None:
    """Returns the draft for `target`: an `NgramDraft` for "ngram", a `ModelDraft` for a loaded model, or the `Draft`
    itself.

    `tokens`: maximum number of draft tokens at a time; None is the draft's default. Raises ConfigError for anything
    else, for a model that is not a decoder or has another tokenizer, and for `tokens` without a draft or with a
    `Draft`."""
    limit: dict[str, int] = {} if tokens is None else {"tokens": tokens}
    if draft is None:
        if limit:
            raise ConfigError(f'draft_tokens={tokens} needs a draft; add draft="ngram", or leave it out')
        return None
    if draft == "ngram":
        return NgramDraft(**limit)
    if isinstance(draft, Pretrained):
        if not isinstance(draft.model, Decoder):
            raise ConfigError(f'draft: a draft model must be a decoder, got {draft!r}; give one, or "ngram"')
        theirs, ours = draft.tokenizer, target.tokenizer
        if theirs is not None and ours is not None and theirs.fingerprint != ours.fingerprint:
            raise ConfigError(
                "draft: the draft model's tokenizer differs from the model's; give a draft model with the same "
                "tokenizer"
            )
        return ModelDraft(model=draft.model, **limit)
    if not isinstance(draft, Draft):
        close = did_you_mean(draft, ["ngram"]) if isinstance(draft, str) else ""
        raise ConfigError(
            f'draft must be "ngram", a LanguageModel or a Draft, got {draft!r}{close}; load a folder first: '
            "draft=headway.load(FOLDER)"
        )
    if limit:
        raise ConfigError(
            f"draft_tokens={tokens}, but the draft has tokens={draft.tokens}; leave draft_tokens out"
        )
    return draft
