"""What a loaded model computes of one text: attention maps and hidden states."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.generate.reader import evaluating
from headway.models import EncoderDecoder
from headway.models.attention_maps import AttentionMaps, attention_maps, attention_record, numbers_of
from headway.nn.record import Record
from headway.text import MarianTokenizer, Tokenizer

Numbers = int | Sequence[int] | None
"""Layers or heads: all of them (None), one, or several; those below 0 count from the end."""


AnyText = str | tuple[str, str] | Tensor | Sequence[int]


class EncoderDecoderMaps(NamedTuple):
    """The maps of a source and a target: within each, and from the target to the source. A notebook shows the last."""

    encoder: AttentionMaps
    decoder: AttentionMaps
    cross: AttentionMaps

    def _repr_html_(self) -> str:
        return self.cross._repr_html_()


class EncoderDecoderStates(NamedTuple):
    """The hidden states of a source and of a target, as those of a `LanguageModel`."""

    encoder: tuple[Tensor, ...]
    decoder: tuple[Tensor, ...]


class Looks:
    """What a model of one stack tells of a text that it reads."""

    model: Any
    tokenizer: Any

    def attention(
        self, text: AnyText, *, layers: Numbers = None, heads: Numbers = None, special: bool = False
    ) -> AttentionMaps:
        """What the tokens of a text (or ids; of an encoder a text or pair, with the tokens of the template) attend to,
        in some layers and heads, all unless given.

        One forward pass keeps queries and keys; weights are computed when they are asked for, by the row (O(S) memory
        for S tokens) or as a whole. `special`: control tokens written in the text are control tokens, not text. Raises
        ConfigError for a layer or head that is not there.

        >>> maps = lm.attention("The cat sat on the mat", layers=[0, -1], heads=[2])
        >>> maps[-1].row(5), maps[-1].weights(), maps[-1].keys     # [1, 6], [1, 6, 6], the tokens' texts
        """
        stack = self.model.model
        record = attention_record(stack, layers)
        ids = self._record(text, special, record)
        texts = token_texts(self.tokenizer, ids[0].tolist())
        return attention_maps(record, stack, heads, texts, texts)

    def hidden_states(
        self, text: AnyText, *, layers: Numbers = None, special: bool = False
    ) -> tuple[Tensor, ...]:
        """The states [T, M] of a text, as in `attention`: number i of 0..L is what layer i is given, number L what the
        output layer is given, after the last norm; all of them, or those of `layers`. They are the
        `output_hidden_states` of `transformers`."""
        record = Record()
        self._record(text, special, record)
        return _states(record, layers)

    def _row(self, text: Any, special: bool) -> dict[str, Any]:
        """One text as the model reads it, [1, T]."""
        raise NotImplementedError

    def _record(self, text: AnyText, special: bool, record: Record) -> Tensor:
        """Reads a text, of which the record is told, and returns its ids [1, T]."""
        row = self._row(text, special)
        ids: Tensor = row["ids"]
        with evaluating(self.model):
            self.model.hidden(**row, record=record)
        return ids


def attention_across(
    model: EncoderDecoder,
    source: Sequence[int],
    target: Sequence[int],
    texts: tuple[Sequence[str], Sequence[str]],
    layers: Numbers,
    heads: Numbers,
) -> EncoderDecoderMaps:
    """The maps of a source and a target, both ids."""
    records = attention_record(model.encoder, layers), attention_record(model.decoder, layers)
    _run_both(model, source, target, *records)
    read, written = texts
    return EncoderDecoderMaps(
        attention_maps(records[0], model.encoder, heads, read, read),
        attention_maps(records[1], model.decoder, heads, written, written),
        attention_maps(records[1], model.decoder, heads, written, read, across=True),
    )


def states_across(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], layers: Numbers
) -> EncoderDecoderStates:
    """The states of a source and a target, both ids, as in `LanguageModel.hidden_states`."""
    records = Record(), Record()
    _run_both(model, source, target, *records)
    return EncoderDecoderStates(*(_states(record, layers) for record in records))


def token_texts(
    tokenizer: Tokenizer | MarianTokenizer | None, ids: Sequence[int], side: str = "source"
) -> list[str]:
    """What each token reads as by itself: its name in the vocabulary where that is no text, its number where there is
    no tokenizer."""
    found = []
    for i in ids:
        if tokenizer is None:
            text = str(i)
        elif isinstance(tokenizer, MarianTokenizer):
            text = tokenizer.decode([i], side=side, special=True)
        else:
            text = tokenizer.decode([i], special=True)
            text = text if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text else tokenizer.token(i)
        found.append(text)
    return found


def _states(record: Record, layers: Numbers) -> tuple[Tensor, ...]:
    """Those of one row that are asked for: number i is what layer i is given, and the last are the last."""
    return tuple(record.states[i][0] for i in numbers_of("layers", layers, len(record.states)))


def _run_both(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], encoder: Record, decoder: Record
) -> None:
    """One encoding and one pass over the target, all of it at once."""
    read, written = (torch.tensor([[*ids]], device=model.decoder.like.device) for ids in (source, target))
    with evaluating(model):
        memory = model.memory_keys(model.encode(read, record=encoder))
        model.hidden(written, memory=memory, record=decoder)
