"""Generation, conversion, inspection, planning and training of decoders that are not Llama-like."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import load_model
from headway.cli import run
from headway.cli._plan_text import to_text
from headway.generate import GenerationConfig, generate
from headway.models import FAMILIES, Head, ModelSpec, build, catalog, cost
from headway.models.cost.planning import Machine, plan
from headway.positions import LinearBias, rotations
from tests.checkpoints.decoders import IDS, MAIN, theirs
from tests.checkpoints.hf import off
from tests.checkpoints.shares import share
from tests.models.test_activations import kept, loss_of

OTHERS = (
    *("gpt_bigcode", "falcon", "starcoder2", "gpt_neox", "phi", "bloom", "mpt"),
    *(
        "granite",
        "olmo2",
        "gemma",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gemma4_text",
        "qwen3_5_text",
        "lfm2",
    ),
    *("bamba", "granitemoehybrid", "falcon_h1", "nemotron_h"),
)
MACHINE = Machine(name="a machine", memory=2**40, bandwidth=1e11, peak=1e12)


@share("name", MAIN, 1, 3)
def test_greedy_texts_are_theirs(name: str, tmp_path: Path) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    expected = model.generate(
        IDS[:, :9],
        attention_mask=torch.ones(2, 9, dtype=torch.long),
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )
    outputs = generate(ours, IDS[:, :9].tolist(), GenerationConfig(max_new_tokens=12))
    assert [output.ids for output in outputs] == expected[:, 9:].tolist()


@share("name", MAIN, 0, 4)
def test_convert_inspect_and_plan(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    ours = load_folder(tmp_path / "theirs")
    assert run(["convert", str(tmp_path / "theirs"), str(tmp_path / "same")]) == 0
    assert "transformers loads it" in capsys.readouterr().out
    converted = load_folder(tmp_path / "same")
    assert converted.spec == ours.spec
    assert all(torch.equal(converted.tensors[key], value) for key, value in ours.tensors.items())
    assert run(["inspect", str(tmp_path / "same"), "--json"]) == 0
    inspected = json.loads(capsys.readouterr().out)
    assert inspected["parameter_count"] == sum(p.numel() for p in model.parameters())
    assert inspected["transformers"] == "loads it"
    report = plan(ours.spec, model=name, context=16, machine=MACHINE)
    assert report.training["parameters"] == 6 * inspected["parameter_count"]
    prefill = next((layer.prefill.rejected for layer in report.layers if layer.prefill is not None), None)
    assert ("ALiBi" in str(prefill)) == isinstance(ours.spec.positions, LinearBias)
    if not (rotary := rotations(ours.spec.positions)):
        return
    pairing = {"halves": "adjacent", "adjacent": "halves"}[str(rotary[0].pairing)]
    assert run(["convert", str(tmp_path / "theirs"), str(tmp_path / "x"), "--to-pairing", pairing]) == 0
    assert "refuses it: it cannot express its rotary pairing" in capsys.readouterr().out
    assert run(["convert", str(tmp_path / "x"), str(tmp_path / "back")]) == 0
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    with torch.no_grad():
        assert torch.equal(reloaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scores", ["recomputed", "stored"])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"dropout": 0.1},
        {"dropout": 0.1, "final_dropout": True},
        {"activation": "relu"},
        {"order": "joint"},
        {"order": "parallel"},
        {"embedding_norm": True},
        {"gated": True, "activation": "silu"},
        {"gated": True, "activation": "relu"},
        {"norm": "rms", "norm_bias": False},
        {"norm_offset": 1.0},
        {"norm_weight": False, "norm_bias": False},
        {"qk_norm": "rotated"},
        {"activation": "relu2"},
        {"activation": "xielu"},
        {"gated": True, "activation": "relu2"},
        {"head": Head("lm", dense="gelu")},
    ],
    ids=str,
)
def test_kept_bytes_are_what_autograd_keeps(change: dict[str, Any], scores: Any, dtype: torch.dtype) -> None:
    """Row 109 for LayerNorm, ungated feed-forwards, parallel branches, and dropout."""
    sizes = {"vocab": 97, "width": 40, "layers": 3, "heads": 4, "hidden": 56, "head_dim": 12}
    spec = ModelSpec.of("gpt2", **{**sizes, "dropout": 0.0, "attention_dropout": 0.0, **change})
    model = build(spec, seed=0, dtype=dtype, backend="dense" if scores == "stored" else "sdpa")
    measured = kept(lambda: loss_of(model, torch.randint(97, (2, 48)), fused=False), model)
    expected = cost.activation_bytes(spec, 48, 2, dtype, scores=scores) | {"logits": 4 * 97 * 2 * 48}
    assert abs(measured - sum(expected.values())) < 0.01 * sum(expected.values())


def test_post_norm_is_counted_in_the_plan() -> None:
    spec = replace(catalog.spec("gpt2"), order="post")
    report = plan(spec, model="x", context=64, dtype=torch.float32, machine=MACHINE)
    assert report.training == cost.training_bytes(spec, 64)
    assert report.checkpointed <= sum(report.training.values())
    assert "training, at its peak" in to_text(report, spec)


@pytest.mark.parametrize(
    "family",
    ["gpt2", *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)],
)
def test_any_of_them_is_trained_from_scratch(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training on a text file gives a folder that transformers loads and that we evaluate and generate from."""
    monkeypatch.setattr("headway.train.tasks.rows.gemm_peak", lambda dtype: 1e12)
    (tmp_path / "text.txt").write_text("one two three four five\nsix seven\n" * 200)
    settings = {"data": tmp_path / "text.txt", "out": tmp_path / "run", "family": family, "vocab": 270, "depth": 2,
                "width": 32, "heads": 4, "context": 32, "batch_tokens": 256, "steps": 12, "dtype": "fp32",
                "lr": 0.01, "log_every": 1}  # fmt: skip
    flags = [part for key, value in settings.items() for part in (f"--{key.replace('_', '-')}", str(value))]
    assert run(["train", *flags]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [entry["loss"] for line in lines if "loss" in (entry := json.loads(line))]
    assert losses[-1] < losses[0] - 0.5
    final = str(tmp_path / "run" / "final")
    kv_heads = 1 if FAMILIES[family].groups or family in ("gpt_bigcode", "falcon") else 4
    ours = load_model(final)
    assert (ours.spec.family, ours.spec.kv_heads, ours.spec.hidden) == (family, kv_heads, 128)
    peer = AutoModelForCausalLM.from_pretrained(final, attn_implementation="eager").eval()
    with torch.no_grad():
        assert off(ours(IDS), peer(IDS).logits) < 1e-5
    capsys.readouterr()
    assert run(["eval", final, "--data", str(tmp_path / "text.txt"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bits_per_byte"] < 4
    assert run(["generate", final, "one two", "--max-new-tokens", "5"]) == 0
