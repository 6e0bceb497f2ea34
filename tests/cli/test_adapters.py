"""Adapters in use: `headway.load`, `--adapter` of the commands, and `headway surgery merge`."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import headway
from headway.checkpoints import load_folder, save_adapter, save_folder
from headway.checkpoints.bases import Base
from headway.cli import run
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec, build
from headway.nn import Adapter, Lora, adapter_names, set_active
from headway.text import train_bpe
from tests.checkpoints.adapters import trained
from tests.text.test_chat import TURNS, with_template

WORDS = "one two three four five six seven eight nine ten eleven twelve "


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a model `m`, adapters `a` (of m, with a tokenizer that has a chat template) and `b`, and
    `text.txt`."""
    monkeypatch.chdir(tmp_path)
    spec = ModelSpec.of("llama", vocab=280, width=16, layers=2, heads=4, kv_heads=2, hidden=24, init_std=0.3,
                        trained_context=32, tied=True)  # fmt: skip
    model, tokenizer = build(spec, seed=0).eval(), train_bpe([WORDS], 280)
    save_folder("m", model, tokenizer=tokenizer)
    first = trained(Adapter.fresh(model, Lora(rank=2, magnitude=True)))
    chat_tokenizer = with_template(tokenizer, TURNS)
    save_adapter(
        "a", first, spec, base=Base.of("m"), tokenizer=chat_tokenizer, generation={"eos_token_id": [3, 4]}
    )
    save_adapter("b", trained(Adapter.fresh(model, Lora(rank=3), ("q_proj",)), 2), spec, base=Base.of("m"))
    Path("text.txt").write_text(WORDS * 10)
    return tmp_path


def test_a_model_is_loaded_with_its_adapters(home: Path) -> None:
    plain, both, by_itself = headway.load("m"), headway.load("m", adapter=["a", "b"]), headway.load("a")
    ids = torch.arange(9)[None]
    assert isinstance(both, headway.LanguageModel)
    assert adapter_names(both.model) == ["a", "b"]
    alone = by_itself.model(ids)
    assert (alone - plain.model(ids)).abs().max() > 1e-3
    assert (both.model(ids) - alone).abs().max() > 1e-3
    set_active(both.model, ["a"])
    assert torch.equal(both.model(ids), alone)
    assert torch.equal(headway.load("m", adapter=home / "a").model(ids), alone)
    assert plain.tokenizer.chat_template is None
    assert by_itself.tokenizer.chat_template is not None
    assert both.tokenizer.chat_template is not None
    assert by_itself.generation["eos_token_id"] == [3, 4]
    bfloat16 = headway.load("a", dtype="bfloat16").model
    assert {p.dtype for p in bfloat16.parameters()} == {torch.bfloat16}


