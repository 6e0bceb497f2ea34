"""Training on conversations: what is counted, measured and saved, and the tokens that end an answer."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from headway import load
from headway.checkpoints.saving import save_folder
from headway.errors import DataError
from headway.models import ModelSpec, build
from headway.text import Tokenizer, train_bpe
from headway.train import train
from headway.train.metrics import read_metrics
from headway.train.tasks.chat import ChatConfig, stop_ids
from tests.train.conftest import documents
from tests.train.heads import write
from tests.train.prepared import prepared

SHORT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %} {{ m.content }}"
    "{{ eos_token }}{% endgeneration %}{% else %}Q: {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)
COLOURS = {"sky": "blue", "grass": "green", "snow": "white", "coal": "black"}


def conversations(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Returns conversations of 1 to 3 questions about colours, whose answers can be learned."""
    rng = random.Random(seed)
    records = []
    for _ in range(count):
        messages = []
        for _ in range(rng.randint(1, 3)):
            thing, colour = rng.choice([*COLOURS.items()])
            messages += [
                {"from": "human", "value": f"what colour is {thing}?"},
                {"from": "gpt", "value": colour},
            ]
        records.append({"conversations": messages})
    return records


def config(folder: Path, **changes: Any) -> ChatConfig:
    defaults: dict[str, Any] = {
        "data": write(folder / "chats.jsonl", conversations(60)),
        "template": SHORT, "vocab": 280, "depth": 1, "width": 16, "heads": 2, "kv_heads": 1, "hidden": 24,
        "context": 64, "batch_tokens": 64 * 6, "micro_batch": 2, "steps": 6, "lr": 1e-3, "dtype": "fp32",
        "backend": "sdpa", "out": str(folder / "run"), "workers": 1,
    }  # fmt: skip
    return ChatConfig(**defaults | changes)


