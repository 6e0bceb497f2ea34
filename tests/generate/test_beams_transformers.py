"""Beam search equals that of `transformers`: equal ids and scores for every setting that both have."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.checkpoints.saving import save_folder
from headway.generate import Beams, GenerationConfig, Sampling, generate
from headway.models import Decoder
from headway.patterns import Causal, Window
from tests.generate.conftest import small
from tests.pairwise import chequered

VOCAB = 60
PROMPTS = [[0, 5, 9], [1], [2, *range(20, 39)], [0, 7, 7, 7, 7]]
OURS = small(Causal(), vocab=VOCAB)
EOS = {"none": [], "one": [11], "many": [3, 11, 17, 21, 29, 33, 40, 47]}
HOW: dict[str, dict[str, Any]] = {
    "plain": {},
    "short": {"length_penalty": -1.0},
    "sum": {"length_penalty": 0.0},
    "long": {"length_penalty": 2.5},
    "early": {"early_stopping": True},
    "never": {"early_stopping": "never"},
    "never, long": {"early_stopping": "never", "length_penalty": 1.7},
    "never, short": {"early_stopping": "never", "length_penalty": -0.6},
    "early, long": {"early_stopping": True, "length_penalty": 2.0},
    "wide": {"width": 7, "n_best": 5},
    "two": {"width": 2, "n_best": 2},
    "rules": {"min_new_tokens": 4, "no_repeat_ngram": 2, "forced_last": 11},
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path: Path = tmp_path_factory.mktemp("theirs") / "llama"
    save_folder(path, OURS)
    return AutoModelForCausalLM.from_pretrained(path).eval()


def asked(theirs: Any, config: GenerationConfig) -> list[list[tuple[list[int], float]]]:
    """Returns (new ids, score) of each hypothesis of each prompt, by transformers."""
    beams, eos = config.beams, list(config.eos)
    assert beams is not None
    longest = max(map(len, PROMPTS))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in PROMPTS])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in PROMPTS])
    with torch.inference_mode():
        out = theirs.generate(
            ids, attention_mask=mask, num_beams=beams.width, num_return_sequences=beams.n_best,
            length_penalty=beams.length_penalty, early_stopping=beams.early_stopping, do_sample=False,
            max_new_tokens=12, min_new_tokens=config.min_new_tokens or None, forced_eos_token_id=config.forced_last,
            no_repeat_ngram_size=config.no_repeat_ngram or None, eos_token_id=eos or None, pad_token_id=VOCAB - 1,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    hypotheses = []
    for row, score in zip(out.sequences[:, longest:].tolist(), out.sequences_scores.tolist(), strict=True):
        ends = [i + 1 for i, token in enumerate(row) if token in eos]
        hypotheses.append((row[: ends[0]] if ends else row, score))
    return [hypotheses[i : i + beams.n_best] for i in range(0, len(hypotheses), beams.n_best)]


def how(settings: dict[str, Any], eos: list[int], **beams: Any) -> GenerationConfig:
    """Returns a config with `settings` over the defaults `beams`; settings that Beams lacks go to the request."""
    names = {field.name for field in fields(Beams)}
    search = {**beams, **{k: v for k, v in settings.items() if k in names}}
    request_settings = {k: v for k, v in settings.items() if k not in names}
    return GenerationConfig(max_new_tokens=12, eos=eos, beams=Beams(**search), **request_settings)


def agree(model: Decoder, theirs: Any, config: GenerationConfig) -> None:
    expected = asked(theirs, config)
    for generation, texts in zip(generate(model, PROMPTS, config), expected, strict=True):
        assert [list(h.ids) for h in generation.hypotheses] == [ids for ids, _ in texts]
        scores = [h.score for h in generation.hypotheses]
        assert scores == pytest.approx([score for _, score in texts], abs=1e-5, rel=1e-5)


@chequered("name,eos", list(HOW), list(EOS), of=3)
def test_ids_and_scores(theirs: Any, name: str, eos: str) -> None:
    settings = {"no_repeat_ngram": 1} if name == "rules" and not EOS[eos] else HOW[name]
    agree(OURS, theirs, how(settings, EOS[eos], width=4, n_best=3, with_greedy=False))


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty(theirs: Any, penalty: float) -> None:
    """The penalty applies to log probabilities. transformers counts a batch's padding as text; here its id is in no
    text."""
    ids = [[VOCAB - 2, 5, 9, 4]]
    beams = Beams(4, n_best=2, with_greedy=False)
    settings = GenerationConfig(
        max_new_tokens=12, eos=EOS["many"], beams=beams, sampling=Sampling(repetition_penalty=penalty)
    )
    with torch.inference_mode():
        out = theirs.generate(
            torch.tensor(ids), num_beams=4, num_return_sequences=2, max_new_tokens=12, do_sample=False,
            eos_token_id=EOS["many"], pad_token_id=VOCAB - 1, repetition_penalty=penalty,
            output_scores=True, return_dict_in_generate=True,
        )  # fmt: skip
    hypotheses = generate(OURS, ids, settings)[0].hypotheses
    for ours, row, score in zip(
        hypotheses, out.sequences.tolist(), out.sequences_scores.tolist(), strict=True
    ):
        assert row[4 : 4 + len(ours.ids)] == list(ours.ids)
        assert set(row[4 + len(ours.ids) :]) <= {VOCAB - 1}
        assert ours.score == pytest.approx(score, abs=1e-5)


def test_the_settings_above_tell_the_searches_apart() -> None:
    """If all settings above gave one text, equality would show nothing."""
    texts = set()
    for overrides in HOW.values():
        settings = how(
            {**overrides, "n_best": 1, "forced_last": None}, EOS["many"], width=4, with_greedy=False
        )
        texts.add(tuple(tuple(g.ids) for g in generate(OURS, PROMPTS, settings)))
    assert len(texts) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_more_weights(tmp_path: Path, seed: int) -> None:
    model = small(Window.last(6), vocab=VOCAB)
    generator = torch.Generator().manual_seed(100 + seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    save_folder(tmp_path / "mistral", model)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mistral").eval()
    assert theirs.config.sliding_window == 6
    for width in (2, 3, 5):
        for penalty in (-1.0, 0.0, 1.0, 2.0):
            for stop in (True, False, "never"):
                overrides = {"length_penalty": penalty, "early_stopping": stop}
                agree(model, theirs, how(overrides, EOS["many"], width=width, n_best=2, with_greedy=False))
