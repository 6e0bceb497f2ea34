"""`headway quantize`, run as a command."""

import json
from pathlib import Path

import pytest
import torch

from headway.checkpoints import load_folder, load_model, save_folder
from headway.cli import run
from headway.models import ModelSpec, build
from headway.models.cost import parameter_count
from headway.models.quantize import quantized_layers
from headway.text import Tokenizer, train_bpe

WORDS = "one two three four five six seven eight nine ten eleven twelve "
SPEC = ModelSpec.of("llama", vocab=280, width=64, layers=2, heads=4, kv_heads=2, hidden=96, init_std=0.3,
                    trained_context=32, tied=True)  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model `m`, its tokenizer, and `text.txt`."""
    monkeypatch.chdir(tmp_path)
    save_folder("m", build(SPEC, seed=0).eval(), tokenizer=train_bpe([WORDS], 280))
    (tmp_path / "text.txt").write_text(WORDS * 10)
    return tmp_path


@torch.no_grad()
def measured(path: str) -> dict[str, float]:
    """Returns the nats per token of `m` and of a model, in rows of 32 tokens of the text, and their mean KL."""
    tokenizer = Tokenizer.load("m")
    ids = [*tokenizer.encode(Path("text.txt").read_text()), tokenizer.eos]
    rows = [torch.tensor([ids[at : at + 33]]) for at in range(0, len(ids) - 1, 32)]
    p, q = (
        torch.cat([model(row[:, :-1])[0].double().log_softmax(-1) for row in rows])
        for model in (load_model("m"), load_model(path))
    )
    targets = torch.tensor(ids[1:])[:, None]
    nats = [-float(log_probs.gather(1, targets).mean()) for log_probs in (p, q)]
    return {"before": nats[0], "after": nats[1], "kl": float((p.exp() * (p - q)).sum(-1).mean())}


def test_the_report_is_measured_on_what_was_written(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["quantize", "m", "--weights", "int4", "--data", "text.txt", "--json"]
    assert run([*command, "n"]) == 0
    nearest = json.loads(capsys.readouterr().out)
    assert run([*command, "g", "--calibrate", "text.txt"]) == 0
    calibrated = json.loads(capsys.readouterr().out)
    assert nearest["changed"] == [["weights", "float32", "int4, groups of 32 (pack-quantized)"]]
    assert (nearest["choices"][0]["what"], nearest["choices"][0]["why"]) == (
        "14 layers",
        "codes are the nearest",
    )
    assert calibrated["choices"][0]["why"].startswith("codes by GPTQ on ")
    assert nearest["before"]["stored_bytes"] == load_folder("m").stored.nbytes
    assert nearest["after"]["stored_bytes"] == load_folder("n").stored.nbytes
    assert nearest["after"]["stored_bytes"] < 0.5 * nearest["before"]["stored_bytes"]
    for path, report in (("n", nearest), ("g", calibrated)):
        actual = {"before": report["before"]["loss"], "after": report["after"]["loss"], "kl": report["kl"]}
        assert actual == pytest.approx(measured(path), rel=1e-4)
    assert calibrated["kl"] < nearest["kl"]


def test_in_8_bits_it_is_nearly_the_same_and_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "m", "--weights", "int8", "n", "--data", "text.txt", "--limit", "64"]) == 0
    out, err = capsys.readouterr()
    for part in (
        "m -> n",
        "weights: float32 -> int8, groups of 32 (pack-quantized)",
        "14 layers: codes are the nearest",
        "nats per token",
        "perplexity",
        "mean KL to the model as it was:",
    ):
        assert part in out, part
    assert "reading m" in err
    assert run(["quantize", "m", "--weights", "int8", "--group", "-1", "p"]) == 0
    out = capsys.readouterr().out
    assert "-> int8, a scale for each output (pack-quantized)" in out
    assert "no loss was measured: --data FILE" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "int3", "n"], "there is no kind of weights 'int3'"),
        (["--weights", "int4", "m"], "m exists"),
        (
            ["--weights", "int4", "--group", "20", "n"],
            "group must be a multiple of 32, or -1 for one scale per output, got 20",
        ),
        (["--weights", "int4", "--output", "n"], "an output layer that is not tied to the embedding"),
        (["--weights", "int4", "--limit", "9", "n"], "--limit counts tokens of the text of --data"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(
    home: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert run(["quantize", "m", *arguments]) == 1
    assert message in capsys.readouterr().err
    assert not (home / "n").exists()


def test_what_is_quantized_is_not_quantized_again_nor_trained(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["quantize", "m", "--weights", "int4", "n"]) == 0
    assert run(["quantize", "n", "--weights", "int8", "p"]) == 1
    assert "has weights of int4, groups of 32 (pack-quantized) already" in capsys.readouterr().err
    assert run(["train", "--model", "n", "--data", "text.txt", "--out", "r", "--steps", "1"]) == 1
    assert "weights in int4 cannot be trained: train an adapter" in capsys.readouterr().err


def test_a_plan_counts_the_bytes_that_layers_keep(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", "m", "--weights", "int4", "n"]) == 0
    layers = quantized_layers(load_model("n")).values()
    saved = sum(4 * layer.shape[0] * layer.shape[1] - layer.nbytes for layer in layers)
    capsys.readouterr()
    for arguments in (["n"], ["m", "--weights", "int4"]):
        assert run(["plan", *arguments, "--dtype", "float32", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["weights"] == 4 * parameter_count(SPEC) - saved
