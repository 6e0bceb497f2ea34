"""`save` leaves a folder that loads as the model, whatever was in it before."""

import json
from pathlib import Path

import pytest

import headway
from headway.api import LanguageModel
from headway.errors import CheckpointError
from headway.patterns import Causal
from tests.generate.conftest import small


def test_save_and_load(lm: LanguageModel, tmp_path: Path) -> None:
    lm.save(tmp_path / "again")
    reloaded = headway.load(tmp_path / "again")
    assert reloaded.generate("the cat", max_new_tokens=8).ids == lm.generate("the cat", max_new_tokens=8).ids
    assert reloaded.tokenizer is not None
    assert reloaded.tokenizer.chat_template is not None
    assert (reloaded.eos, reloaded.spec) == (lm.eos, lm.spec)
    assert "LanguageModel(llama, " in repr(reloaded)


def test_another_model_is_not_replaced_unasked_and_nothing_of_it_stays(
    lm: LanguageModel, tmp_path: Path
) -> None:
    folder, mine = tmp_path / "m", {"notes.md", "metrics.jsonl", "texts"}
    lm.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    other = LanguageModel(small(Causal()))
    with pytest.raises(
        CheckpointError,
        match=r"m exists; .*overwrite=True.*: a folder with a model of model_type 'headway'",
    ):
        other.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "texts").mkdir()
    (folder / "1_Pooling").mkdir()
    for name in (
        "optimizer.safetensors",
        "training.json",
        "modules.json",
        "1_Pooling/config.json",
        "tf_model.h5",
        "adapter_model.bin",
        "model-00001-of-00002.safetensors",
        "notes.md",
        "metrics.jsonl",
        "texts/a.txt",
    ):
        (folder / name).write_text("{}")  # fmt: skip
    other.save(folder, overwrite=True)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors"} | mine
    assert headway.load(folder).tokenizer is None
    assert other.spec == headway.load(folder).spec
    (tmp_path / "kept").mkdir()
    for name in "fedcba":
        (tmp_path / "kept" / name).write_text("mine")
    with pytest.raises(CheckpointError, match=r"kept exists; .*: a folder with a, b, c, d and 2 more"):
        other.save(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"a exists; .*: a file"):
        other.save(tmp_path / "kept" / "a")


def test_generation_config_is_kept(folder: Path, tmp_path: Path) -> None:
    lm = headway.load(folder)
    LanguageModel(lm.model, lm.tokenizer, generation={"eos_token_id": [1, 2], "top_k": 7}).save(
        tmp_path / "m"
    )
    config = json.loads((tmp_path / "m" / "generation_config.json").read_text())
    assert (config["eos_token_id"], config["top_k"]) == ([1, 2], 7)
    assert headway.load(tmp_path / "m").eos == (1, 2)


def test_nothing_of_a_model_remains_beside_one_that_is_saved_over_it(
    lm: LanguageModel, tmp_path: Path
) -> None:
    """Its shards, its pickles, its tokenizer in another format are removed; files that belong to no model stay."""
    lm.save(tmp_path / "m")
    before = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    with pytest.raises(CheckpointError, match=r"m exists; .* a folder with a model of model_type"):
        lm.save(tmp_path / "m")
    assert {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()} == before
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "merges.txt",
           "vocab.json", "encoder.json", "vocab.bpe", "adapter_config.json", "adapter_model.safetensors",
           "model.gguf", "preprocessor_config.json", "tokenizer.model", "spiece.model", "source.spm", "target.spm",
           "target_vocab.json"]  # fmt: skip
    for name in [*stale, "notes.txt", "metrics.jsonl"]:
        (tmp_path / "m" / name).write_text("old")
    lm.save(tmp_path / "m", overwrite=True)
    after = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir()}
    assert after == {**before, "notes.txt": b"old", "metrics.jsonl": b"old"}
