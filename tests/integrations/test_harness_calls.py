"""What lm-evaluation-harness asks a model, asked by a stand-in with its names: without it installed. What the real one
finds with our model is in test_lm_eval.py."""

import importlib
import json
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import headway.integrations
from headway.api import LanguageModel
from headway.api.pretrained import BATCH
from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.errors import ConfigError
from headway.models import Decoder
from headway.text import Tokenizer
from tests.generate.conftest import small
from tests.text.conftest import byte_level, sentencepiece
from tests.text.test_chat import CHAT, TURNS, with_template

PAIRS = [
    ("the cat", " sat"),
    ("the", " dog and the log"),
    ("a", "b"),
    ("naïve café", " 🙂"),
    ("the cat on", " a"),
]


class TemplateLM:
    """The harness's base class: what of it our model uses."""

    def __init__(self) -> None:
        self.partial: list[tuple[str, Any, Any]] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *facts: self.partial.append(facts))


def normalize_gen_kwargs(given: dict[str, Any], default: int) -> dict[str, Any]:
    """As theirs: the number of new tokens has its one name."""
    return {"max_gen_toks": default, **given}


class TaskManager:
    def __init__(self, include_path: str | None = None) -> None:
        self.folder = include_path

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name.startswith("own") and self.folder == "tasks"]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Our module, which has imported the stand-in; what it registers and asks for is in `registered` and `asked`."""
    registered: dict[str, type] = {}
    asked: dict[str, Any] = {}

    def register_model(name: str) -> Any:
        return lambda kind: registered.setdefault(name, kind)

    def simple_evaluate(model: Any, **how: Any) -> dict[str, Any]:
        asked.update(model=model, **how)
        values = {
            "alias": "own",
            "acc,none": 0.25,
            "acc_stderr,none": 0.125,
            "f1,strict": 0.5,
            "f1_stderr,strict": 0.75,
        }
        return {
            "results": {"own": values},
            "n-samples": {"own": {"original": 9, "effective": 7}},
            "config": {},
        }

    names = {
        "lm_eval": {"simple_evaluate": simple_evaluate},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.api.registry": {"register_model": register_model},
        "lm_eval.models": {},
        "lm_eval.models.utils": {"normalize_gen_kwargs": normalize_gen_kwargs},
        "lm_eval.tasks": {"TaskManager": TaskManager},
    }
    for name, values in names.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    ours = "headway.integrations.lm_eval"
    monkeypatch.delitem(sys.modules, ours, raising=False)
    module = importlib.import_module(ours)
    module.registered, module.asked = registered, asked  # type: ignore[attr-defined]
    yield module
    sys.modules.pop(ours, None)
    vars(headway.integrations).pop("lm_eval", None)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return small()


@pytest.fixture
def lm(decoder: Decoder) -> LanguageModel:
    return LanguageModel(decoder, with_template(byte_level(), TURNS))


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
        chances = lm.model(ids).log_softmax(-1)[0, len(context) - 1 : -1]
        assert value == pytest.approx(chances.gather(1, ids[0, len(context) :, None]).sum().item(), abs=1e-4)
        assert is_greedy == (chances.argmax(-1).tolist() == continuation)
    assert answers[-1][1]
    kept = {request: answer for kind, request, answer in model.partial if kind == "loglikelihood"}
    assert len(model.partial) == len(PAIRS)  # a request without a key is not kept
    assert kept == {pair: answer for (pair, _, _), answer in zip(requests[:-1], answers, strict=False)}


@pytest.mark.parametrize("disabled", [True, False])
def test_progress_is_shown_unless_it_is_disabled(
    disabled: bool, harness: Any, lm: LanguageModel, capsys: pytest.CaptureFixture[str]
) -> None:
    model = harness.HeadwayLM(lm, batch_size=2)
    texts = [SimpleNamespace(args=(text,)) for text, _ in PAIRS]
    asked = [SimpleNamespace(args=(text, {"until": ["on"], "max_gen_toks": 2})) for text, _ in PAIRS]
    for what, call in (
        ("log-likelihoods", lambda: model._loglikelihood_tokens(requests_of(model), disabled)),
        ("rolling log-likelihoods", lambda: model.loglikelihood_rolling(texts, disabled)),
        ("texts", lambda: model.generate_until(asked, disabled)),
    ):
        capsys.readouterr()
        call()
        shown = capsys.readouterr().err
        assert (f"{what}: 100%" in shown and " 5/5 " in shown) is not disabled, shown


def test_a_context_is_cut_on_the_left_to_the_slots_of_a_row(harness: Any, lm: LanguageModel) -> None:
    """The last token of a continuation is read by nothing: max_length + 1 tokens fit."""
    model = harness.HeadwayLM(lm, max_length=6)
    context, continuation = [*range(20, 40)], [7, 8, 9]
    assert model._fitted(context, continuation) == (context[-4:], continuation)
    assert model._fitted(context[:4], continuation) == (context[:4], continuation)
    assert model._fitted(context, [7] * 6) == (context[-1:], [7] * 6)
    message = (
        "a continuation of 7 tokens is longer than a row of 6 (max_length); this model cannot score this task"
    )
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


def test_texts_are_those_of_generate_by_what_each_request_says(harness: Any, lm: LanguageModel) -> None:
    """Requests of two kinds in turn; contexts are cut to what the new tokens leave."""
    model = harness.HeadwayLM(lm, max_length=24)
    greedy = {"until": ["on", ""], "max_gen_toks": 6, "do_sample": False}
    sampled = {"until": None, "max_gen_toks": 8, "do_sample": True, "top_k": 5, "top_p": 0.9}
    texts = [text for text, _ in PAIRS] + ["the cat sat on the mat " * 5]
    asked = [SimpleNamespace(args=(text, (greedy, sampled)[i % 2])) for i, text in enumerate(texts)]
    made = model.generate_until(asked, disable_tqdm=True)
    for i, kind in enumerate((greedy, sampled)):
        options = {"max_new_tokens": 6, "stop": ["on"]} if kind is greedy else {"max_new_tokens": 8}
        options |= {"temperature": 0.0} if kind is greedy else {"temperature": 1.0, "top_k": 5, "top_p": 0.9}
        room = 24 - options["max_new_tokens"]
        own = [model.tok_encode(text)[-room:] for text in texts[i::2]]
        assert [one.text for one in lm.generate(own, beyond_context=True, **options)] == made[i::2]
    assert {key: value for kind, (key, _), value in model.partial} == dict(zip(texts, made, strict=True))
    assert {kind for kind, _, _ in model.partial} == {"generate_until"}


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {"max_new_tokens": 256, "temperature": 0.0, "stop": []}),
        ({"until": "a"}, {"max_new_tokens": 256, "temperature": 0.0, "stop": ["a"]}),
        ({"until": ["a", "b"], "do_sample": True}, {"max_new_tokens": 256, "temperature": 1.0, "stop": ["a", "b"]}),
        ({"temperature": 0.3, "max_gen_toks": 5}, {"max_new_tokens": 5, "temperature": 0.3, "stop": []}),
        (
            {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2, "do_sample": False},
            {"max_new_tokens": 256, "temperature": 0.0, "stop": [], "top_k": 3, "top_p": 0.5, "min_p": 0.1,
             "repetition_penalty": 1.2},
        ),
    ],
)  # fmt: skip
def test_what_a_task_says_of_generation_is_said_in_our_words(
    asked: dict[str, Any], options: dict[str, Any], harness: Any, lm: LanguageModel
) -> None:
    assert harness.HeadwayLM(lm)._options(asked) == options


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"until": ["a"], "max_gen_toks": 4, "num_beams": 3, "early": 1},
            "the task asks for early, num_beams in generation, which headway does not have; known are "
            "until, do_sample, temperature, max_gen_toks, top_k, top_p, min_p, repetition_penalty",
        ),
        (
            {"until": ["a"], "max_gen_toks": 64},
            "max_gen_toks is 64, and a row has 64 slots (max_length): nothing is left for the context; ask for fewer "
            "(--gen_kwargs max_gen_toks=N)",
        ),
    ],
)
def test_what_generation_cannot_do_is_an_error(
    asked: dict[str, Any], message: str, harness: Any, lm: LanguageModel
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        harness.HeadwayLM(lm).generate_until([SimpleNamespace(args=("the cat", asked))], disable_tqdm=True)
    one = {"until": [], "max_gen_toks": 63}
    assert harness.HeadwayLM(lm).generate_until([SimpleNamespace(args=("a", one))], disable_tqdm=True)


def test_a_chat_is_the_tokenizers_template(harness: Any, lm: LanguageModel, decoder: Decoder) -> None:
    model, text = harness.HeadwayLM(lm), lm.need_tokenizer()
    assert text.chat_template is not None
    assert model.chat_template() is None
    assert model.chat_template(None) is None
    assert model.chat_template(True) == text.chat_template.source == TURNS
    assert model.tok_encode(model.apply_chat_template(CHAT)) == text.render_chat(CHAT)
    reply = [*CHAT, {"role": "assistant", "content": " the cat "}]
    whole = model.apply_chat_template(reply, False)
    assert whole.endswith("the cat")
    assert model.apply_chat_template(reply).startswith(whole)
    with pytest.raises(
        ConfigError, match=r"^this tokenizer has one chat template, and none of the name 'tool'$"
    ):
        model.chat_template("tool")
    bare = harness.HeadwayLM(LanguageModel(decoder, byte_level()))
    assert bare.chat_template(False) is None
    for call in (lambda: bare.chat_template(True), lambda: bare.apply_chat_template(CHAT)):
        with pytest.raises(
            ConfigError, match=r"^a chat template was asked for, and this tokenizer has none$"
        ):
            call()


def test_the_template_is_given_the_tokenizers_bos_and_eos(harness: Any, decoder: Decoder) -> None:
    source = "{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ messages[0]['content'] }}"
    lm = LanguageModel(decoder, with_template(byte_level(), source))
    text = lm.need_tokenizer()
    names = ["" if i is None else text.token(i) for i in (text.bos, text.eos)]
    turn = [{"role": "user", "content": "x"}]
    assert any(names)
    assert harness.HeadwayLM(lm).apply_chat_template(turn) == f"{names[0]}|{names[1]}|True|x"
    assert harness.HeadwayLM(lm).apply_chat_template(turn, False) == f"{names[0]}|{names[1]}|False|x"


def test_a_folder_is_loaded_as_load_does(
    harness: Any,
    lm: LanguageModel,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The harness asks for CUDA by default."""
    loaded = []
    monkeypatch.setattr(harness, "load", lambda *source, **how: loaded.append((source, how)) or lm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        harness.HeadwayLM(tmp_path / "m", device="cuda:1", dtype="fp32", backend="native", revision="v1")
    assert "there is no cuda:1 here, using the CPU" in caplog.text
    caplog.clear()
    harness.HeadwayLM("hub/m")
    harness.HeadwayLM("hub/m", device="cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    harness.HeadwayLM("hub/m", device="cuda")
    assert not caplog.text
    how = {"task": "causal-lm", "dtype": None, "device": None, "backend": "auto", "revision": None}
    assert loaded == [
        (
            (str(tmp_path / "m"),),
            how | {"dtype": "fp32", "device": "cpu", "backend": "native", "revision": "v1"},
        ),
        (("hub/m",), how),
        (("hub/m",), how | {"device": "cpu"}),
        (("hub/m",), how | {"device": "cuda"}),
    ]


def test_an_evaluation_asks_the_harness_for_what_is_said(harness: Any, lm: LanguageModel) -> None:
    found = harness.evaluate(
        lm, ["own", "own_2"], folder="tasks", limit=3, shots=2, context=9, batch_size=5, chat=True
    )
    assert found["results"]["own"]["acc,none"] == 0.25
    model, manager = harness.asked.pop("model"), harness.asked.pop("task_manager")
    assert (model.lm, model.batch_size, model.max_length, manager.folder) == (lm, 5, 9, "tasks")
    said = {"limit": 3, "num_fewshot": 2, "apply_chat_template": True, "log_samples": False}
    assert harness.asked == {"tasks": ["own", "own_2"], **said}
    harness.asked.clear()
    harness.evaluate(lm, ("own",), folder="tasks")
    assert (harness.asked["model"].batch_size, harness.asked["model"].max_length) == (BATCH, 64)
    assert harness.asked["limit"] is harness.asked["num_fewshot"] is None
    assert harness.asked["apply_chat_template"] is False
    message = (
        "the harness has no task x, y; `python -m headway.integrations.lm_eval ls tasks` lists those that it "
        "has, and a folder of YAML files adds your own (--tasks)"
    )
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        harness.evaluate(lm, ["x", "own", "y"], folder="tasks")


def test_the_command_has_a_row_for_each_metric_with_an_error(
    harness: Any,
    decoder: Decoder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    save_folder("m", decoder, tokenizer=byte_level())
    command = ["eval", "m", "--harness", "own,own_2", "--tasks", "tasks"]
    assert run(command) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if row and row[0] in ("task", "own")] == [
        ["task", "documents", "metric", "value", "standard", "error"],
        ["own", "7", "acc", "0.25", "0.125"],
        ["own", "7", "f1,strict", "0.5", "0.75"],
    ]
    assert harness.asked["tasks"] == ["own", "own_2"]
    assert (harness.asked["model"].batch_size, harness.asked["model"].lm.model.model.embedding.dtype) == (
        32,
        torch.float32,
    )
    more = [
        "--limit",
        "3",
        "--shots",
        "1",
        "--chat",
        "--batch-size",
        "4",
        "--context",
        "16",
        "--dtype",
        "bf16",
    ]
    assert run([*command, *more, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["documents"] == {"own": {"original": 9, "effective": 7}}
    assert report["results"]["own"]["f1,strict"] == 0.5
    assert report["model"] == "m"
    model = harness.asked["model"]
    assert (model.batch_size, model.max_length, model.lm.model.model.embedding.dtype) == (
        4,
        16,
        torch.bfloat16,
    )
    assert (harness.asked["limit"], harness.asked["num_fewshot"], harness.asked["apply_chat_template"]) == (
        3,
        1,
        True,
    )
