"""lm-evaluation-harness gets the same answers from our models as from those of `transformers`."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import headway
from headway.api import LanguageModel
from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.errors import ConfigError
from headway.patterns import Causal
from tests.generate.conftest import small
from tests.text.conftest import byte_level
from tests.text.test_chat import CHAT, TURNS, with_template

pytestmark = pytest.mark.slow

QUESTIONS = [
    {"question": "the cat sat on the", "choices": ["mat", "log", "cat and the dog"], "answer": 0},
    {"question": "def attend(q, k, v): ", "choices": ["return", " softmax"], "answer": 1},
    {"question": "我们 看 见", "choices": [" 一只 猫", "狗", "。"], "answer": 0},
    *(
        {"question": f"the dog {'sat on ' * i}the", "choices": ["log", "mat"], "answer": i % 2}
        for i in range(9)
    ),
]
TEXTS = [
    "the cat sat on the mat, and the dog sat on the log\n" * 4,
    "naïve café 🙂",
    "def attend(q):\n    return q",
]
CHOICE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: "{delimiter}"
"""
ROLLING = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}, {{metric: word_perplexity}}]
"""
GENERATE = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: generate_until
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs: {{until: ["on"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with a model of context 64, and tasks beside it."""
    path = tmp_path_factory.mktemp("harness")
    tokenizer = with_template(byte_level(), TURNS)
    generation = {"eos_token_id": tokenizer.eos, "bos_token_id": tokenizer.bos}
    save_folder(path / "model", small(Causal()), tokenizer=tokenizer, generation=generation)
    for name, rows in (("questions", QUESTIONS), ("texts", [{"text": text} for text in TEXTS])):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, template, data, values in (
        ("own_choice", CHOICE, "questions", {"delimiter": " "}),
        ("own_rolling", ROLLING, "texts", {}),
        ("own_generate", GENERATE, "questions", {}),
    ):
        text = template.format(name=name, file=path / f"{data}.jsonl", **values)
        (path / "tasks").mkdir(exist_ok=True)
        (path / "tasks" / f"{name}.yaml").write_text(text)
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> LanguageModel:
    return headway.load(folder / "model")


