"""Prompts, contexts and settings that other libraries crash on or silently misread."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from headway.api import LanguageModel
from headway.errors import ConfigError, DataError, HeadwayError
from headway.generate import GenerationConfig, Sampling, generate, stream
from headway.models import Decoder, ModelSpec, build
from headway.patterns import Causal, Window
from headway.positions import DynamicNTK, Learned, Rotary
from tests.generate.conftest import small
from tests.generate.plain import MODEL, PROMPTS, greedy_by_hand
from tests.text.conftest import byte_level, word_piece

LONG, SHORT = [[0, *range(20, 60)] * 3, [0, 7] * 30], [[0, 5, 9], [0]]


def stretched() -> Decoder:
    """Returns a model whose frequencies depend on the length (dynamic NTK beyond 16 tokens), with windowed and full
    layers."""
    spec = replace(
        small((Window.last(5), Causal())).spec,
        positions=Rotary(100.0, pairing="halves", scaling=DynamicNTK(4.0, 16)),
        trained_context=256,
    )
    model = build(spec, seed=3).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(15.0)
    return model


def answers(model: Decoder) -> list[list[int]]:
    hot = GenerationConfig(max_new_tokens=30, sampling=Sampling(temperature=1.3), seed=2)
    return [
        g.ids
        for settings in (GenerationConfig(max_new_tokens=30), hot)
        for g in generate(model, SHORT, settings)
    ]


def of_a_fresh_process() -> list[list[int]]:
    code = (
        "import json; from tests.generate.test_bad_inputs import *; print(json.dumps(answers(stretched())))"
    )
    command = [sys.executable, "-c", f"import torch; torch.set_num_threads(1); {code}"]
    root = Path(__file__).parents[2]
    fresh = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root)
    return json.loads(fresh.stdout)


@pytest.mark.parametrize(
    "fresh",
    [
        pytest.param(lambda: answers(stretched()), id="model"),
        pytest.param(of_a_fresh_process, id="process", marks=pytest.mark.slow),
    ],
)
def test_a_short_prompt_after_a_long_one_is_what_a_fresh_process_says(
    fresh: Callable[[], list[list[int]]],
) -> None:
    """Nothing that was computed for a long row, such as its rotary angles, may leak into the next call."""
    expected, model = fresh(), stretched()
    first = generate(model, LONG, GenerationConfig(max_new_tokens=40))
    after = answers(model)
    assert expected == after
    assert len({tuple(ids) for ids in after}) == 4
    again = generate(model, LONG, GenerationConfig(max_new_tokens=40))  # the same long prompts again
    assert [g.ids for g in again] == [g.ids for g in first]


@pytest.mark.parametrize("value", [-1, 1.5, True, "3", float("nan"), [4]])
def test_a_number_of_new_tokens_that_is_none(value: object) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"max_new_tokens must be a whole number of at least 0, got {re.escape(repr(value))}",
    ):
        GenerationConfig(max_new_tokens=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_a_chunk_that_is_none(value: object) -> None:
    with pytest.raises(
        ConfigError, match=f"prefill_chunk must be a whole number of at least 1, got {value!r}"
    ):
        GenerationConfig(prefill_chunk=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("new", [0, 1, 5, None])
def test_a_prompt_longer_than_the_context_is_refused_however_little_is_asked(new: int | None) -> None:
    with pytest.raises(
        ConfigError,
        match=rf"prompt 1 has 65 tokens, {new or 0} more .* was trained on 64; shorten the prompt",
    ):
        generate(MODEL, [[0], [0] * 65], GenerationConfig(max_new_tokens=new))


@pytest.mark.parametrize(("new", "fits"), [(4, True), (5, False), (10**12, False)])
def test_prompt_and_new_tokens_fill_the_context_to_the_last_token(new: int, fits: bool) -> None:
    if fits:
        assert len(generate(MODEL, [[0] * 60], GenerationConfig(max_new_tokens=new))[0].ids) == new
        return
    with pytest.raises(
        ConfigError, match=rf"60 tokens, {new} more .*: {60 + new} in all.* at most 4 new tokens"
    ):
        generate(MODEL, [[0] * 60], GenerationConfig(max_new_tokens=new))


@pytest.mark.parametrize("limit", ["max_context", "table"])
def test_a_hard_limit_holds_beyond_the_trained_context_too(limit: str) -> None:
    fields = {"max_context": 10} if limit == "max_context" else {"positions": Learned(10)}
    model = build(ModelSpec.of_depth(1, 50, context=8, **fields), seed=0)  # type: ignore[arg-type]
    for prompt, new, remedy in (([0] * 5, 6, "ask for at most 5"), ([0] * 11, 0, "shorten the prompt")):
        with pytest.raises(ConfigError, match=rf"prompt 0 has {len(prompt)} tokens.* can take 10; {remedy}"):
            generate(model, [prompt], GenerationConfig(max_new_tokens=new, beyond_context=True))
    assert len(generate(model, [[0] * 5], GenerationConfig(beyond_context=True))[0].ids) == 5


SPECIAL: dict[str, list[int]] = {"BOS": [0], "EOS": [1], "all": [0, 1, 2, 3], "EOS twice": [1, 1]}


@pytest.mark.parametrize("name", SPECIAL)
def test_a_prompt_of_special_tokens_only_is_continued(name: str) -> None:
    """An EOS in the prompt ends nothing, alone or in a batch; the generation's text is only what follows the prompt."""
    tokenizer, prompt = byte_level(), SPECIAL[name]
    lm = LanguageModel(MODEL, tokenizer)
    assert set(prompt) <= tokenizer.special_ids
    generation = lm.generate(prompt, max_new_tokens=6, eos=())
    assert generation.ids == greedy_by_hand(MODEL, prompt, 6)
    assert generation.text == tokenizer.decode(generation.ids, after=prompt)
    assert lm.generate([[0, 30], prompt], max_new_tokens=6, eos=())[1].ids == generation.ids
    text = "".join(tokenizer.token(i) for i in prompt[1:])
    if prompt[0] == 0:
        assert lm.generate(text, special=True, max_new_tokens=6, eos=()).ids == generation.ids


