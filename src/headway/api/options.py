"""What calls that write or score texts can be given: prompts, and what is asked for beside them.

Options of writing are the fields of `GenerationConfig`, of its `Sampling` (temperature, top_k, ...) and of `Beams`
(length_penalty, n_best, ...), by name; `beams` is a number of them, or a `Beams`. What a model or a call says itself is
none: ids that are forbidden, forced or a prefix.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from torch import Tensor

from headway.api.pretrained import BATCH, Pretrained, check_options
from headway.errors import ConfigError, DataError, did_you_mean
from headway.generate import Beams, Draft, GenerationConfig, ModelDraft, NgramDraft, Sampling
from headway.models import Decoder
from headway.text import Tokenizer

_SAMPLING, _BEAMS, _CONFIG = (
    tuple(field.name for field in fields(kind) if field.name not in own)
    for kind, own in (
        (Sampling, ()),
        (Beams, ("width",)),
        (GenerationConfig, ("sampling", "forbidden", "prefix", "forced_first", "forced_last")),
    )
)


class Scoring(TypedDict, total=False):
    """How to score texts.

    batch_size: rows read at once; changes no result but by rounding.   beyond_context: go on past the trained context.
    special: control tokens written in the texts are control tokens, not text.
    """

    batch_size: int
    beyond_context: bool
    special: bool


def config_of(
    call: str, options: Mapping[str, Any], unused: Sequence[int], also: Sequence[str] = ()
) -> tuple[GenerationConfig, dict[str, Any]]:
    """The config of a call's options, for a model that never has an `unused` id; and those of them in `also`.

    Raises ConfigError for an option that is none, for what a search is asked where no number of beams is given, and as
    `GenerationConfig`."""
    check_options(call, options, (*_CONFIG, *_SAMPLING, *_BEAMS, *also))
    sampling, search, more, given = (
        {name: options[name] for name in names if name in options}
        for names in (_SAMPLING, _BEAMS, also, _CONFIG)
    )
    if isinstance(given.get("beams"), int):
        given["beams"] = Beams(given["beams"], **search)
    elif search:
        raise ConfigError(
            f"{next(iter(search))} is about a beam search, and no number of beams was given; add beams=4 (--beams 4), "
            "or leave it out"
        )
    return GenerationConfig(**given, sampling=Sampling(**sampling), forbidden=unused), more


def scoring_of(call: str, how: Scoring) -> tuple[dict[str, Any], bool]:
    """The options of `headway.generate.score`, and `special`."""
    check_options(call, how, tuple(Scoring.__annotations__))
    options: dict[str, Any] = {"batch_size": BATCH, **how}
    return options, options.pop("special", False)


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


def prompt_ids(model: Pretrained[Any, Tokenizer], prompt: Any, special: bool) -> tuple[list[list[int]], bool]:
    """The prompts as ids, and whether it was one."""
    if prompt is None:
        raise DataError("the prompt is None; give a text, token ids, or a list of either")
    if isinstance(prompt, Tensor):
        if prompt.dim() not in (1, 2) or prompt.is_floating_point():
            raise DataError(f"ids are an integer tensor [T] or [B, T], got {prompt.dtype} {[*prompt.shape]}")
        ids, one = prompt.tolist(), prompt.dim() == 1
        return ([ids] if one else ids), one
    if isinstance(prompt, str):
        return [model.need_tokenizer().encode(prompt, eos=False, special=special)], True
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes | Mapping):
        raise DataError(
            f"a prompt is a text, token ids, or a list of either; got {prompt!r} of type {type(prompt).__name__}"
        )
    prompts = [one.tolist() if hasattr(one, "tolist") else one for one in prompt]
    if prompts and isinstance(prompts[0], str):
        return model.need_tokenizer().encode_batch(prompts, eos=False, special=special), False
    if prompts and isinstance(prompts[0], int):
        return [prompts], True
    if any(isinstance(p, Mapping) for p in prompts):
        raise DataError("these are messages of a conversation, not prompts; use chat(messages)")
    return prompts, False
