"""`headway preview` shows the exact tokens and mask of training, and the counts."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headway.checkpoints.saving import save_folder
from headway.cli import run
from headway.cli.preview import marked
from headway.data.chats import ChatRows, encode_examples
from headway.data.record_kinds import Chat
from headway.data.records import read_records
from headway.models import ModelSpec, build
from headway.nn import IGNORE_INDEX
from tests.text.conftest import byte_level
from tests.text.test_segments import MARKED_TURNS

CHATS = [
    [("human", "the cat"), ("gpt", "sat 猫"), ("human", "and?"), ("gpt", "the dog")],
    [("human", "<|reply|>"), ("gpt", "no <|end|>")],
    [("human", "only asked")],
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [{"conversations": [{"from": speaker, "value": text} for speaker, text in chat]} for chat in CHATS]
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, *rows[:1] * 200]))
    return path


def test_row_43_the_answers_of_every_turn_are_trained_and_nothing_else(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each answer and the token that ends it, and no other token: in what is shown and in the targets of rows."""
    byte_level().with_chat_template(MARKED_TURNS).save(tmp_path / "tokenizer")
    assert run(["preview", "--data", str(data), "--tokenizer", str(tmp_path / "tokenizer"), "-n", "2"]) == 0
    out, err = capsys.readouterr()
    first, second = out.rstrip("\n").split("\n\n")
    assert first.startswith(f"{data}:1: ")
    body = first.partition("\n")[2]
    assert "".join(re.findall(r"\[([^]]*)\]", body)) == "sat 猫<|end|>the dog<|end|>"
    rendering = "<|begin|><|user|>the cat<|reply|>sat 猫<|end|>\n<|user|>and?<|reply|>the dog<|end|>"
    assert re.sub(r"[][|]", "", body) == rendering.replace("|", "")
    assert second.partition("\n")[2].endswith("[<|end|>]")
    assert "203 examples read, 202 trained on, 1 dropped (no answer); " in err
    assert re.search(r"\d+ rows of 512 slots, \d+\.\d% of them filled", err)

    tokenizer = byte_level().with_chat_template(MARKED_TURNS)
    records: list[Any] = list(read_records(data, Chat))
    rows = ChatRows(encode_examples(records[:1], tokenizer, stop={1}, length=512), 512)
    batch = rows.batch([0])
    targets = batch.targets[0].tolist()
    assert (
        tokenizer.decode([t for t in targets if t != IGNORE_INDEX], special=True)
        == "sat 猫<|end|>the dog<|end|>"
    )


def test_colours_mark_what_brackets_mark() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("the cat 🙂", bos=False)
    trained = [k % 3 == 0 for k in range(len(ids))]
    colored = marked(tokenizer, ids, trained, color=True)
    assert re.sub(r"\033\[[0-9;]*m", "", colored) == "the cat 🙂"
    assert colored.count("\033[30;") == sum(trained)
    assert (
        marked(tokenizer, ids[:2], [False, True], color=False)
        == f"{tokenizer.decode(ids[:1])}[{tokenizer.decode(ids[1:2])}]"
    )


def test_a_model_folder_brings_template_and_stop_tokens(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level().with_chat_template(MARKED_TURNS)
    spec = ModelSpec.of(
        "llama",
        vocab=tokenizer.vocab_size,
        width=8,
        layers=1,
        heads=1,
        kv_heads=1,
        hidden=8,
        trained_context=64,
    )
    save_folder(
        tmp_path / "model", build(spec, seed=0), tokenizer=tokenizer, generation={"eos_token_id": [3, 1]}
    )
    assert run(["preview", "--data", str(data), "--model", str(tmp_path / "model"), "-n", "0"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "202 trained on" in err
    assert run(["preview", "--data", str(data)]) == 1
    assert "give the folder of a model (--model), or a tokenizer (--tokenizer)" in capsys.readouterr().err
