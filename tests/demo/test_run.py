"""The demo from end to end on a small text, what it leaves behind, and how it ends if it is interrupted."""

import dataclasses
import json
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from headway.checkpoints.restore import load_model
from headway.cli import run as headway
from headway.errors import ConfigError
from headway.text import Tokenizer
from headway.train import Interrupted, TextConfig
from headway_lab.demo import acts, learn, run
from headway_lab.demo.corpus import Corpus, Document, gzip_bits, unigram_bits, xz_bits

ROOT = Path(__file__).parents[2]
LINES = "".join(f"def f{i}(x):\n    return x + {i * 7 % 13}\n\n" for i in range(1500))


@pytest.fixture(scope="module")
def text() -> Corpus:
    cut = LINES.index("def f1350")
    train, held = (Document("f.py", name, part) for name, part in (("a", LINES[:cut]), ("b", LINES[cut:])))
    return Corpus("here", "the last tenth is held out", (train,), (held,))


@pytest.fixture(scope="module")
def brief() -> Iterator[None]:
    """Act 3 is timed at a size for tests, and training runs a few steps instead of some seconds."""
    timed, settings = acts.time_window, learn.settings

    def few(out: Path, seconds: float, quick: bool) -> TextConfig:
        fields = settings(out, seconds, quick).model_dump() | {
            "max_seconds": None,
            "steps": 4,
            "threads": 1,
        }
        return TextConfig.of({key: value for key, value in fields.items() if value is not None})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learn, "settings", few)
        patch.setattr(acts, "time_window", lambda tokens, repeats: timed(256, 1))
        patch.setattr(learn, "SAMPLE_TOKENS", 5)
        yield


@dataclass(frozen=True)
class Done:
    """A demo that has run: its folder, its report and its output."""

    out: Path
    report: dict[str, Any]
    said: str


@pytest.fixture(scope="module")
def done(text: Corpus, brief: None, tmp_path_factory: pytest.TempPathFactory) -> Done:
    out, lines = tmp_path_factory.mktemp("runs") / "new" / "demo", []
    return Done(out, go(text, out, lines), "\n".join(lines))


def go(text: Corpus, out: Path, lines: list[str]) -> dict[str, Any]:
    return run.demo(out, corpus=text, seconds=5, quick=True, say=lines.append)