def test_an_empty_text_is_bos_or_nothing() -> None:
    lm = LanguageModel(MODEL, byte_level())
    assert lm.generate("", max_new_tokens=4).ids == lm.generate([0], max_new_tokens=4).ids
    bare = LanguageModel(MODEL, word_piece())  # a tokenizer without BOS
    for prompt in ("", [""]):
        with pytest.raises(
            DataError, match="prompt 0 is empty: a model continues at least one token; begin with"
        ):
            bare.generate(prompt, max_new_tokens=1)


@pytest.mark.parametrize(
    ("prompt", "match"),
    [
        (["a", None], "text 1 must be a str, got NoneType"),
        (["a", [0]], "text 1 must be a str, got list"),
        ([None, "a"], "prompt 0 must be a list of token ids, got NoneType"),
        ([None], "prompt 0 must be a list of token ids, got NoneType"),
        ([[0], None], "prompt 1 must be a list of token ids, got NoneType"),
        ([[0], "a"], "prompt 1 must be a list of token ids, got str"),
        ([0, None], "prompt 0: token 1 must be an integer id, got None"),
        ([0, 1.0], "prompt 0: token 1 must be an integer id, got 1.0"),
        ([[0, None]], "prompt 0: token 1 must be an integer id, got None"),
        ([], "the batch is empty"),
        ([[], [0]], "prompt 0 is empty"),
        ([0, -1], r"token id -1 at place 1 is outside the model's vocabulary of 330 \(0..329\)"),
        ([0, 330], "token id 330 at place 1"),
        ([[0], [0, 10**9]], "prompt 1: token id 1000000000 at place 1"),
        (torch.zeros(0, 3, dtype=torch.int64), "the batch is empty"),
        (torch.zeros(0, dtype=torch.int64), "prompt 0 is empty|the batch is empty"),
        (torch.zeros(2, 0, dtype=torch.int64), "prompt 0 is empty"),
    ],
    ids=str,
)
def test_prompts_that_are_none_name_what_is_wrong(prompt: object, match: str) -> None:
    lm = LanguageModel(MODEL, byte_level())
    with pytest.raises(DataError, match=match):
        lm.generate(prompt)  # type: ignore[call-overload]


