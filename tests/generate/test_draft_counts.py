"""Counts of drafted and accepted tokens: in a batch they equal those of each row alone, whichever row ends first, and
those of drafts without memory. A fault here changes no text and only costs speed, so that no other test shows it."""

from collections.abc import Callable, Sequence

import pytest
import torch

from headway.generate import Draft, Generation, GenerationConfig, ModelDraft, NgramDraft, generate
from headway.models import Decoder
from tests.generate.conftest import MIXED, small
from tests.generate.drafts import looked_up, periodic

TOKENS = 3
PROMPTS = [[0, 5, 9], [15, 11, 9, *range(8, 16), 10, 8], [0, 17, 18, 17, 18, 17, 18], [4]]
LENGTHS = [7, 26, 12, 33]  # the first row ends first, so that all others move
Propose = Callable[[list[int], int], list[int]]


def near(model: Decoder) -> Decoder:
    """Returns a model that mostly chooses what `model` does: its weights plus noise of a thirtieth of their
    deviation."""
    other, draw = small(MIXED), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for noisy, original in zip(other.parameters(), model.parameters(), strict=True):
            noisy.copy_(original + 0.01 * torch.randn(original.shape, generator=draw))
    return other


def by_model(model: Decoder) -> Propose:
    """Proposes what the model generates next, from its first token on."""
    return lambda ids, count: generate(model, [ids], GenerationConfig(max_new_tokens=count))[0].ids


def saved(prompt: list[int], ids: Sequence[int], propose: Propose) -> tuple[int, int]:
    """Returns (drafted, accepted) of a text: a step takes a draft, its accepted beginning, and the token after it."""
    drafted = accepted = 0
    done = 1  # the first token is the prompt's
    while done < len(ids):
        count = min(TOKENS, len(ids) - done - 1)
        draft = propose([*prompt, *ids[:done]], count) if count else []
        right = next((i for i, token in enumerate(draft) if token != ids[done + i]), len(draft))
        drafted, accepted, done = drafted + len(draft), accepted + right, done + right + 1
    return drafted, accepted


def counts(generations: Sequence[Generation]) -> list[tuple[int, int]]:
    return [(generation.drafted, generation.accepted) for generation in generations]


MODEL = small(MIXED)
NEAR, PERIODIC = near(MODEL), periodic()


@pytest.mark.parametrize(
    ("model", "draft", "propose", "apart"),
    [
        (MODEL, ModelDraft(model=NEAR, tokens=TOKENS), by_model(NEAR), False),
        (PERIODIC, NgramDraft(tokens=TOKENS, most=3, least=1), looked_up, True),
    ],
    ids=["a near model", "n-grams"],
)
def test_a_row_of_a_batch_is_drafted_as_the_row_alone(
    model: Decoder, draft: Draft, propose: Propose, apart: bool
) -> None:
    """`apart`: each row has 8 tokens of its own, so that what repeats in one row is new in the others."""
    configs = [
        GenerationConfig(
            max_new_tokens=most,
            forbidden=[i for i in range(330) if apart and i // 8 != row],
        )
        for row, most in enumerate(LENGTHS)
    ]
    plain = generate(model, PROMPTS, configs)
    together = generate(model, PROMPTS, configs, draft=draft)
    assert [generation.ids for generation in together] == [generation.ids for generation in plain]
    expected = [
        saved(prompt, generation.ids, propose) for prompt, generation in zip(PROMPTS, plain, strict=True)
    ]
    alone = [
        generate(model, [prompt], config, draft=draft)[0]
        for prompt, config in zip(PROMPTS, configs, strict=True)
    ]
    assert counts(together) == counts(alone) == expected
    drafted, accepted = (sum(column) for column in zip(*expected, strict=True))
    assert 20 < accepted < drafted, "some are right, some wrong"