def test_the_demo_leaves_a_model_its_metrics_and_its_pictures(done: Done) -> None:
    names = {path.name for path in done.out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "samples.txt"} <= names
    assert "work" not in names
    for picture in ("patterns.png", "loss.png", "bits.png", "heads.png"):
        assert (done.out / picture).read_bytes().startswith(b"\x89PNG")
    metrics = [json.loads(line) for line in (done.out / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1] == {"val_bits_per_byte": done.report["bits_per_byte"]["model"]}
    assert json.loads((done.out / "demo.json").read_text()) == done.report


def test_the_compressors_saw_the_bytes_that_the_model_was_measured_on(done: Done, text: Corpus) -> None:
    held = held_out(done)
    assert held == text.held_out_bytes
    assert done.report["corpus"]["held_out_bytes"] == len(held)
    bits = done.report["bits_per_byte"]
    assert (bits["unigram"], bits["gzip"], bits["xz"]) == (unigram_bits(held), gzip_bits(held), xz_bits(held))


def test_the_three_acts_are_told(done: Done) -> None:
    parts = ("Act 1", "16.00 GiB", "Act 2", "4 query heads on 2", "Window.last(32); Causal()", "gzip -9")
    for part in (*parts, "looks furthest back", "Act 3", "times as fast"):
        assert part in done.said
    assert f"| {learn.PROMPT.splitlines()[0]}" in done.said
    assert done.said.count("the figures mean nothing") == 1
    assert done.said.count("below gzip") == 0, "a toy gets no verdict"
    single, double = done.report["cached_equals_full"]
    assert double["difference"] < 1e-11 < single["difference"] < 1e-3
    assert {row["window"] for row in done.report["cache_sizes"]} == {64}
    assert len(done.report["heads"]) == 2 * 4


def held_out(done: Done) -> bytes:
    lines = (done.out / "text" / "held-out.jsonl").read_text().splitlines()
    return "".join(json.loads(line)["text"] for line in lines).encode()


def test_the_folder_is_a_model_for_transformers_and_for_us(done: Done) -> None:
    transformers = pytest.importorskip("transformers")
    ids = torch.tensor([Tokenizer.load(done.out).encode("def f3(x):\n    return")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(done.out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.out)
    assert tokenizer("def f3(x):\n    return")["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        difference = (theirs(ids).logits - load_model(done.out, dtype=torch.float32)(ids)).abs().max()
    assert difference < 1e-4
    assert theirs.config.layer_types == ["sliding_attention", "full_attention"]


def test_the_commands_that_are_printed_last_work(
    done: Done, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for line in run.next_commands(done.out).splitlines():
        program, *arguments = shlex.split(line.partition("#")[0])
        assert program == "headway"
        arguments = [part.replace("runs/explain", str(tmp_path)) for part in arguments]
        extra = ["-n", "3"] if arguments[0] == "generate" else []
        assert headway([*arguments, *extra]) == 0, line
        assert capsys.readouterr().out


def test_a_second_demo_replaces_the_first(done: Done, text: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    shutil.copytree(done.out, out)
    (out / "left-over.txt").write_text("x")
    report = go(text, out, [])
    assert not (out / "left-over.txt").exists()
    assert report["bits_per_byte"] == done.report["bits_per_byte"], "the same text, settings and seed"


def test_a_folder_with_other_things_is_never_emptied(
    text: Corpus, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("three years of work")
    with pytest.raises(ConfigError, match="holds files that no demo has written"):
        go(text, out, [])
    assert headway(["demo", "--out", str(out)]) == 1
    assert "no demo has written" in capsys.readouterr().err
    assert (out / "thesis.txt").read_text() == "three years of work"


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_leaves_things_tidy(
    saved: bool, text: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "demo"

    def stopped(config: TextConfig, **_: object) -> None:
        checkpoint = Path(config.out) / "checkpoint-1"
        checkpoint.mkdir(parents=True)
        raise Interrupted(checkpoint) if saved else KeyboardInterrupt

    monkeypatch.setattr(learn, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        go(text, out, [])
    assert json.loads((out / "demo.json").read_text()) == {"state": "not finished"}
    assert (out / "work" / "run" / "checkpoint-1").exists() == saved
    assert (out / "work").exists() == saved
    run._clear(out)
    assert [path.name for path in out.iterdir()] == ["demo.json"], "another demo may begin anew"


@pytest.mark.slow
def test_ctrl_c_from_outside_is_exit_code_130(tmp_path: Path) -> None:
    arguments = ["demo", "--out", str(tmp_path / "demo"), "--seconds", "120", "--threads", "1"]
    with subprocess.Popen(
        [sys.executable, "-m", "headway", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # If tests run in the background, their processes ignore SIGINT.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "tokens to train on" in line:
                break
        time.sleep(3)
        child.send_signal(signal.SIGINT)
        output = child.stdout.read()
        assert child.wait(60) == 130
    assert "Traceback" not in output
    assert "stopped" in output or "interrupted" in output


def test_quick_takes_a_part_of_the_text(text: Corpus) -> None:
    documents = tuple(dataclasses.replace(text.train[0], name=f"{i}") for i in range(5))
    part = learn.smaller(dataclasses.replace(text, train=documents), text.train_bytes * 2)
    assert [document.name for document in part.train] == ["0", "1"]
    assert part.rule.endswith("in part")


def test_the_recipe_trains_again_what_the_demo_trained(done: Done) -> None:
    recipe = yaml.safe_load((ROOT / "recipes" / "demo.yaml").read_text())
    data, validation, _ = (Path(recipe.pop(key)) for key in ("data", "validation", "out"))
    assert recipe.pop("max_seconds") < 150
    assert recipe == {**learn.SETTINGS, "vocab": learn.VOCAB}
    for path in (data, validation):
        assert (done.out / path.relative_to("runs/demo")).exists()
