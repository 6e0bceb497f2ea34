"""`headway plan` prints what a plan says, as text and as JSON."""

import json
import re
from pathlib import Path

import pytest
import torch

from headway.cli import run
from headway.models import cost
from headway.models.cost.planning import Machine
from tests.models.test_planning import BOX
from tests.native.presence import pretend


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "here", staticmethod(lambda dtype: BOX))


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize("native", [True, False])
def test_the_command_prints_the_report(
    native: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, native)
    assert run(["plan", "mistral-7b", "--context", "32768", "--batch", "4"]) == 0
    out = capsys.readouterr().out
    assert (
        "mistral-7b: 7,241,732,096 parameters, 32 layers of 4096, GQA, 32 query heads on 8 kv heads of 128"
        in out
    )
    assert (
        "4 x 32768 tokens in bfloat16 on box (32.00 GiB of memory, reads 20.0 GB/s, multiplies at 500 GFLOP/s)"
        in out
    )
    assert "Window.last(4096)  window  4 096" in out
    assert ("native: compiled for this CPU" if native else "not sdpa: it would build a mask") in out
    assert "it fits: 20.53 GiB of 32.00 GiB" in out
    assert "one token is bound by memory" in out


@pytest.mark.usefixtures("_quick")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["transformer-base", "--context", "128", "--source", "256"],
         ["2 x 256 source and 128 target", "encoder's layers", "one token per row", "source  "]),
        (["bert-base-uncased"], ["2 x 512 tokens", "encoder's layers", "whole rows"]),
    ],
)  # fmt: skip
def test_the_command_prints_all_kinds(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments, "--batch", "2"]) == 0
    out = capsys.readouterr().out
    assert [text for text in said if text not in out] == []
    assert ("tokens/s over 2 rows" in out) == ("--source" in arguments)


@pytest.mark.usefixtures("_quick")
def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "llama-2-70b", "--json", "--dtype", "float32"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["weights"] == 4 * 68_976_648_192
    assert report["what_fits"] == {}
    assert report["context"] == 4096
    assert report["fits"] is False
    assert report["layers"][0]["cache"]["what"] == "growing"


@pytest.mark.usefixtures("_quick")
def test_what_would_fit_is_named_where_a_model_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    """Each option, given as printed, makes the model fit and needs the printed bytes."""
    command = ["plan", "llama-2-13b", "--context", "4096", "--batch", "8"]
    assert run(command) == 0
    out = capsys.readouterr().out
    options = re.findall(r"(?m)^    (--[a-z].*?) {2,}(\S+ \S+)$", out)
    assert "it does NOT fit" in out
    assert "--batch 1" in [option for option, _ in options]
    assert options[-1][0].startswith("--context ")
    for option, needed in options:
        assert run([*command, *option.split()]) == 0
        assert f"it fits: {needed} of 32.00 GiB" in capsys.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_a_vocab_that_processes_do_not_share_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for model, is_named in (("gpt2", True), ("llama-2-7b", False)):
        assert run(["plan", model, "--mesh", "tp=2", "--processes", "2"]) == 0
        assert ("tp=2 does not divide a vocab of 50257" in capsys.readouterr().out) == is_named


@pytest.mark.usefixtures("_quick")
def test_weights_of_few_bits_are_counted_where_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Only linear layers of the blocks are quantized: other parts take as much as in bfloat16, whatever the size of the
    model."""
    assert run(["plan", "llama-2-7b", "--weights", "int4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts, sizes = report["parameters"], report["weight_bytes"]
    assert counts.keys() == sizes.keys()
    assert sum(sizes.values()) == report["weights"]
    for part in ("embedding", "norms", "output layer"):
        assert sizes[part] == 2 * counts[part]
    for part in ("attention", "feed-forward"):
        assert 0.5 * counts[part] < sizes[part] < 0.65 * counts[part]
    assert run(["plan", "llama-2-7b", "--weights", "int4"]) == 0
    assert re.search(r"embedding +131 072 000 +250.00 MiB", capsys.readouterr().out)


def test_a_machine_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("headway.hardware.read_bandwidth", lambda: 35e9)
    monkeypatch.setattr("headway.hardware.gemm_peak", lambda dtype: {torch.float32: 1e12}[dtype])
    assert run(["plan", "bert-base-uncased", "--dtype", "float32"]) == 0
    assert "reads 35.0 GB/s, multiplies at 1000 GFLOP/s)" in capsys.readouterr().out


@pytest.mark.usefixtures("_quick")
def test_the_command_reads_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.models import oracle

    oracle.config("qwen2", 2, False).save_pretrained(tmp_path)
    assert run(["plan", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["family"] == "qwen2"
    assert sum(report["parameters"].values()) == cost.parameter_count(oracle.spec("qwen2", 2, False))
    assert [layer["layers"] for layer in report["layers"]] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lama-2-7b"], "no model 'lama-2-7b' (did you mean \"llama-2-7b\"?)"),
        (["./nowhere"], "./nowhere is not a folder with a config.json, or a name of the catalog"),
        (["mistral-7b", "--dtype", "float16"], "float16 products are hundreds of times slower"),
        (["mistral-7b", "--patterns", "Window.last(8); Causal(); Full()"], "3 patterns do not fit 32 layers"),
        (
            ["mistral-7b", "--epochs", "3"],
            "--epochs and --hours are for the time of a training; give its number of --rows",
        ),
        (["mistral-7b", "--rows", "9", "--hours", "0"], "hours must be above 0, got 0"),
        (["mistral-7b", "--device", "A100"], "there is no device 'A100' (did you mean \"A100-"),
        (
            ["mistral-7b", "--memory", "24gigs"],
            "--memory 24gigs: must be a positive number of bytes, or one such as",
        ),
        (["mistral-7b", "--patterns", "Full()"], "lets a token see later ones"),
    ],
)
@pytest.mark.usefixtures("_quick")
def test_the_command_says_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", *arguments]) == 1
    assert message in capsys.readouterr().err
