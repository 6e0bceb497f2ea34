"""Attention maps and hidden states of one text, by a loaded model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from headway.generate.reader import evaluating
from headway.generate.sequences import AnyTokenizer
from headway.models.attention_maps import AttentionMaps, attention_maps, attention_record, numbers_of
from headway.nn.record import Record
from headway.text import MarianTokenizer

Numbers = int | Sequence[int] | None
"""Layers or heads: all of them (None), one, or several; those below 0 count from the end."""
AnyText = str | tuple[str, str] | Tensor | Sequence[int]
States = tuple[Tensor, ...]


class EncoderDecoderMaps(NamedTuple):
    """The maps of a source and a target: within each, and from the target to the source. A notebook shows the last."""

    encoder: AttentionMaps
    decoder: AttentionMaps
    cross: AttentionMaps

    def _repr_html_(self) -> str:
        return self.cross._repr_html_()


class EncoderDecoderStates(NamedTuple):
    """The hidden states of a source and of a target, as those of a `LanguageModel`."""

    encoder: States
    decoder: States


class Looks:
    """Attention maps and hidden states of texts, for models of one stack."""

    model: Any
    tokenizer: Any

    def attention(
        self, text: AnyText, *, layers: Numbers = None, heads: Numbers = None, special: bool = False
    ) -> AttentionMaps:
        """Maps of what the tokens of a text (or ids; of an encoder a text or pair, with the tokens of the template)
        attend to, in some layers and heads, all unless given.

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

    def hidden_states(self, text: AnyText, *, layers: Numbers = None, special: bool = False) -> States:
        """The states [T, M] of a text, as in `attention`: number i of 0..L is what layer i is given, number L what the
        output layer is given, after the last norm; all of them, or those of `layers`. They are the
        `output_hidden_states` of `transformers`."""
        record = Record()
        self._record(text, special, record)
        return states_of(record, layers)

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


def token_texts(tokenizer: AnyTokenizer | None, ids: Sequence[int], side: str = "source") -> list[str]:
    """The text of each token by itself: its name in the vocabulary where that is no text, its number where there is
    no tokenizer."""
    texts = []
    for i in ids:
        if tokenizer is None:
            text = str(i)
        elif isinstance(tokenizer, MarianTokenizer):
            text = tokenizer.decode([i], side=side, special=True)
        else:
            text = tokenizer.decode([i], special=True)
            text = text if text.strip() and "\N{REPLACEMENT CHARACTER}" not in text else tokenizer.token(i)
        texts.append(text)
    return texts


def states_of(record: Record, layers: Numbers) -> States:
    """The states of one row for these layers: number i is the input of layer i, and the last are the last."""
    return tuple(record.states[i][0] for i in numbers_of("layers", layers, len(record.states)))