@pytest.mark.parametrize("eos", [3, [None], [3, "4"], [True], None], ids=str)
def test_eos_that_is_no_list_of_ids(eos: object) -> None:
    with pytest.raises(ConfigError, match="eos is a list of token ids, got") as caught:
        GenerationConfig(eos=eos)  # type: ignore[arg-type]
    assert repr(eos) in str(caught.value)


@pytest.mark.parametrize("eos", [[7, 11], (11, 7), [7, 7, 11]])
def test_any_of_several_eos_ends_the_text(eos: list[int]) -> None:
    """Whichever EOS comes first ends the text and is its last id."""
    free = generate(MODEL, [[0, 5]], GenerationConfig(max_new_tokens=20))[0].ids
    ends = [free[7], free[3]] if eos[0] == 7 else [free[3], free[7]]
    generation = generate(
        MODEL, [[0, 5]], GenerationConfig(max_new_tokens=20, eos=[*ends, *ends[: len(eos) - 2]])
    )[0]
    first = min(free.index(i) for i in ends)
    assert (generation.ids, generation.finish_reason) == (free[: first + 1], "eos")


SAMPLINGS = (Sampling(), Sampling(temperature=1.0, top_k=1), Sampling(temperature=1.0, top_p=1e-9))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "top-k", "top-p"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_end_a_text_and_name_its_request(bad: float, sampling: Sampling) -> None:
    model = small()
    first = greedy_by_hand(model, [0, 5], 1)[0]
    with torch.no_grad():
        model.model.embed_tokens.weight[first] = bad  # reached when the first new token is read
    config = GenerationConfig(max_new_tokens=3, sampling=sampling)
    with pytest.raises(HeadwayError, match="logits for request 7 at step 1 are not numbers"):
        generate(model, [[0, 5], [0, 9]], config, requests=[7, 2])


@pytest.mark.parametrize(
    ("prompts", "match"),
    [
        ([], "no prompts: the batch is empty"),
        ([[0], []], "prompt 1 is empty: a model continues at least one token; begin with BOS"),
        ([None], "prompt 0 must be a list of token ids, got NoneType"),
        (None, "prompts must be lists of token ids, got NoneType"),
        ("hello", "prompts must be lists of token ids, got str"),
        (["hello"], "prompt 0 must be a list of token ids, got str"),
        ([[0, -1]], r"prompt 0: token id -1 at place 1 is outside the model's vocabulary of 330 \(0..329\)"),
        ([[0], [330]], "prompt 1: token id 330 at place 0 is outside"),
        ([[0, 1.5]], "prompt 0: token 1 must be an integer id, got 1.5"),
        ([[True]], "prompt 0: token 0 must be an integer id, got True"),
    ],
)
def test_prompts_that_are_none(prompts: object, match: str) -> None:
    for call in (generate, stream):  # stream raises at the call, before the first delta is requested
        with pytest.raises(DataError, match=match):
            call(MODEL, prompts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"prefill_chunk": 4, "use_cache": False}, "prefill_chunk needs use_cache=True"),
        ({"stop": 5}, "stop is a string or a list of strings, got 5"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"stop": ["a"]}, "stop strings need a tokenizer"),
        ({"forbidden": [330]}, "forbidden: token id 330 is outside"),
    ],
)
def test_settings_that_cannot_be(given: dict[str, object], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        generate(MODEL, PROMPTS, GenerationConfig(**given))  # type: ignore[arg-type]


def test_other_arguments_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="batch_size must be a whole number of at least 1, got 0"):
        generate(MODEL, PROMPTS, batch_size=0)
    with pytest.raises(ConfigError, match="requests: 1 numbers for 4 prompts"):
        stream(MODEL, PROMPTS, requests=[0])
    with pytest.raises(ConfigError, match="requests must differ from each other"):
        generate(MODEL, PROMPTS, requests=[0, 0, 1, 2])
