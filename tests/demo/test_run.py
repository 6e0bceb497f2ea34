"""The demo from end to end on a small text, what it leaves behind, and how it ends when it is stopped."""

import dataclasses
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from headway.checkpoints.folder import load_model
from headway.cli import run as headway
from headway.demo import learn, run, trust
from headway.demo.corpus import Corpus, Document, gzip_bits, own_text, unigram_bits, xz_bits
from headway.errors import ConfigError
from headway.text import Tokenizer
from headway.train import Interrupted, TrainConfig

ROOT = Path(__file__).parents[2]
LINES = "".join(f"def f{i}(x):\n    return x + {i * 7 % 13}\n\n" for i in range(1500))


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "my.txt"
    path.write_text(LINES)
    return path


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act 3's timing at a size for tests, and a run of a few steps instead of one by the clock."""
    timed, settings = trust.time_window, learn.settings

    def few(folder: Path, seconds: float, quick: bool) -> TrainConfig:
        given = settings(folder, seconds, quick).model_dump() | {
            "max_seconds": None,
            "steps": 4,
            "threads": 1,
        }
        return TrainConfig.of({key: value for key, value in given.items() if value is not None})

    monkeypatch.setattr(learn, "settings", few)
    monkeypatch.setattr(trust, "time_window", lambda **_: timed(tokens=256, window=32, heads=2, repeats=1))
    monkeypatch.setattr(learn, "SAMPLE_TOKENS", 5)


@pytest.fixture
def told() -> list[str]:
    return []


def go(text: Path, out: Path, told: list[str]) -> dict[str, Any]:
    return run.demo(out, data=text, seconds=5, quick=True, say=told.append)


def test_the_demo_from_end_to_end(text: Path, tmp_path: Path, told: list[str], brief: None) -> None:
    out = tmp_path / "runs" / "demo"
    report = go(text, out, told)
    names = {path.name for path in out.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "metrics.jsonl", "demo.json"} <= names
    assert "work" not in names
    for picture in ("patterns.png", "loss.png", "bits.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")

    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert list(metrics[-1]) == ["val_bits_per_byte"]
    assert metrics[-1]["val_bits_per_byte"] == report["bits_per_byte"]["model"]
    assert json.loads((out / "demo.json").read_text()) == report

    held = "".join(
        json.loads(line)["text"] for line in (out / "held-out.jsonl").read_text().splitlines()
    ).encode()
    assert text.read_bytes().endswith(held)
    assert report["bits_per_byte"]["gzip"] == gzip_bits(held)
    assert report["bits_per_byte"]["xz"] == xz_bits(held)
    assert report["bits_per_byte"]["unigram"] == unigram_bits(held)
    assert report["corpus"]["held_out_bytes"] == len(held)

    said = "\n".join(told)
    for part in ("Act 1", "Act 2", "Act 3", "gzip -9", "largest difference", "16.00 GiB", "times as fast"):
        assert part in said
    opening = " ".join(held.decode().split()[:6])
    assert f"| {opening}" in said, "the prompt is the opening of the held-out text"
    single, double = report["cached_equals_full"]
    assert double["difference"] < 1e-11 < single["difference"] < 1e-3
    assert {row["ring"] for row in report["ring"]} == {32}


def test_the_folder_is_a_model_for_transformers_and_for_us(
    text: Path, tmp_path: Path, told: list[str], brief: None
) -> None:
    transformers = pytest.importorskip("transformers")
    out = tmp_path / "demo"
    go(text, out, told)
    ids = torch.tensor([Tokenizer.load(out).encode("def f3(x):\n    return")])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert tokenizer("def f3(x):\n    return")["input_ids"] == ids[0].tolist()
    with torch.no_grad():
        difference = (theirs(ids).logits - load_model(out, dtype=torch.float32)(ids)).abs().max()
    assert difference < 1e-4
    assert theirs.config.layer_types == ["sliding_attention", "full_attention"]


def test_a_second_demo_replaces_the_first(text: Path, tmp_path: Path, told: list[str], brief: None) -> None:
    out = tmp_path / "demo"
    go(text, out, told)
    (out / "left-over.txt").write_text("x")
    go(text, out, told)
    assert not (out / "left-over.txt").exists()
    assert json.loads((out / "demo.json").read_text())["state"] == "done"


