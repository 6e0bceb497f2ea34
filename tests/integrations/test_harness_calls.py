"""The calls that lm-evaluation-harness makes to a model, made by a stand-in, so that it need not be installed. Results
with the real harness are tested in test_lm_eval.py."""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.api import LanguageModel
from headway.api.pretrained import BATCH
from headway.errors import ConfigError
from headway.models import Decoder
from headway.text import Tokenizer
from tests.text.conftest import sentencepiece

PAIRS = [
    ("the cat", " sat"),
    ("the", " dog and the log"),
    ("a", "b"),
    ("naïve café", " 🙂"),
    ("the cat on", " a"),
]


def requests_of(
    model: Any, pairs: Sequence[tuple[str, str]] = PAIRS
) -> list[tuple[Any, list[int], list[int]]]:
    return [(pair, model.tok_encode(pair[0]), model.tok_encode(pair[1], False)) for pair in pairs]


def test_the_model_has_its_name_and_says_the_tokens_that_the_harness_asks_for(
    harness: Any, lm: LanguageModel
) -> None:
    assert harness.registered == {"headway": harness.HeadwayLM}
    model = harness.HeadwayLM(lm)
    text = lm.need_tokenizer()
    assert model.prefix_token_id == lm.prefix
    assert model.eot_token_id == (lm.eos[0] if lm.eos else lm.prefix)
    assert model.tokenizer_name == f"headway-{text.fingerprint.hex()}"
    assert (model.batch_size, model.max_length) == (BATCH, 64)
    assert model._device == lm.model.model.embedding.device
    assert harness.HeadwayLM(lm, batch_size="auto").batch_size == BATCH
    assert harness.HeadwayLM(lm, batch_size="7", max_length=9).batch_size == 7
    assert harness.HeadwayLM(lm, max_length=9).max_length == 9
    ended = LanguageModel(lm.model, text, generation={"eos_token_id": [5, 3]})
    assert harness.HeadwayLM(ended).eot_token_id == 5
    endless = LanguageModel(lm.model, Tokenizer(sentencepiece().backend, bos=1))
    assert (endless.eos, harness.HeadwayLM(endless).eot_token_id) == ((), 1)


def test_a_text_is_encoded_with_bos_once(harness: Any, decoder: Decoder) -> None:
    text = sentencepiece()
    model = harness.HeadwayLM(LanguageModel(decoder, text))
    bare = text.encode("the cat", bos=False, eos=False)
    assert text.bos is not None
    written = text.token(text.bos)
    for special in (None, True):
        assert model.tok_encode("the cat", special) == [text.bos, *bare]
        assert model.tok_encode(f"{written}the cat", special) == [text.bos, *bare]
    assert model.tok_encode("the cat", add_special_tokens=False) == bare


@pytest.mark.parametrize("size", [1, 2, 8])
def test_log_likelihoods_stand_in_the_order_of_the_requests(
    size: int, harness: Any, lm: LanguageModel
) -> None:
    model = harness.HeadwayLM(lm, batch_size=size)
    requests = requests_of(model)
    greedy = lm.model(torch.tensor([requests[2][1]]))[0, -1].argmax().item()
    requests.append((None, requests[2][1], [greedy]))
    answers = model._loglikelihood_tokens(requests, disable_tqdm=True)
    for (_, context, continuation), (value, is_greedy) in zip(requests, answers, strict=True):
        ids = torch.tensor([context + continuation])
        log_probs = lm.model(ids).log_softmax(-1)[0, len(context) - 1 : -1]
        assert value == pytest.approx(
            log_probs.gather(1, ids[0, len(context) :, None]).sum().item(), abs=1e-4
        )
        assert is_greedy == (log_probs.argmax(-1).tolist() == continuation)
    assert answers[-1][1]
    cached = {request: answer for kind, request, answer in model.partial if kind == "loglikelihood"}
    assert len(model.partial) == len(PAIRS)  # a request without a key is not cached
    assert cached == {pair: answer for (pair, _, _), answer in zip(requests[:-1], answers, strict=False)}


@pytest.mark.parametrize("disabled", [True, False])
def test_progress_is_shown_unless_it_is_disabled(
    disabled: bool, harness: Any, lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = harness.HeadwayLM(lm, batch_size=2)
    texts = [SimpleNamespace(args=(text,)) for text, _ in PAIRS]
    requests = [SimpleNamespace(args=(text, {"until": ["on"], "max_gen_toks": 2})) for text, _ in PAIRS]
    for label, call in (
        ("log-likelihoods", lambda: model._loglikelihood_tokens(requests_of(model), disabled)),
        ("rolling log-likelihoods", lambda: model.loglikelihood_rolling(texts, disabled)),
        ("texts", lambda: model.generate_until(requests, disabled)),
    ):
        capsys.readouterr()
        call()
        shown = capsys.readouterr().err
        assert (f"{label}: 100%" in shown and " 5/5 " in shown) is not disabled, shown


def test_a_context_is_cut_on_the_left_to_the_slots_of_a_row(harness: Any, lm: LanguageModel) -> None:
    """The last token of a continuation is not an input, so max_length + 1 tokens fit."""
    model = harness.HeadwayLM(lm, max_length=6)
    context, continuation = [*range(20, 40)], [7, 8, 9]
    assert model._fitted(context, continuation) == (context[-4:], continuation)
    assert model._fitted(context[:4], continuation) == (context[:4], continuation)
    assert model._fitted(context, [7] * 6) == (context[-1:], [7] * 6)
    message = "a continuation of 7 tokens exceeds max_length=6; this model cannot score this task"
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        model._loglikelihood_tokens([(None, [1], [7] * 7)], disable_tqdm=True)


def test_rolling_log_likelihoods_are_those_of_windows_of_a_row(harness: Any, lm: LanguageModel) -> None:
    texts = [" ".join(pair) for pair in PAIRS] + ["<|im_end|> the cat sat on the mat " * 3]
    for length in (None, 10):
        model = harness.HeadwayLM(lm, max_length=length)
        answers = model.loglikelihood_rolling(
            [SimpleNamespace(args=(text,)) for text in texts], disable_tqdm=True
        )
        expected = [
            lm.score_text(text, window=length or 64, special=True, beyond_context=True).log_prob
            for text in texts
        ]
        assert answers == pytest.approx(expected, rel=1e-6)
        assert [(kind, key) for kind, key, _ in model.partial] == [
            ("loglikelihood_rolling", (text,)) for text in texts
        ]
        assert [value for _, _, value in model.partial] == answers


def test_a_folder_is_loaded_as_load_does(
    harness: Any,
    lm: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The harness asks for CUDA by default; without CUDA the CPU is used, with a warning."""
    loaded = []
    monkeypatch.setattr(harness, "load", lambda *source, **options: loaded.append((source, options)) or lm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        harness.HeadwayLM(tmp_path / "m", device="cuda:1", dtype="fp32", backend="native", revision="v1")
    assert "cuda:1 is not available; using the CPU" in caplog.text
    caplog.clear()
    harness.HeadwayLM("hub/m")
    harness.HeadwayLM("hub/m", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    harness.HeadwayLM("hub/m", device="cuda")
    assert not caplog.text
    options = {"task": "causal-lm", "dtype": None, "device": None, "backend": "auto", "revision": None}
    assert loaded == [
        (
            (str(tmp_path / "m"),),
            options | {"dtype": "fp32", "device": "cpu", "backend": "native", "revision": "v1"},
        ),
        (("hub/m",), options),
        (("hub/m",), options | {"device": "cpu"}),
        (("hub/m",), options | {"device": "cuda"}),
    ]
