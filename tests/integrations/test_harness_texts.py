"""Generation for the harness, with a stand-in for it: texts, chat templates, and the command `eval --harness`."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headway.api import LanguageModel
from headway.api.pretrained import BATCH
from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.errors import ConfigError
from headway.models import Decoder
from tests.integrations.test_harness_calls import PAIRS
from tests.text.conftest import byte_level
from tests.text.test_chat import CHAT, TURNS, with_template


def test_texts_are_those_of_generate_by_what_each_request_says(harness: Any, lm: LanguageModel) -> None:
    """Alternates two kinds of requests; contexts are cut to the slots that the new tokens leave."""
    model = harness.HeadwayLM(lm, max_length=24)
    greedy = {"until": ["on", ""], "max_gen_toks": 6, "do_sample": False}
    sampled = {"until": None, "max_gen_toks": 8, "do_sample": True, "top_k": 5, "top_p": 0.9}
    texts = [text for text, _ in PAIRS] + ["the cat sat on the mat " * 5]
    requests = [SimpleNamespace(args=(text, (greedy, sampled)[i % 2])) for i, text in enumerate(texts)]
    generated = model.generate_until(requests, disable_tqdm=True)
    for i, kind in enumerate((greedy, sampled)):
        options = {"max_new_tokens": 6, "stop": ["on"]} if kind is greedy else {"max_new_tokens": 8}
        options |= {"temperature": 0.0} if kind is greedy else {"temperature": 1.0, "top_k": 5, "top_p": 0.9}
        room = 24 - options["max_new_tokens"]
        contexts = [model.tok_encode(text)[-room:] for text in texts[i::2]]
        assert [reply.text for reply in lm.generate(contexts, beyond_context=True, **options)] == generated[
            i::2
        ]
    assert {key: value for kind, (key, _), value in model.partial} == dict(zip(texts, generated, strict=True))
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
            "the task's generation_kwargs early, num_beams are not supported; supported are "
            "until, do_sample, temperature, max_gen_toks, top_k, top_p, min_p, repetition_penalty",
        ),
        (
            {"until": ["a"], "max_gen_toks": 64},
            "max_gen_toks=64 leaves no room for the context in max_length=64; lower it (--gen_kwargs max_gen_toks=N)",
        ),
    ],
)
def test_what_generation_cannot_do_is_an_error(
    asked: dict[str, Any], message: str, harness: Any, lm: LanguageModel
) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        harness.HeadwayLM(lm).generate_until([SimpleNamespace(args=("the cat", asked))], disable_tqdm=True)
    options = {"until": [], "max_gen_toks": 63}
    assert harness.HeadwayLM(lm).generate_until([SimpleNamespace(args=("a", options))], disable_tqdm=True)


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
        ConfigError, match=r"^chat template 'tool': this tokenizer has only one, without a name$"
    ):
        model.chat_template("tool")
    bare = harness.HeadwayLM(LanguageModel(decoder, byte_level()))
    assert bare.chat_template(False) is None
    for call in (
        lambda: bare.chat_template(True),
        lambda: bare.chat_template("tool"),
        lambda: bare.apply_chat_template(CHAT),
    ):
        with pytest.raises(
            ConfigError, match=r"^a chat template was asked for, but this tokenizer has none$"
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


def test_an_evaluation_asks_the_harness_for_what_is_said(harness: Any, lm: LanguageModel) -> None:
    report = harness.evaluate(
        lm, ["own", "own_2"], folder="tasks", limit=3, shots=2, context=9, batch_size=5, chat=True
    )
    assert report["results"]["own"]["acc,none"] == 0.25
    model, manager = harness.asked.pop("model"), harness.asked.pop("task_manager")
    assert (model.lm, model.batch_size, model.max_length, manager.folder) == (lm, 5, 9, "tasks")
    options = {"limit": 3, "num_fewshot": 2, "apply_chat_template": True, "log_samples": False}
    assert harness.asked == {"tasks": ["own", "own_2"], **options}
    harness.asked.clear()
    harness.evaluate(lm, ("own",), folder="tasks")
    assert (harness.asked["model"].batch_size, harness.asked["model"].max_length) == (BATCH, 64)
    assert harness.asked["limit"] is harness.asked["num_fewshot"] is None
    assert harness.asked["apply_chat_template"] is False
    message = (
        "the harness has no task x, y; `python -m headway.integrations.lm_eval ls tasks` lists its tasks, "
        "and a folder of YAML files adds your own (--tasks)"
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
    options = [
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
    assert run([*command, *options, "--json"]) == 0
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
