"""What a loaded model computes of one text: attention maps and hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headway.generate.reader import evaluating
from headway.models import Decoder, Encoder, EncoderDecoder, Memory
from headway.models.attention_maps import AttentionMaps, attention_maps, attention_record, numbers_of
from headway.models.inputs import checked_tokens
from headway.nn.record import Record
from headway.text import MarianTokenizer, Tokenizer
from headway.tokens import Tokens

Numbers = int | Sequence[int] | None
"""Layers or heads: all of them (None), one, or several; those below 0 count from the end."""


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


def attention_of(
    model: Decoder | Encoder, inputs: dict[str, Any], texts: Sequence[str], layers: Numbers, heads: Numbers
) -> AttentionMaps:
    """The maps of one row, whose tokens read as `texts`."""
    record = attention_record(model.model, layers)
    _run(model, inputs, record)
    return attention_maps(record, model.model, heads, texts, texts)


def states_of(model: Decoder | Encoder, inputs: dict[str, Any], layers: Numbers) -> tuple[Tensor, ...]:
    """The states [T, M] of one row that are asked for: number i is what layer i is given, and the last are the last."""
    numbers = numbers_of("layers", layers, model.spec.layers + 1)
    record = Record()
    _run(model, inputs, record)
    return tuple(record.states[i][0] for i in numbers)


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
    """The states of a source and a target, both ids, as in `states_of`."""
    records = Record(), Record()
    _run_both(model, source, target, *records)
    found = [
        tuple(record.states[i][0] for i in numbers_of("layers", layers, len(record.states)))
        for record in records
    ]
    return EncoderDecoderStates(*found)


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


def _run(model: Decoder | Encoder, inputs: dict[str, Any], record: Record) -> None:
    given = dict(inputs)
    ids, tokens = given.pop("ids"), given.pop("tokens", None)
    with evaluating(model):
        model.model(ids, checked_tokens(model.spec, ids, tokens), record=record, **given)


def _run_both(
    model: EncoderDecoder, source: Sequence[int], target: Sequence[int], encoder: Record, decoder: Record
) -> None:
    """One encoding and one pass over the target, all of it at once."""
    assert model.spec.encoder is not None
    device = model.decoder.like.device
    read, written = (torch.tensor([[*ids]], device=device) for ids in (source, target))
    tokens = checked_tokens(model.spec.encoder, read, None)
    table = model.decoder.embed_tokens if model.spec.shared_embedding else None
    with evaluating(model):
        states = model.encoder(read, tokens, embedding=table, record=encoder)
        memory = model.memory_keys(Memory(states, tokens))
        own: Tokens = checked_tokens(model.spec, written, None)
        model.decoder(written, own, memory=memory, record=decoder)
