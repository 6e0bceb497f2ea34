"""What all models with a tokenizer share."""

from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, TypeVar, overload

from headway.checkpoints.saving import save_folder
from headway.errors import DataError, check_known
from headway.generate.open_engine import OpenEngine
from headway.models import Decoder, EncoderDecoder, Model, ModelSpec, cost
from headway.text import MarianTokenizer, Tokenizer
from headway.text.tokenizer import Text

BATCH = 32  # texts at once
AModel = TypeVar("AModel", bound=Model)
Item = TypeVar("Item")
Result = TypeVar("Result")
P = ParamSpec("P")
ATokenizer = TypeVar("ATokenizer", bound=Tokenizer | MarianTokenizer)


class OneOrSeveral(Generic[Item, P, Result]):
    """A method of several texts, which takes a single one (`Pretrained.single`), too, and returns its result alone."""

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
    """Raises DataError for a text, or a pair, that is empty or white space: what a model says of it is made up."""
    for number, text in enumerate(texts):
        if not "".join(text).strip():
            raise DataError(f"text {number} is empty: there is nothing to read; leave it out")


class Pretrained(Generic[AModel, ATokenizer]):
    """A model with its tokenizer, None where its folder has none; `config_keys`: of config.json, not in the spec.

    Raises CheckpointError when the tokenizer has ids that the model lacks."""

    single: ClassVar[tuple[type, ...]] = (str,)
    """What a text is."""

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
        """The tokenizer. Raises DataError when there is none."""
        if self.tokenizer is None:
            raise DataError("this model has no tokenizer: give token ids, or a folder with a tokenizer")
        return self.tokenizer

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """Writes a Hugging Face folder that `headway.load` and `transformers` read; all of it, or nothing.

        Raises CheckpointError where `folder` holds anything, unless `overwrite`: then nothing of a model that is there
        remains."""
        save_folder(
            folder, self.model, tokenizer=self.tokenizer, generation=self.generation, config=self.config_keys,
            overwrite=overwrite,
        )  # fmt: skip

    def __repr__(self) -> str:
        count = f"{cost.parameter_count(self.spec):,} parameters"
        return f"{type(self).__name__}({self.spec.family}, {count}, {self.tokenizer!r})"


class Writer(Pretrained[AModel, ATokenizer]):
    """What models that write texts share: one engine, which stays open. Any thread may call: what they ask for is read
    together."""

    _engine: OpenEngine | None = None

    @property
    def engine(self) -> OpenEngine:
        """What writes the texts. Its `keep` bounds what stays for texts that begin as earlier ones did."""
        if self._engine is None or self._engine.model is not self.model:
            assert isinstance(self.model, Decoder | EncoderDecoder)
            self._engine = OpenEngine(self.model)
        return self._engine

    def close(self) -> None:
        """Gives back the memory that earlier texts left, when the calls that run have ended. Later calls go on."""
        if self._engine is not None:
            self._engine.close()


def check_options(call: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raises ConfigError for an option that is not known."""
    for name in given:
        check_known(name, known, f"{call} has no option")