def test_a_run_says_what_became_of_the_data_and_its_model_chats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model trained on answers alone learns to answer, and its generation stops where the answers ended."""
    settings = config(
        tmp_path,
        steps=80,
        lr=1e-2,
        width=32,
        depth=2,
        hidden=64,
        validation_share=0.1,
        beta2=0.99,
        log_every=50,
    )
    result = train(settings)
    stderr = capsys.readouterr().err
    assert "training: 54 examples read, 54 trained on; " in stderr
    assert "of their slots are filled" in stderr
    assert "held out: 6 examples read, 6 trained on; " in stderr
    assert result.validation is not None
    turns, log = result.validation.metrics, read_metrics(result.metrics)
    assert turns.keys() == {"loss_turn_1", "loss_turn_2"}
    assert all(0 < loss < log[0]["loss"] / 10 for loss in turns.values())
    assert turns.items() <= {name.removeprefix("val_"): value for name, value in log[-1].items()}.items()
    assert result.unit == "answer token"
    assert result.next_command == f"headway chat {result.model}"
    assert json.loads((result.model / "generation_config.json").read_text())["eos_token_id"] == 1
    lm = load(result.model)
    correct = 0
    for thing, colour in COLOURS.items():
        messages = [{"role": "user", "content": f"what colour is {thing}?"}]
        reply = lm.chat(messages, max_new_tokens=20, temperature=0.0)
        correct += reply.text.strip() == colour and reply.finish_reason == "eos"
    assert correct == len(COLOURS)


def test_the_loss_on_held_out_answers_is_a_mean_over_their_tokens(tmp_path: Path) -> None:
    task = prepared(config(tmp_path, validation_share=0.2), tmp_path / "x")
    assert task.held_rows is not None
    nats, count = Counter[int](), Counter[int]()
    with torch.no_grad():
        for i in range(len(task.held_rows.examples)):
            ids, turns = map(torch.from_numpy, task.held_rows.examples[i][:2])
            logits = task.model(ids[None, :-1])[0].log_softmax(-1)  # type: ignore[arg-type]
            token_nats = -logits[torch.arange(len(ids) - 1), ids[1:]]
            for turn in turns[turns > 0].unique().tolist():
                nats[turn] += float(token_nats[turns[1:] == turn].double().sum())
                count[turn] += int((turns == turn).sum())
    evaluation = task.held_rows.evaluate(task.model)
    assert evaluation.tokens == count.total()
    assert evaluation.loss == pytest.approx(nats.total() / count.total(), rel=1e-5)
    by_turn = {f"loss_turn_{turn}": nats[turn] / count[turn] for turn in sorted(count)}
    assert len(by_turn) == 3
    assert evaluation.metrics == pytest.approx(by_turn, rel=1e-5)
    assert evaluation.unit == "answer token"


def test_a_folder_brings_its_template_and_its_stop_tokens(tmp_path: Path) -> None:
    """Answers end with a token that generation_config.json names; the other values of that file are kept."""
    tokenizer = train_bpe(
        documents(0, 20), 300, special_tokens=["<|im_start|>", "<|im_end|>"]
    ).with_chat_template("chatml")
    end = tokenizer.backend.token_to_id("<|im_end|>")
    spec = ModelSpec.of(
        "llama",
        vocab=tokenizer.vocab_size,
        width=16,
        layers=1,
        heads=2,
        kv_heads=1,
        hidden=24,
        trained_context=64,
    )
    generation = {"eos_token_id": [end, 1], "temperature": 0.5}
    save_folder(tmp_path / "model", build(spec, seed=0), tokenizer=tokenizer, generation=generation)
    unset = dict.fromkeys(("template", "vocab", "depth", "width", "heads", "kv_heads", "hidden"))
    settings = config(tmp_path, model=str(tmp_path / "model"), steps=1, clip=float("inf"), **unset)
    result = train(settings, quiet=True)
    assert train(settings, resume="auto", quiet=True).steps == 1  # clip=inf is read as it was written
    assert json.loads((result.model / "generation_config.json").read_text())["temperature"] == 0.5
    saved = Tokenizer.load(result.model).chat_template
    assert saved is not None
    assert saved.source == tokenizer.chat_template.source  # type: ignore[union-attr]
    (tmp_path / "model" / "generation_config.json").write_text('{"eos_token_id": 1}')
    with pytest.raises(
        DataError,
        match=r"chats\.jsonl:1: an answer ends with '<\|im_end\|>', at which generation would not stop",
    ):
        train(settings.model_copy(update={"out": str(tmp_path / "other")}), quiet=True)
    with_stop = settings.model_copy(update={"out": str(tmp_path / "third"), "stop": ("<|im_end|>",)})
    result = train(with_stop, quiet=True)
    assert json.loads((result.model / "generation_config.json").read_text())["eos_token_id"] == [end, 1]


def test_more_than_a_hundredth_without_an_answer_stops_the_run(tmp_path: Path) -> None:
    silent = write(
        tmp_path / "silent.jsonl",
        [*conversations(60), *[{"conversations": [{"from": "human", "value": "hm"}]}] * 2],
    )
    with pytest.raises(
        DataError,
        match=r"2 of 62 examples have no answer to train on \(at most 1% may\), the first in .*silent\.jsonl:61",
    ):
        train(config(tmp_path, data=silent), quiet=True)


def test_stop_tokens_are_the_named_ones_or_those_of_generation_and_eos() -> None:
    tokenizer = train_bpe(["a b"], 261, special_tokens=["<|a|>", "<|b|>"])
    a, b = (tokenizer.backend.token_to_id(f"<|{x}|>") for x in "ab")
    assert stop_ids(tokenizer, (), {}) == [1]
    assert stop_ids(tokenizer, (), {"eos_token_id": a}) == [a, 1]
    assert stop_ids(tokenizer, (), {"eos_token_id": [b, 1]}) == [b, 1]
    assert stop_ids(tokenizer, ("<|a|>",), {"eos_token_id": [b]}) == [a, 1]
    with pytest.raises(DataError, match="a token that ends an answer; name it"):
        stop_ids(Tokenizer(tokenizer.backend), (), {})
