"""An encoder-decoder with its tokenizer: a text in, another text out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

from headway.api.batching import BATCH
from headway.checkpoints.folder import save_folder
from headway.errors import ConfigError, DataError, did_you_mean
from headway.generate import Beams, Generation, GenerationConfig
from headway.generate.translate import translate as translate_ids
from headway.models import EncoderDecoder, ModelSpec, cost
from headway.text import MarianTokenizer, Tokenizer


class Search(TypedDict, total=False):
    """How to translate. Whatever is not given: 4 beams, length_penalty 1, the best text, 32 texts at once.

    beams: unfinished texts that continue at once; 1 is greedy.   n_best: hypotheses that are returned, at most `beams`.
    length_penalty, early_stopping, with_greedy: see `Beams`.
    no_repeat_ngram, min_new_tokens, max_new_tokens, use_cache, kv_cache_dtype: see `GenerationConfig`.
    batch_size: texts at once; it changes no text.
    """

    beams: int
    length_penalty: float
    n_best: int
    early_stopping: bool | Literal["never"]
    no_repeat_ngram: int
    min_new_tokens: int
    with_greedy: bool
    max_new_tokens: int | None
    use_cache: bool
    kv_cache_dtype: str
    batch_size: int


_BEAMS = ("length_penalty", "n_best", "early_stopping", "with_greedy")


class Translator:
    """Writes a text for a text: a translation, a summary, whatever the model was trained for.

    >>> translator = headway.load("runs/translation/final")
    >>> print(translator.translate("A man rides a horse."))
    >>> for text in translator.translate("A man rides a horse.", n_best=4).hypotheses: print(text.score, text.text)

    Attributes:
        model: the `EncoderDecoder`, in evaluation mode.   tokenizer: of both sides; None when the folder has none.
        generation: the content of generation_config.json; `headway.generate.translate` lists the keys that are used.
    """

    def __init__(
        self,
        model: EncoderDecoder,
        tokenizer: Tokenizer | MarianTokenizer | None = None,
        *,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        if tokenizer is not None:
            tokenizer.require_fits(model.spec.vocab)
        ends = {} if tokenizer is None or tokenizer.eos is None else {"eos_token_id": tokenizer.eos}
        self.model, self.tokenizer, self.generation = model, tokenizer, {**ends, **(generation or {})}

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @overload  # a str is a Sequence[str], too
    def translate(self, texts: str, **options: Unpack[Search]) -> Generation: ...  # type: ignore[overload-overlap]

    @overload
    def translate(self, texts: Sequence[str], **options: Unpack[Search]) -> list[Generation]: ...

    def translate(
        self, texts: str | Sequence[str], **options: Unpack[Search]
    ) -> Generation | list[Generation]:
        """The text that a beam search finds for each text: `Search` has the options.

        A Generation prints as its text; its `hypotheses` are the n_best, the best first, each with text and score.
        What else is in a list changes no text.
        """
        if isinstance(texts, str):
            return self.translate([texts], **options)[0]
        if self.tokenizer is None:
            raise DataError("this model has no tokenizer: give a folder with tokenizer.json, or source.spm")
        for name in options:
            if name not in Search.__annotations__:
                known = Search.__annotations__
                raise ConfigError(
                    f"translate has no option {name!r}{did_you_mean(name, known)}; there are {', '.join(known)}"
                )
        given: dict[str, Any] = dict(options)
        size = given.pop("batch_size", BATCH)
        search = {name: given.pop(name) for name in _BEAMS if name in given}
        unused = self.tokenizer.unused_ids(self.spec.vocab) if isinstance(self.tokenizer, Tokenizer) else []
        config = GenerationConfig(
            **{**given, "beams": Beams(given.get("beams", 4), **search)}, forbidden=unused
        )
        sources = self.tokenizer.encode_batch(texts)
        numbers = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        found = translate_ids(
            self.model, [sources[i] for i in numbers], config, generation=self.generation,
            tokenizer=self.tokenizer, requests=numbers, batch_size=size,
        )  # fmt: skip
        return sorted(found, key=lambda one: one.request)

    def save(self, folder: str | Path, *, overwrite: bool = False) -> None:
        """As `LanguageModel.save`."""
        save_folder(
            folder, self.model, tokenizer=self.tokenizer, generation=self.generation, overwrite=overwrite
        )

    def __repr__(self) -> str:
        return f"Translator({self.spec.family}, {cost.parameter_count(self.spec):,} parameters, {self.tokenizer!r})"