def test_an_adapter_without_its_model_says_what_to_do(home: Path) -> None:
    config = Path("b/adapter_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "base_model_name_or_path": None}))
    with pytest.raises(CheckpointError, match=r"does not name its base model .*adapter='b'"):
        headway.load("b")
    (home / "m").rename(home / "moved")
    with pytest.raises(
        CheckpointError, match=r"a is an adapter of m, which could not be loaded .*; pass the model"
    ):
        headway.load("a")
    with pytest.raises(ConfigError, match="'a' exists already"):
        headway.load("moved", adapter=["a", "a"])
    with pytest.raises(CheckpointError, match="moved is not an adapter: it has no adapter_config"):
        headway.load("moved", adapter="moved")


def test_an_adapted_model_is_not_saved_as_if_it_were_its_base(home: Path) -> None:
    with pytest.raises(ConfigError, match=r"has adapters \(a\): save them .* headway surgery merge"):
        headway.load("a").save("saved")
    assert not (home / "saved").exists()


def test_commands_take_adapters(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = headway.load("m", adapter=["a", "b"]).generate("one two", max_new_tokens=8)
    both = ["--adapter", "a", "--adapter", "b"]
    assert run(["generate", "m", "one two", "-n", "8", "-t", "0", *both]) == 0
    assert capsys.readouterr().out == expected.text + "\n"
    losses = []
    for adapters in ([], both):
        assert run(["eval", "m", "--data", "text.txt", "--dtype", "fp32", "--json", *adapters]) == 0
        losses.append(json.loads(capsys.readouterr().out)["loss"])
    assert abs(losses[0] - losses[1]) > 1e-3
    assert run(["eval", "a", "--adapter", "b", "--data", "text.txt", "--dtype", "fp32", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["loss"] == losses[1]


def test_merged_weights_are_the_model_with_its_adapters(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokenizer and the generation settings are those of the adapter that has some."""
    command = ["surgery", "merge", "m", "out", "--adapter", "a", "--adapter", "b", "--data", "text.txt"]
    assert run([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (row,) = report["differences"]
    assert row["difference"] < 1e-5 * row["largest"]
    assert report["before"]["loss"] == pytest.approx(report["after"]["loss"], abs=1e-6)
    assert report["changed"] == []
    merged, adapted = headway.load("out"), headway.load("m", adapter=["a", "b"])
    ids = torch.arange(9)[None]
    torch.testing.assert_close(merged.model(ids), adapted.model(ids), rtol=1e-5, atol=1e-5)
    assert merged.tokenizer.chat_template is not None
    assert merged.generation["eos_token_id"] == adapted.generation["eos_token_id"] == [3, 4]
    assert load_folder("out").config["model_type"] == "llama"
    assert run(["surgery", "merge", "m", "again", "--adapter", "b"]) == 0
    out = capsys.readouterr().out
    assert "2 layers: adapted by b" in out
    assert "the spec stays as it was" in out
    assert headway.load("again").tokenizer.chat_template is None
    assert run(["surgery", "merge", "a", "by-itself"]) == 0
    assert "adapted by a" in capsys.readouterr().out
    outputs = [headway.load(name).model(ids) for name in ("by-itself", "a")]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    assert run(["surgery", "merge", "m", "nothing"]) == 1
    assert "give the adapter to merge into it: --adapter FOLDER" in capsys.readouterr().err


@pytest.fixture
def other(home: Path) -> str:
    """A model of the shape of `m` with other weights."""
    save_folder("other", build(load_folder("m").spec, seed=1).eval(), tokenizer=headway.load("m").tokenizer)
    return "other"


def test_an_adapter_of_other_weights_is_refused_or_taken_when_told(
    other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both fingerprints and both names are in the message, whichever call or command combines the two."""
    fingerprints = [Base.of(name).fingerprint for name in ("m", other)]
    message = rf"a was trained on m, .* {fingerprints[0]}, but other has {fingerprints[1]}: .*--any-base"
    with pytest.raises(CheckpointError, match=message):
        headway.load(other, adapter="a")
    forced = headway.load(other, adapter="a", any_base=True)
    assert adapter_names(forced.model) == ["a"]
    for command in (
        ["generate", other, "one", "-n", "2"],
        ["eval", other, "--data", "text.txt"],
        ["surgery", "merge", other, "out"],
    ):
        assert run([*command, "--adapter", "b", "--adapter", "a"]) == 1
        error = capsys.readouterr().err
        assert "b was trained on m" in error
        assert all(fingerprint in error for fingerprint in fingerprints)
        assert not Path("out").exists()
        assert run([*command, "--adapter", "b", "--adapter", "a", "--any-base"]) == 0
        capsys.readouterr()
    with pytest.raises(ConfigError, match=r"any_base .*m is loaded without one"):
        headway.load("m", any_base=True)


def test_an_adapter_that_names_no_weights_is_taken_with_a_remark(home: Path) -> None:
    """PEFT writes adapters without a fingerprint; with any_base there is no remark."""
    tensors = load_file("a/adapter_model.safetensors")
    save_file(tensors, "a/adapter_model.safetensors")
    with pytest.warns(
        UserWarning, match=r"^a was trained on m, but stores no fingerprint .*--any-base"
    ) as remarks:
        lm = headway.load("m", adapter=["a", "b"])
    assert len(remarks) == 1
    assert adapter_names(lm.model) == ["a", "b"]
    assert adapter_names(headway.load("a", any_base=True).model) == ["a"]


def test_adapters_run_on_what_was_made_of_their_model(home: Path) -> None:
    """A bfloat16 and an int8 copy count as the model; a merge with another adapter makes it another model."""
    headway.load("m", dtype="bfloat16").save("bf16")
    assert run(["quantize", "m", "--weights", "int8", "int8"]) == 0
    for base in ("bf16", "int8"):
        assert adapter_names(headway.load(base, adapter="a").model) == ["a"]
    assert run(["surgery", "merge", "m", "merged", "--adapter", "b"]) == 0
    with pytest.raises(CheckpointError, match="a was trained on m"):
        headway.load("merged", adapter="a")
