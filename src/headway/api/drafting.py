"""The drafts that a call asks for by name, by a model or by a value."""

from typing import Any

from headway.api.pretrained import Pretrained
from headway.errors import ConfigError, did_you_mean
from headway.generate.drafts import Draft, ModelDraft, NgramDraft
from headway.models import Decoder

AnyDraft = str | Draft | Pretrained[Any, Any]


def make_draft(asked: AnyDraft | None, tokens: int | None, target: Pretrained[Any, Any]) -> Draft | None:
    """The draft for texts of `target`: "ngram" is `NgramDraft`, a loaded model `ModelDraft`, a `Draft` itself.

    `tokens`: at most so many at a time; the draft's usual number unless given. Raises ConfigError for what is no draft,
    a model that is no decoder or has another tokenizer, and tokens without a draft or beside one that has its own.
    """
    own: dict[str, int] = {} if tokens is None else {"tokens": tokens}
    if asked is None:
        if own:
            raise ConfigError(
                f'draft_tokens={tokens} is about drafts, and none were asked for; add draft="ngram", or leave it out'
            )
        return None
    if asked == "ngram":
        return NgramDraft(**own)
    if isinstance(asked, Pretrained):
        return ModelDraft(model=_same_ids(asked, target), **own)
    if not isinstance(asked, Draft):
        close = did_you_mean(asked, ["ngram"]) if isinstance(asked, str) else ""
        raise ConfigError(
            f'draft is "ngram", a LanguageModel or a Draft, got {asked!r}{close}; load a folder first: '
            "draft=headway.load(FOLDER)"
        )
    if own:
        raise ConfigError(f"draft_tokens={tokens}, but the draft has tokens={asked.tokens}; leave out one")
    return asked


def _same_ids(asked: Pretrained[Any, Any], target: Pretrained[Any, Any]) -> Decoder:
    """The decoder of a draft model, whose ids mean what they mean to `target`."""
    if not isinstance(asked.model, Decoder):
        raise ConfigError(f'draft: a draft model is a decoder, and {asked!r} is none; give one, or "ngram"')
    theirs, ours = asked.tokenizer, target.tokenizer
    if theirs is not None and ours is not None and theirs.fingerprint != ours.fingerprint:
        raise ConfigError(
            "draft: the draft model has another tokenizer than the model, so that its ids mean something else; give "
            "one with the same tokenizer"
        )
    return asked.model
