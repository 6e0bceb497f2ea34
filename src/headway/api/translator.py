"""An encoder-decoder with its tokenizer: a text in, another text out; and BLEU, as `sacrebleu` computes it, comparable
between papers by its signature (Post 2018)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headway.api.looking import LooksBoth, Side
from headway.api.options import config_of
from headway.api.pretrained import BATCH, OneOrSeveral, Writer, refuse_empty
from headway.errors import DataError, HeadwayError
from headway.generate import Beams, Generation, GenerationConfig
from headway.generate.sequences import AnyTokenizer
from headway.generate.translate import completed
from headway.generate.translate import translate as translate_ids
from headway.models import EncoderDecoder
from headway.text import MarianTokenizer, Tokenizer


class Translator(Writer[EncoderDecoder, AnyTokenizer], LooksBoth):
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
        tokenizer: AnyTokenizer | None = None,
        *,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        ends = {} if tokenizer is None or tokenizer.eos is None else {"eos_token_id": tokenizer.eos}
        super().__init__(model, tokenizer, generation={**ends, **(generation or {})})

    @OneOrSeveral
    def translate(self, texts: Sequence[str], /, **options: Any) -> list[Generation]:
        """The text that a beam search finds for each text, 4 beams unless the options say otherwise.

        A Generation prints as its text; its `hypotheses` are the n_best, the best first, each with text and score.
        What else is in a list changes no text. `options` are those of `LanguageModel.generate` but for drafts, and:
        prefix, text that every translation begins with, or one for each text, from which the search goes on;
        batch_size, texts at once, 32 unless given, which changes no text.
        """
        refuse_empty(texts)
        tokenizer = self.need_tokenizer()
        unused = tokenizer.unused_ids(self.spec.vocab) if isinstance(tokenizer, Tokenizer) else []
        also = ("prefix", "batch_size")
        config, given = config_of("translate", {"beams": 4, **options}, unused, also)
        sources, prefixes = tokenizer.encode_batch(texts), self._prefixes(given.get("prefix", ""), len(texts))
        numbers = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        found = translate_ids(
            self.model, [sources[i] for i in numbers], config, generation=self.generation,
            prefixes=[prefixes[i] for i in numbers] if any(prefixes) else None, tokenizer=tokenizer,
            requests=numbers, batch_size=given.get("batch_size", BATCH), engine=self.engine,
        )  # fmt: skip
        return sorted(found, key=lambda one: one.request)

    def _rows(self, source: Side, target: Side | None) -> tuple[list[int], list[int]]:
        read = self.need_tokenizer().encode_batch([source])[0] if isinstance(source, str) else [*source]
        if target is not None and not isinstance(target, str):
            return read, [*target]
        start, config = completed(GenerationConfig(), self.generation, self.spec)
        if target is None:
            best = replace(config, beams=Beams())
            (found,) = translate_ids(self.model, [read], best, generation=self.generation)
            return read, [start, *(i for i in found.ids if i not in config.eos)]
        forced = [] if config.forced_first is None else [config.forced_first]
        return read, [start, *forced, *self._prefixes(target, 1)[0]]

    def _prefixes(self, given: str | Sequence[str], count: int) -> list[list[int]]:
        """Ids of what each of `count` targets begins with."""
        texts = [given] * count if isinstance(given, str) else list(given)
        if len(texts) != count:
            raise DataError(f"translate: {len(texts)} prefixes for {count} texts; give one, or one for each")
        tokenizer = self.need_tokenizer()
        if isinstance(tokenizer, MarianTokenizer):
            return [tokenizer.encode(text, side="target", eos=False) if text else [] for text in texts]
        return [tokenizer.encode(text, bos=False, eos=False) if text else [] for text in texts]


@dataclass(frozen=True)
class Bleu:
    """`score` in 0..100 (Papineni et al. 2002); `signature` has tokenization, case, smoothing and version."""

    score: float
    signature: str

    def __str__(self) -> str:
        return f"BLEU {self.score:.2f}  {self.signature}"


def bleu(texts: Sequence[str], references: Sequence[str]) -> Bleu:
    """Of translations, against one reference for each. Raises DataError when they are not as many, HeadwayError without
    `sacrebleu`."""
    if len(texts) != len(references) or not texts:
        raise DataError(f"BLEU: {len(texts)} translations, {len(references)} references; give one for each")
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise HeadwayError("BLEU needs sacrebleu: pip install 'headway[recipes]'") from error
    metric = BLEU()
    found = metric.corpus_score(list(texts), [list(references)])
    return Bleu(float(found.score), str(metric.get_signature()))
