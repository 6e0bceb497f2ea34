"""headway's own facts in a config.json, and YaRN factors: what is accepted, and the message of each refusal."""

from typing import Any

import pytest

from headway.checkpoints.hf.config import own_facts
from headway.checkpoints.hf.rope import _stretch
from headway.errors import ConfigError


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"family": "llama"},
        {"trained_context": 512, "max_context": None},
        {"max_context": 1024, "family": "bert"},
    ],
)
def test_facts_are_a_copy_of_what_is_there(facts: dict[str, Any]) -> None:
    config = {"model_type": "llama", "headway": facts}
    copy = own_facts(config)
    assert copy == facts
    assert copy is not facts
    assert own_facts({"model_type": "llama"}) == own_facts({"headway": None}) == {}


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ([1], '"headway" must be an object, got [1]'),
        (0, '"headway" must be an object, got 0'),
        (
            {"famly": "x"},
            "headway has no key 'famly' (did you mean \"family\"?); there are family, trained_context, max_context",
        ),
        ({"family": None}, '"headway.family" must be str, got None'),
        ({"trained_context": None}, '"headway.trained_context" must be int, got None'),
        ({"trained_context": True}, '"headway.trained_context" must be int, got True'),
        ({"max_context": 1.5}, '"headway.max_context" must be int, got 1.5'),
    ],
)
def test_facts_that_are_wrong_are_named(facts: Any, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        own_facts({"headway": facts})
    assert str(error.value) == f"config.json: {said}"


@pytest.mark.parametrize(
    ("kind", "factor", "trained", "longest", "stretch"),
    [
        ("yarn", None, 1024, 4096, 4.0),
        ("yarn", 4, 1024, 4096, 4.0),
        ("yarn", 4 + 3e-6, 1024, 4096, 4 + 3e-6),
        ("yarn", 8.0, 4096, 4096, 8.0),  # the context lengths imply no factor
        ("longrope", None, 1024, 4096, 4.0),
        ("longrope", None, 4096, 1024, 1.0),
        ("longrope", 3, 1024, 4096, 3.0),
    ],
)
def test_the_factor_is_given_or_implied(
    kind: str, factor: float | None, trained: int, longest: int, stretch: float
) -> None:
    actual = _stretch("rope", kind, factor, trained, longest)
    assert actual == stretch
    assert type(actual) is float


@pytest.mark.parametrize(
    ("factor", "trained", "longest", "said"),
    [
        (
            None,
            4096,
            4096,
            "rope_type yarn needs factor (or original_max_position_embeddings below max_position_",
        ),
        (None, 4096, 2048, "rope_type yarn needs factor"),
        (True, 1024, 4096, "factor must be a number, got True"),
        ("4", 1024, 4096, "factor must be a number, got '4'"),
        (
            4 + 5e-6,
            1024,
            4096,
            "the YaRN factor is 4, but max_position_embeddings / original_max_position_embeddings = 4096 / 1024 "
            "= 4; correct the one that is wrong",
        ),
        (4 - 5e-6, 1024, 4096, "the YaRN factor is 4, but"),
        (2, 4096, 2048, "the YaRN factor is 2, but"),
    ],
)
def test_factors_that_cannot_be_are_refused(factor: object, trained: int, longest: int, said: str) -> None:
    with pytest.raises(ConfigError) as error:
        _stretch("rope", "yarn", factor, trained, longest)
    assert str(error.value).startswith(f"rope: {said}")