def test_a_folder_with_other_things_is_never_emptied(
    text: Path, tmp_path: Path, told: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mine"
    out.mkdir()
    (out / "thesis.txt").write_text("three years of work")
    with pytest.raises(ConfigError, match="holds something that no demo has written"):
        go(text, out, told)
    assert headway(["demo", "--data", str(text), "--out", str(out)]) == 1
    assert "no demo has written" in capsys.readouterr().err
    assert (out / "thesis.txt").read_text() == "three years of work"


def test_a_bad_text_is_told_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert headway(["demo", "--data", str(tmp_path / "no.txt"), "--out", str(tmp_path / "demo")]) == 1
    assert "no such file or folder" in capsys.readouterr().err
    assert not (tmp_path / "demo").exists()


@pytest.mark.parametrize("saved", [False, True])
def test_ctrl_c_leaves_things_tidy(
    saved: bool, text: Path, tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    out = tmp_path / "demo"

    def stopped(config: TrainConfig, **_: object) -> None:
        checkpoint = Path(config.out) / "checkpoint-1"
        checkpoint.mkdir(parents=True)
        raise Interrupted(checkpoint) if saved else KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(learn, "train", stopped)
        with pytest.raises(KeyboardInterrupt):
            go(text, out, told)
    assert json.loads((out / "demo.json").read_text()) == {"state": "not finished"}
    assert (out / "work" / "run" / "checkpoint-1").exists() == saved
    assert (out / "work").exists() == saved
    assert go(text, out, told)["state"] == "done"


@pytest.mark.slow
def test_ctrl_c_from_outside_is_exit_code_130(text: Path, tmp_path: Path) -> None:
    arguments = [
        "demo",
        "--data",
        str(text),
        "--out",
        str(tmp_path / "demo"),
        "--seconds",
        "120",
        "--threads",
        "1",
    ]
    with subprocess.Popen(
        [sys.executable, "-m", "headway", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if "tokens to train on" in line:
                break
        time.sleep(3)
        child.send_signal(signal.SIGINT)
        rest = child.stdout.read()
        assert child.wait(60) == 130
    assert "Traceback" not in rest
    assert "stopped" in rest or "interrupted" in rest


def learned(bits: float) -> learn.Learned:
    class Found:
        bits_per_byte = bits

    class Result:
        validation, seconds, trained_tokens = Found(), 100.0, 1_234_567

    return learn.Learned(Result(), learn.Baselines(4.5, 2.0, 1.7), None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("bits", "below", "words"),
    [
        (1.9, True, "below gzip -9 (2.000) but not below xz (1.700)"),
        (1.6, True, "below gzip -9 (2.000) and below xz (1.700)"),
        (2.1, False, "NOT below gzip -9 (2.000)"),
    ],
)
def test_the_verdict_is_said_either_way(bits: float, below: bool, words: str, tmp_path: Path) -> None:
    assert learned(bits).below_gzip is below
    assert words in learn.verdict(learned(bits))
    corpus = Corpus("here", "held out by name", (Document("a.py", "a", "x" * 2_000_000),), ())
    text = learn.comparison(learned(bits), corpus)
    assert re.search(rf"this model +{bits:.3f} +100 s of training on 2.0 MB of other text", text)
    learn.draw_bits(learned(bits), tmp_path / "bits.png")
    assert (tmp_path / "bits.png").read_bytes().startswith(b"\x89PNG")


def test_quick_takes_a_part_of_the_text(text: Path) -> None:
    whole = own_text(text)
    documents = tuple(dataclasses.replace(whole.train[0], name=f"{i}") for i in range(5))
    part = learn.smaller(dataclasses.replace(whole, train=documents), whole.train_bytes * 2)
    assert [document.name for document in part.train] == ["0", "1"]
    assert part.rule.endswith("in part")


def test_the_recipe_says_what_the_demo_does() -> None:
    import yaml

    recipe = yaml.safe_load((ROOT / "recipes" / "demo.yaml").read_text())
    assert {key: recipe[key] for key in (*learn.SETTINGS, "vocab")} == {
        **learn.SETTINGS,
        "vocab": learn.VOCAB,
    }
