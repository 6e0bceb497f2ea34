"""How drafts are requested: from a language model, by name; and models and settings that can take none."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from headway.api import LanguageModel
from headway.attention.linear_attention import LinearAttentionSpec
from headway.errors import ConfigError, HeadwayError
from headway.generate import Beams, Draft, GenerationConfig, ModelDraft, NgramDraft, generate, stream
from headway.models import Decoder, build
from headway.patterns import Causal
from headway.positions import DynamicNTK, Rotary
from tests.generate.conftest import small
from tests.generate.drafts import MODEL, OTHER, PROMPTS, TOKENIZER
from tests.text.conftest import sentencepiece


def with_spec(**fields: Any) -> Decoder:
    return build(replace(MODEL.spec, **fields), seed=0).eval()


LINEAR = build(replace(MODEL.spec, patterns=(Causal(),) * 2).with_mixer(LinearAttentionSpec()), seed=0).eval()


@pytest.mark.parametrize(
    ("model", "draft", "config", "match"),
    [
        (
            LINEAR,
            NgramDraft(),
            {},
            "the model has layers of linear attention, whose state cannot be rolled back",
        ),
        (
            with_spec(positions=Rotary(1e4, pairing="halves", scaling=DynamicNTK(2.0, 32))),
            NgramDraft(),
            {},
            "depend on the row's length",
        ),
        (
            MODEL,
            NgramDraft(),
            {"beams": Beams(2)},
            "drafts are not supported in a beam search; leave out the",
        ),
        (
            MODEL,
            ModelDraft(model=small(vocab=340)),
            {},
            "draft model has a vocabulary of 340 ids, the model of 330",
        ),
    ],
)
def test_what_takes_no_drafts(model: Decoder, draft: Draft, config: dict[str, Any], match: str) -> None:
    for call in (generate, stream):
        with pytest.raises(ConfigError, match=match):
            list(call(model, PROMPTS, GenerationConfig(max_new_tokens=4, **config), draft=draft))  # type: ignore[call-overload]


def test_drafts_that_cannot_be() -> None:
    for tokens in (0, -1, 1.5, True):
        with pytest.raises(
            ConfigError, match="tokens, proposed at a time, must be a whole number of at least 1, got"
        ):
            NgramDraft(tokens=tokens)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs 1 <= least <= most, got least=3, most=2"):
        NgramDraft(least=3, most=2)
    with pytest.raises(ConfigError, match="the model must be a Decoder, got Linear"):
        ModelDraft(model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="the draft model has layers of linear attention"):
        ModelDraft(model=LINEAR)
    broken = small()
    with torch.no_grad():
        broken.model.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(
        HeadwayError, match="the draft model's logits for request 0 at step 1 are not numbers"
    ):
        generate(MODEL, [[0]], GenerationConfig(max_new_tokens=4), draft=ModelDraft(model=broken))


def test_a_language_model_takes_drafts() -> None:
    lm = LanguageModel(MODEL, TOKENIZER)
    plain = lm.generate("the cat", max_new_tokens=20, temperature=1.0)
    for draft in ("ngram", LanguageModel(OTHER, TOKENIZER), LanguageModel(OTHER), NgramDraft(least=1)):
        assert lm.generate("the cat", max_new_tokens=20, temperature=1.0, draft=draft).ids == plain.ids
    generation = lm.generate(
        "the cat", max_new_tokens=20, temperature=1.0, draft=LanguageModel(MODEL), draft_tokens=2
    )
    assert generation.ids == plain.ids
    assert generation.drafted == generation.accepted > 8
    text = "".join(
        delta.text for delta in lm.stream("the cat", max_new_tokens=20, temperature=1.0, draft="ngram")
    )
    assert text == plain.text
    for options, match in (
        (
            {"draft": "engram"},
            r"draft must be \"ngram\", a LanguageModel or a Draft, got 'engram' \(did you mean \"ngram\"",
        ),
        ({"draft_tokens": 3}, "draft_tokens=3 needs a draft"),
        (
            {"draft": NgramDraft(), "draft_tokens": 3},
            "draft_tokens=3, but the draft has tokens=8; leave draft_tokens out",
        ),
        ({"draft": LanguageModel(OTHER, sentencepiece())}, "tokenizer differs from the model's"),
    ):
        with pytest.raises(ConfigError, match=match):
            lm.generate("the cat", **options)  # type: ignore[call-overload]
