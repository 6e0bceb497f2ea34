"""Attention maps and hidden states of a text, computed by a loaded model."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from headway.generate.reader import evaluating
from headway.generate.sequences import AnyTokenizer
from headway.models.attention_maps import AttentionMaps, attention_maps, attention_record, numbers_of
from headway.nn.record import Record
from headway.text import MarianTokenizer

Numbers = int | Sequence[int] | None
"""Layers or heads: all (None), one, or several; negative numbers count from the end."""
AnyText = str | tuple[str, str] | Tensor | Sequence[int]
States = tuple[Tensor, ...]


class EncoderDecoderMaps(NamedTuple):
    """Attention maps of a source and a target: within each, and from target to source. A notebook shows the last."""

    encoder: AttentionMaps
    decoder: AttentionMaps
    cross: AttentionMaps

    def _repr_html_(self) -> str:
        return self.cross._repr_html_()


class EncoderDecoderStates(NamedTuple):
    """Hidden states of a source and of a target, as those of a `LanguageModel`."""

    encoder: States
    decoder: States


class Looks:
    """Adds attention maps and hidden states to models with a single stack."""

    model: Any
    tokenizer: Any

    def attention(
        self, text: AnyText, *, layers: Numbers = None, heads: Numbers = None, special: bool = False
    ) -> AttentionMaps:
        """Returns the attention maps of a text (or of token ids; of an encoder, a text or pair, with the special tokens
        that the tokenizer adds) in the given layers and heads, by default all.

        One forward pass keeps queries and keys; attention weights are computed on request, by the row (O(S) memory for
        S tokens) or as a whole. `special`: control tokens written in the text are control tokens, not text. Raises
        ConfigError for a layer or head that does not exist.

        >>> maps = lm.attention("The cat sat on the mat", layers=[0, -1], heads=[2])
        >>> maps[-1].row(5), maps[-1].weights(), maps[-1].keys     # [1, 6], [1, 6, 6], the tokens' texts
        """
        stack = self.model.model
        record = attention_record(stack, layers)
        ids = self._record(text, special, record)
        texts = token_texts(self.tokenizer, ids[0].tolist())
        return attention_maps(record, stack, heads, texts, texts)

    def hidden_states(self, text: AnyText, *, layers: Numbers = None, special: bool = False) -> States:
        """Returns the hidden states [T, M] of a text, given as in `attention`: state i of 0..L-1 is the input of layer
        i, state L the input of the output layer, after the last norm; all of them, or those of `layers`. They equal the
        `output_hidden_states` of `transformers`."""
        record = Record()
        self._record(text, special, record)
        return states_of(record, layers)

    def _row(self, text: Any, special: bool) -> dict[str, Any]:
        """Returns one text as the model's inputs, [1, T]."""
        raise NotImplementedError

    def _record(self, text: AnyText, special: bool, record: Record) -> Tensor:
        """Runs the model on a text with this record, and returns the token ids [1, T]."""
        row = self._row(text, special)
        ids: Tensor = row["ids"]
        with evaluating(self.model):
            self.model.hidden(**row, record=record)
        return ids


def token_texts(tokenizer: AnyTokenizer | None, ids: Sequence[int], side: str = "source") -> list[str]:
    """Returns the text of each token by itself; its name in the vocabulary if it has no readable text, its id if there
    is no tokenizer."""
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
    """Returns the hidden states of the record's first row for these layers: state i is the input of layer i, the last
    state that of the output layer."""
    return tuple(record.states[i][0] for i in numbers_of("layers", layers, len(record.states)))
