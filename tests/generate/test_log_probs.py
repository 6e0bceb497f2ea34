"""Log probabilities of generated tokens: those of `score`, whatever the settings change in the distribution.

Tolerance: as in test_score."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headway.api import LanguageModel
from headway.cli import run
from headway.errors import ConfigError
from headway.generate import (
    Beams,
    GenerationConfig,
    ModelDraft,
    NgramDraft,
    Sampling,
    generate,
    score,
    stream,
)
from headway.models import build
from tests.generate.conftest import MIXED, small
from tests.generate.plain import PROMPTS
from tests.generate.test_score import CLOSE
from tests.text.conftest import byte_level

MODEL, TOKENIZER = small(MIXED), byte_level()

configs = st.builds(
    GenerationConfig,
    max_new_tokens=st.integers(0, 9),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 1.5]),
        top_k=st.sampled_from([0, 5]),
        repetition_penalty=st.sampled_from([1.0, 1.4]),
    ),
    seed=st.integers(0, 9),
    eos=st.sampled_from([(), range(100, 200)]),
    no_repeat_ngram=st.sampled_from([0, 1]),
    forced_first=st.sampled_from([None, 8]),
    forbidden=st.sampled_from([(), range(200, 300)]),
    use_cache=st.sampled_from([True, True, False]),
    log_probs=st.just(True),
    top_log_probs=st.sampled_from([0, 1, 3, 400]),
)
drafts = st.sampled_from([None, NgramDraft(least=1), ModelDraft(model=build(MODEL.spec, seed=7).eval())])


@given(configs, drafts)
def test_they_are_those_of_score(config: GenerationConfig, draft: object) -> None:
    """Temperature, filters, penalties, forced and forbidden tokens, drafts and batches change which token is chosen,
    not its probability; the likeliest tokens are the largest of one forward pass."""
    generations = generate(MODEL, PROMPTS, config, draft=draft)  # type: ignore[arg-type]
    for prompt, generation in zip(PROMPTS, generations, strict=True):
        assert len(generation.log_probs) == len(generation.ids)
        if not generation.ids:
            continue
        (scored,) = score(MODEL, [(prompt, generation.ids)])
        assert generation.log_probs == pytest.approx(scored.log_probs, abs=CLOSE)
        with torch.no_grad():
            logits = MODEL(torch.tensor([[*prompt, *generation.ids]]))[0, len(prompt) - 1 : -1]
        assert len(generation.top_log_probs) == (len(generation.ids) if config.top_log_probs else 0)
        for place, row in zip(generation.top_log_probs, logits.log_softmax(-1), strict=False):
            largest = row.topk(min(config.top_log_probs, 330)).values
            assert [value for _, value in place] == pytest.approx(largest.tolist(), abs=CLOSE)
            assert [value for _, value in place] == pytest.approx(
                [float(row[i]) for i, _ in place], abs=CLOSE
            )
            assert len({i for i, _ in place}) == len(place)


def test_streamed_and_not_asked_for() -> None:
    config = GenerationConfig(max_new_tokens=6, log_probs=True, top_log_probs=2)
    (whole,) = generate(MODEL, PROMPTS[:1], config)
    deltas = list(stream(MODEL, PROMPTS[:1], config))
    assert tuple(delta.log_prob for delta in deltas) == whole.log_probs
    assert tuple(delta.top_log_probs for delta in deltas) == whole.top_log_probs
    (plain,) = generate(MODEL, PROMPTS[:1], GenerationConfig(max_new_tokens=6))
    assert (plain.ids, plain.log_probs, plain.top_log_probs) == (whole.ids, (), ())


def test_settings_that_cannot_be() -> None:
    for settings, match in (
        ({"top_log_probs": 2}, "top_log_probs=2 needs log_probs=True"),
        (
            {"log_probs": True, "top_log_probs": -1},
            "top_log_probs must be a whole number of at least 0, got -1",
        ),
        ({"log_probs": True, "beams": Beams(2)}, "log-probabilities that they are ranked by; leave out"),
    ):
        with pytest.raises(ConfigError, match=match):
            GenerationConfig(**settings)  # type: ignore[arg-type]


def test_one_stop_string_is_a_list_of_one() -> None:
    lm = LanguageModel(MODEL, TOKENIZER)
    free = lm.generate("the cat", max_new_tokens=20, temperature=1.0).text
    for stop in (free[3], free[2:5]):
        generation = lm.generate("the cat", max_new_tokens=20, temperature=1.0, stop=stop)
        listed = lm.generate("the cat", max_new_tokens=20, temperature=1.0, stop=[stop])
        assert (generation.text, generation.ids) == (listed.text, listed.ids)
        assert (generation.text, generation.finish_reason) == (free[: free.index(stop)], "stop")
    with pytest.raises(ConfigError, match="stop strings must be non-empty strings, got ''"):
        lm.generate("the cat", stop="")


def test_the_command_tells_them(tmp_path: object, capsys: pytest.CaptureFixture[str]) -> None:
    lm, path = LanguageModel(MODEL, TOKENIZER), f"{tmp_path}/model"
    lm.save(path)
    command = ["generate", path, "the cat", "-n", "4", "-t", "0"]
    assert run([*command, "--log-probs", "--top-log-probs", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    generation = lm.generate("the cat", max_new_tokens=4, log_probs=True, top_log_probs=2)
    assert report["log_probs"] == pytest.approx(generation.log_probs, abs=CLOSE)
    assert [[entry["id"] for entry in place] for place in report["top_log_probs"]] == [
        [i for i, _ in place] for place in generation.top_log_probs
    ]
    assert report["top_log_probs"][0][0] == {
        "id": generation.ids[0],
        "text": TOKENIZER.decode(generation.ids[:1], special=True),
        "log_prob": report["log_probs"][0],
    }
    assert run([*command, "--json"]) == 0
    assert not {"log_probs", "top_log_probs"} & set(json.loads(capsys.readouterr().out))
    assert run([*command, "--log-probs"]) == 1
    assert "--log-probs are printed in the JSON report only; add --json" in capsys.readouterr().err
    assert run([*command, "--top-log-probs", "2", "--json"]) == 1
    assert "needs log_probs=True" in capsys.readouterr().err
