"""Parts of a home-made run: encoders from scratch, linear attention, dropout, and the tokenizer that is trained."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError, PatternError
from headway.models import FAMILIES, ModelSpec
from headway.patterns import Pattern, parse
from headway.positions import Learned
from headway.text import Tokenizer, train_bpe, train_characters, train_words
from headway.train.text_config import TextConfig

MASK, PAD = "[MASK]", "[PAD]"


def layer_patterns(text: str | None) -> list[Pattern]:
    """`Window.last(128); Causal()` as patterns, one per layer, to be repeated."""
    try:
        return [parse(part) for part in (text or "Causal()").split(";")]
    except PatternError as error:
        raise ConfigError(f"patterns: {error}") from None


def encoder_spec(config: TextConfig, vocab: int, depth: int, sizes: Mapping[str, Any]) -> ModelSpec:
    """An encoder with the usual values of its family for what `sizes` and the settings leave open: a feed-forward of
    4 widths, as many kv heads as query heads, and, where positions are a table, one of `context` rows."""
    assert config.family is not None
    usual: dict[str, Any] = {"kv_heads": sizes["heads"], "hidden": 4 * sizes["width"]}
    positions = FAMILIES[config.family].defaults.get("positions")
    if isinstance(positions, Learned):
        usual["positions"] = replace(positions, size=config.context)
    return ModelSpec.of(
        config.family,
        vocab=vocab,
        layers=depth,
        trained_context=config.context,
        patterns=None if config.patterns is None else layer_patterns(config.patterns),
        **{**usual, **sizes},
    )


def changed(spec: ModelSpec, config: TextConfig) -> ModelSpec:
    """With the dropout and the linear attention that the settings ask for."""
    if config.dropout is not None:
        spec = replace(spec, dropout=config.dropout, attention_dropout=config.dropout)
    return spec if config.linear is None else spec.with_linear(LinearAttentionSpec(config.linear))


def trained_tokenizer(texts: Iterable[str], units: str, vocab: int, *, masked: bool) -> Tokenizer:
    """A tokenizer of `units` ("bpe", "characters", "words") from texts. For a masked model, a BPE has a mask, and
    its template ends a text as well."""
    if units != "bpe":
        return {"characters": train_characters, "words": train_words}[units](texts, vocab)
    if not masked:
        return train_bpe(texts, vocab)
    made = train_bpe(texts, vocab, special_tokens=[MASK, PAD])
    return Tokenizer(made.backend, bos=made.bos, eos=made.eos, ends_with_eos=True, config=made.config)
