"""An encoder-decoder with its tokenizer: text in, text out; and BLEU as computed by `sacrebleu`, comparable between
papers by its signature (Post 2018)."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch

from headway.api.looking import EncoderDecoderMaps, EncoderDecoderStates, Numbers, states_of, token_texts
from headway.api.pretrained import BATCH, OneOrSeveral, Writer, config_of, refuse_empty
from headway.errors import DataError, HeadwayError
from headway.generate import Beams, Generation, GenerationConfig
from headway.generate.reader import evaluating
from headway.generate.sequences import AnyTokenizer
from headway.generate.translate import completed
from headway.generate.translate import translate as translate_ids
from headway.models import EncoderDecoder
from headway.models.attention_maps import attention_maps, attention_record
from headway.nn.record import Record
from headway.text import MarianTokenizer, Tokenizer
from headway.text.languages import check_pair

Side = str | Sequence[int]
"""A text, or its token ids."""


class Translator(Writer[EncoderDecoder, AnyTokenizer]):
    """Generates a text from a text: a translation, a summary, or whatever the model was trained for.

    >>> translator = headway.load("runs/translation/final")
    >>> print(translator.translate("A man rides a horse."))
    >>> for text in translator.translate("A man rides a horse.", n_best=4).hypotheses: print(text.score, text.text)

    Attributes:
        model: the `EncoderDecoder`, in evaluation mode.   tokenizer: for both sides; None if the folder has none.
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
        """Returns the translation of each text by beam search, with 4 beams by default.

        A Generation prints as its text; its `hypotheses` are the n_best, the best first, each with text and score.
        Other texts of the list do not change a result. `options` are those of `LanguageModel.generate` except drafts,
        and: prefix, the text with which every translation begins, or one for each text; batch_size, number of texts at
        once (default 32), which does not change results; source_language and target_language, as in `between`.
        """
        pair = [options.pop(f"{side}_language", None) for side in ("source", "target")]
        if pair != [None, None]:
            return self.between(*pair).translate(texts, **options)
        refuse_empty(texts)
        tokenizer, generation = self.need_tokenizer(), self._generation()
        unused = tokenizer.unused_ids(self.spec.vocab) if isinstance(tokenizer, Tokenizer) else []
        also = ("prefix", "batch_size")
        config, extra = config_of("translate", {"beams": 4, **options}, unused, also)
        sources, prefixes = tokenizer.encode_batch(texts), self._prefixes(extra.get("prefix", ""), len(texts))
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        generations = translate_ids(
            self.model, [sources[i] for i in order], config, generation=generation,
            prefixes=[prefixes[i] for i in order] if any(prefixes) else None, tokenizer=tokenizer,
            requests=order, batch_size=extra.get("batch_size", BATCH), engine=self.engine,
        )  # fmt: skip
        return sorted(generations, key=lambda text: text.request)

    def between(self, source: str | None = None, target: str | None = None) -> "Translator":
        """Returns this translator for a pair of languages, by their names in its tokenizer (`tokenizer.languages`:
        "en_XX", "eng_Latn", "en"). The defaults are those of its folder (src_lang and tgt_lang of
        tokenizer_config.json).

        Raises DataError for a missing or unknown language, and for a model without a choice of languages."""
        tokenizer = self.need_tokenizer()
        if isinstance(tokenizer, MarianTokenizer) or not tokenizer.languages:
            raise DataError(
                "source_language, target_language: this model's tokenizer has no languages to choose from; leave them "
                "out (a Marian model of several target languages takes the language in the text: "
                '">>fra<< Hello")'
            )
        translator = copy(self)
        translator.tokenizer, translator.engine = tokenizer.between(source, target), self.engine
        return translator

    def _generation(self) -> Mapping[str, Any]:
        """Returns the content of generation_config.json with the target language of a multilingual model: as the
        decoder's start token if that is a language, or else as the first token that is forced. Raises DataError if the
        source or target language is missing."""
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, Tokenizer) or not tokenizer.languages:
            return self.generation
        known = tokenizer.languages
        _, target = check_pair(known, tokenizer.config)
        starts = self.generation.get("decoder_start_token_id") in known.values()
        key = "decoder_start_token_id" if starts else "forced_bos_token_id"
        return {**self.generation, key: known[target]}

    def attention(
        self, source: Side, target: Side | None = None, *, layers: Numbers = None, heads: Numbers = None
    ) -> EncoderDecoderMaps:
        """Returns the attention maps of a text and its translation: its `encoder`, the `decoder` and `cross`, each as
        from `LanguageModel.attention`. `target`: the translation, by default the model's own; its queries begin with
        the decoder's start token. Both are texts or token ids."""
        stacks = self.model.encoder, self.model.decoder
        records = [attention_record(stack, layers) for stack in stacks]
        sides = zip(self._record(source, target, *records), ("source", "target"), strict=True)
        read, written = (token_texts(self.tokenizer, ids, side) for ids, side in sides)
        return EncoderDecoderMaps(
            attention_maps(records[0], stacks[0], heads, read, read),
            attention_maps(records[1], stacks[1], heads, written, written),
            attention_maps(records[1], stacks[1], heads, written, read, across=True),
        )

    def hidden_states(
        self, source: Side, target: Side | None = None, *, layers: Numbers = None
    ) -> EncoderDecoderStates:
        """Returns the hidden states of a text in the encoder and of its translation in the decoder; arguments as in
        `attention`, states as in `LanguageModel.hidden_states`."""
        records = Record(), Record()
        self._record(source, target, *records)
        return EncoderDecoderStates(*(states_of(record, layers) for record in records))

    def _record(
        self, source: Side, target: Side | None, encoder: Record, decoder: Record
    ) -> tuple[list[int], list[int]]:
        """Runs the encoder and one pass over the whole target with these records, and returns the token ids of both."""
        rows = self._rows(source, target)
        read, written = (torch.tensor([ids], device=self.model.decoder.like.device) for ids in rows)
        with evaluating(self.model):
            memory = self.model.memory_keys(self.model.encode(read, record=encoder))
            self.model.hidden(written, memory=memory, record=decoder)
        return rows

    def _rows(self, source: Side, target: Side | None) -> tuple[list[int], list[int]]:
        """Returns the token ids that the encoder reads, and those that the decoder reads."""
        read = self.need_tokenizer().encode_batch([source])[0] if isinstance(source, str) else [*source]
        if target is not None and not isinstance(target, str):
            return read, [*target]
        generation = self._generation()
        start, config = completed(GenerationConfig(), generation, self.spec)
        if target is None:
            best = replace(config, beams=Beams())
            (written,) = translate_ids(self.model, [read], best, generation=generation)
            return read, [start, *(i for i in written.ids if i not in config.eos)]
        forced = [] if config.forced_first is None else [config.forced_first]
        return read, [start, *forced, *self._prefixes(target, 1)[0]]

    def _prefixes(self, prefix: str | Sequence[str], count: int) -> list[list[int]]:
        """Returns the token ids with which each of `count` targets begins."""
        texts = [prefix] * count if isinstance(prefix, str) else list(prefix)
        if len(texts) != count:
            raise DataError(f"translate: {len(texts)} prefixes for {count} texts; give one, or one for each")
        tokenizer = self.need_tokenizer()
        if isinstance(tokenizer, MarianTokenizer):
            return [tokenizer.encode(text, side="target", eos=False) if text else [] for text in texts]
        return [tokenizer.encode(text, bos=False, eos=False) if text else [] for text in texts]


@dataclass(frozen=True)
class Bleu:
    """A BLEU score in 0..100 (Papineni et al. 2002); `signature` has tokenization, case, smoothing and version."""

    score: float
    signature: str

    def __str__(self) -> str:
        return f"BLEU {self.score:.2f}  {self.signature}"


def bleu(texts: Sequence[str], references: Sequence[str]) -> Bleu:
    """Returns the BLEU score of translations, with one reference each. Raises DataError if their numbers differ or
    there are none, HeadwayError without `sacrebleu`."""
    if len(texts) != len(references) or not texts:
        raise DataError(f"BLEU: {len(texts)} translations, {len(references)} references; give one for each")
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise HeadwayError("BLEU needs sacrebleu: pip install 'headway[recipes]'") from error
    metric = BLEU()
    result = metric.corpus_score(list(texts), [list(references)])
    return Bleu(float(result.score), str(metric.get_signature()))