def found(model: Any, folder: Path, task: str, **options: Any) -> list[Any]:
    """Returns a model's answers to the requests of a task, in the order of its documents."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder / "tasks"), include_defaults=False)
    results = simple_evaluate(model, tasks=[task], task_manager=manager, bootstrap_iters=0, **options)
    assert results is not None
    samples = sorted(results["samples"][task], key=lambda sample: sample["doc_id"])
    return [answer for sample in samples for answer in sample["resps"]]


def theirs(folder: Path, **options: Any) -> Any:
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder / "model"), dtype="float32", device="cpu", **options)


def test_log_likelihoods_are_those_of_transformers_for_every_batch_size(
    lm: LanguageModel, folder: Path
) -> None:
    from headway.integrations.lm_eval import HeadwayLM

    expected = [answer[0] for answer in found(theirs(folder), folder, "own_choice")]
    assert len(expected) == sum(len(q["choices"]) for q in QUESTIONS)  # type: ignore[arg-type]
    for size in (1, 8):
        ours = [answer[0] for answer in found(HeadwayLM(lm, batch_size=size), folder, "own_choice")]
        assert [greedy for _, greedy in ours] == [greedy for _, greedy in expected]
        assert [value for value, _ in ours] == pytest.approx([value for value, _ in expected], abs=1e-4)


def test_contexts_that_are_too_long_are_cut_as_the_harness_cuts_them(lm: LanguageModel, folder: Path) -> None:
    from headway.integrations.lm_eval import HeadwayLM

    expected = [answer[0][0] for answer in found(theirs(folder, max_length=20), folder, "own_choice")]
    ours = [answer[0][0] for answer in found(HeadwayLM(lm, max_length=20), folder, "own_choice")]
    assert ours == pytest.approx(expected, abs=1e-4)
    with pytest.raises(ConfigError, match="a continuation of 3 tokens exceeds max_length=2"):
        HeadwayLM(lm, max_length=2)._loglikelihood_tokens([(None, [1], [2, 3, 4])], disable_tqdm=True)


def test_rolling_log_likelihoods_are_theirs_with_bos_once(lm: LanguageModel, folder: Path) -> None:
    from headway.integrations.lm_eval import HeadwayLM

    peer = theirs(folder, add_bos_token=False)
    expected = [answer[0] for answer in found(peer, folder, "own_rolling")]
    for size in (1, 8):
        ours = [answer[0] for answer in found(HeadwayLM(lm, batch_size=size), folder, "own_rolling")]
        assert ours == pytest.approx(expected, rel=1e-5)
    scores = lm.score_text(TEXTS)
    assert ours == pytest.approx([score.log_prob for score in scores], rel=1e-6)


def test_bits_per_byte_of_a_document_are_those_of_eval(
    lm: LanguageModel, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """For documents that fit a row, where both are defined alike; `eval` also scores an EOS at each end, which the
    harness does not, so its score is added here."""
    assert lm.tokenizer is not None
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[1:]))
    command = ["eval", str(folder / "model"), "--data", str(text), "--dtype", "fp32", "--json"]
    assert run([*command, "--context", "64"]) == 0
    report = json.loads(capsys.readouterr().out)
    log_prob = sum(score.log_prob for score in lm.score_text(TEXTS[1:]))
    ends = 0.0
    if lm.tokenizer.eos is not None:
        from headway.generate import score

        ids = [lm.tokenizer.encode(text, eos=False) for text in TEXTS[1:]]
        ends = sum(
            text.log_prob for text in score(lm.model, [(context, [lm.tokenizer.eos]) for context in ids])
        )
    size = sum(len(text.encode()) for text in TEXTS[1:])
    assert report["bits_per_byte"] == pytest.approx(-(log_prob + ends) / math.log(2) / size, rel=1e-5)
    from headway.integrations.lm_eval import evaluate

    results = evaluate(lm, ["own_rolling"], folder=str(folder / "tasks"))["results"]["own_rolling"]
    everything = sum(score.log_prob for score in lm.score_text(TEXTS))
    bytes_ = sum(len(text.encode()) for text in TEXTS)
    assert results["bits_per_byte,none"] == pytest.approx(-everything / math.log(2) / bytes_, rel=1e-6)


def test_generated_texts_are_those_of_transformers(lm: LanguageModel, folder: Path) -> None:
    from headway.integrations.lm_eval import HeadwayLM

    expected = found(theirs(folder, batch_size=1), folder, "own_generate")
    for size in (1, 8):
        assert found(HeadwayLM(lm, batch_size=size), folder, "own_generate") == expected


def test_chats_are_rendered_as_transformers_renders_them(lm: LanguageModel, folder: Path) -> None:
    from headway.integrations.lm_eval import HeadwayLM

    ours, peer = HeadwayLM(lm), theirs(folder)
    assert ours.chat_template(True) == peer.chat_template(True)
    assert ours.apply_chat_template(CHAT) == peer.apply_chat_template(CHAT)
    open_ended = [*CHAT, {"role": "assistant", "content": "the cat"}]
    assert ours.apply_chat_template(open_ended, False) == peer.apply_chat_template(open_ended, False)
    text = ours.apply_chat_template(CHAT)
    assert ours.tok_encode(text) == peer.tok_encode(text) == lm.tokenizer.render_chat(CHAT)  # type: ignore[union-attr]
    answers = found(HeadwayLM(lm), folder, "own_choice", apply_chat_template=True)
    expected = found(theirs(folder), folder, "own_choice", apply_chat_template=True)
    assert [a[0][0] for a in answers] == pytest.approx([a[0][0] for a in expected], abs=1e-4)


def test_sampling_is_that_of_generate_and_an_unknown_option_is_an_error(lm: LanguageModel) -> None:
    from headway.integrations.lm_eval import HeadwayLM

    model = HeadwayLM(lm, batch_size="auto")
    sampled = {"until": [], "max_gen_toks": 8, "do_sample": True, "temperature": 0.9, "top_k": 20}
    texts = model.generate_until([SimpleNamespace(args=("the cat", sampled))], disable_tqdm=True)
    assert texts == [lm.generate("the cat", max_new_tokens=8, temperature=0.9, top_k=20).text]
    with pytest.raises(TypeError, match="parallelize"):
        HeadwayLM(lm, parallelize=True)  # type: ignore[call-arg]


def test_the_command_prints_what_the_harness_finds(
    lm: LanguageModel, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from headway.integrations import lm_eval as harness

    command = ["eval", str(folder / "model"), "--harness", "own_choice", "--tasks", str(folder / "tasks")]
    assert run([*command, "--limit", "2", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    scores = lm.score(
        [q["question"] for q in QUESTIONS[:2] for _ in q["choices"]],  # type: ignore[call-overload, attr-defined]
        [f" {c}" for q in QUESTIONS[:2] for c in q["choices"]],
    )  # type: ignore[attr-defined]
    values, correct = iter(scores), 0
    for question in QUESTIONS[:2]:
        log_probs = [next(values).log_prob for _ in question["choices"]]  # type: ignore[attr-defined]
        correct += log_probs.index(max(log_probs)) == question["answer"]
    assert report["results"]["own_choice"]["acc,none"] == correct / 2
    assert report["documents"]["own_choice"]["effective"] == 2
    assert run([*command[:3], "own_chioce", *command[4:]]) == 1
    assert "the harness has no task own_chioce" in capsys.readouterr().err
    canned = {"results": report["results"], "n-samples": report["documents"]}
    monkeypatch.setattr(harness, "evaluate", lambda *arguments, **options: canned)
    assert run(command) == 0
    assert re.search(rf"own_choice +2 +acc +{correct / 2:g} ", capsys.readouterr().out)


def test_their_command_line_knows_our_model(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "headway.integrations.lm_eval", "run", "--model", "headway"]
    command += ["--model_args", f"pretrained={folder / 'model'}", "--tasks", "own_choice"]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "own_choice" in process.stdout
    assert "acc" in process.stdout
