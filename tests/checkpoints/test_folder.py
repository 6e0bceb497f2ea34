"""Model folders: strict loading, atomic saving, and the same logits as transformers."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from headway.checkpoints.folder import load_folder
from headway.checkpoints.restore import load_model
from headway.checkpoints.saving import save_folder
from headway.errors import CheckpointError
from headway.models import ModelSpec, build
from headway.patterns import Causal, Window
from headway.positions import Rotary
from headway.storage.dtypes import choose_dtype
from tests.checkpoints.edits import set_tensors
from tests.checkpoints.hf import config_dict, off, peer
from tests.checkpoints.test_parity import FAMILIES, ids
from tests.faults import calls_of, failing, watch


def tiny(**fields) -> ModelSpec:
    sizes = {"vocab": 61, "width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "init_std": 0.3}
    return ModelSpec.of(fields.pop("family", "llama"), **(sizes | fields))


@pytest.fixture
def saved(tmp_path):
    model = build(tiny(), seed=0).eval()
    save_folder(tmp_path / "m", model, generation={"eos_token_id": [2, 3]})
    return tmp_path / "m", model


@pytest.mark.parametrize(
    "spec",
    [
        tiny(tied=True),
        tiny(family="mistral", patterns=Window.last(5)),
        tiny(patterns=(Window.last(5), Causal())),
        tiny(family="qwen2", patterns=(Causal(), Window.last(5)), qkv_bias=True),
        tiny(family="qwen3", qk_norm="head", head_dim=6),
        tiny(qkv_bias=True, out_bias=True, mlp_bias=True, kv_heads=1),
        tiny(positions=Rotary(500.0, pairing="adjacent")),
        tiny(
            family="qwen3", qk_norm="head", qkv_bias=True, out_bias=True, positions=Rotary(pairing="adjacent")
        ),
    ],
    ids=lambda s: f"{s.family}, {s.patterns[0]}",
)
def test_what_we_save_transformers_loads(tmp_path, spec):
    model = build(spec, seed=1).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    save_folder(tmp_path / "m", model)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected = model(ids(2))
        assert off(theirs(ids(2)).logits, expected) < 1e-5
        reloaded = load_model(tmp_path / "m")
        assert off(reloaded(ids(2)), expected) < 1e-5
    save_folder(tmp_path / "again", reloaded)
    assert files(tmp_path / "again") == files(tmp_path / "m")


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_transformers_saves_in_shards_we_load(tmp_path, name):
    theirs = peer(config_dict(name.split()[0], **FAMILIES[name]))
    theirs.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    with torch.no_grad():
        assert off(load_model(tmp_path / "m")(ids(2)), theirs(ids(2)).logits) < 1e-5


def test_shards_of_ours(tmp_path):
    model = build(tiny(), seed=0).eval()
    save_folder(tmp_path / "m", model, shard_bytes=4000)
    assert len(load_folder(tmp_path / "m").stored.files) > 3
    assert torch.equal(load_model(tmp_path / "m")(ids()), model(ids()))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert off(theirs(ids()).logits.detach(), model(ids()).detach()) < 1e-5


def test_generation_settings_are_kept(saved):
    folder, _ = saved
    assert load_folder(folder).generation["eos_token_id"] == [2, 3]
    assert json.loads((folder / "config.json").read_text())["bos_token_id"] is None


Q = "model.layers.0.self_attn.q_proj.weight"


def test_missing_unexpected_and_misshaped_are_listed_together_with_the_nearest_names(saved):
    folder, _ = saved

    def change(t):
        t["model.layers.0.self_attn.q_prj.weight"] = t.pop(Q)
        t["model.norm.weight"] = torch.ones(17)
        t["optimizer.step"] = torch.ones(1)

    set_tensors(folder, change)
    with pytest.raises(CheckpointError) as error:
        load_model(folder)
    message = str(error.value)
    assert "the weights do not fit config.json (4 differences)" in message
    assert f'missing: {Q} (nearest there: "model.layers.0.self_attn.q_prj.weight")' in message
    assert f'unexpected: model.layers.0.self_attn.q_prj.weight (did you mean "{Q}"?)' in message
    assert "unexpected: optimizer.step" in message
    assert "shape: model.norm.weight is [17], the config says [16]" in message


def test_rotary_tables_of_old_versions_are_no_weights(saved):
    set_tensors(saved[0], lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}))
    assert torch.equal(load_model(saved[0])(ids()), saved[1](ids()))


def test_tied_weights_once_and_twice(tmp_path):
    model = build(tiny(tied=True), seed=0).eval()
    save_folder(tmp_path / "m", model)
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    set_tensors(
        tmp_path / "m", lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    assert torch.equal(load_model(tmp_path / "m")(ids()), model(ids()))
    set_tensors(
        tmp_path / "m", lambda t: t.pop("model.embed_tokens.weight")
    )  # stored under the other name only
    assert torch.equal(load_model(tmp_path / "m")(ids()), model(ids()))


def test_dtypes_are_chosen_with_a_reason(saved, tmp_path):
    folder, model = saved
    save_folder(tmp_path / "bf", model, dtype=torch.bfloat16)
    assert load_model(tmp_path / "bf").lm_head.weight.dtype == torch.bfloat16
    assert load_model(tmp_path / "bf", dtype=torch.float64).lm_head.weight.dtype == torch.float64
    assert load_folder(tmp_path / "bf").config["torch_dtype"] == "bfloat16"
    set_tensors(folder, lambda t: t.update({Q: t[Q].bfloat16()}))
    assert {p.dtype for p in load_model(folder).parameters()} == {torch.float32}

    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    half, brain, full = torch.float16, torch.bfloat16, torch.float32
    dtype, reason = choose_dtype({"a": half, "b": half}, cpu)
    assert dtype == full
    assert "several hundred times slower" in str(reason)
    assert choose_dtype({"a": half}, cuda)[0] == half
    assert choose_dtype({"a": half, "b": brain}, cuda)[0] == full
    assert "1 tensors bfloat16" in str(choose_dtype({"a": brain, "b": full, "c": full}, cpu)[1])
    assert "several hundred times slower" in str(choose_dtype({"a": half}, cpu, half)[1])
    set_tensors(folder, lambda t: t.update({Q: t[Q].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=rf"1 of \d+ tensors are not .*{Q} is int8.*quantized"):
        load_model(folder)


def test_a_pickled_model_needs_the_flag(saved):
    folder, model = saved
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="allow_pickle=True"):
        load_model(folder)
    assert torch.equal(load_model(folder, allow_pickle=True)(ids()), model(ids()))


def test_saving_over_a_model_keeps_other_files_and_nothing_of_the_model(saved):
    folder, _ = saved
    (folder / "README.md").write_text("mine")
    (folder / "metrics.jsonl").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "logs").mkdir()
    (folder / "logs" / "a").write_text("a")
    replacement = build(tiny(tied=True), seed=5).eval()
    with pytest.raises(CheckpointError, match=r"exists; .* a folder with a model of model_type 'llama'"):
        save_folder(folder, replacement)
    save_folder(folder, replacement, shard_bytes=3000, overwrite=True)
    assert not (folder / "model.safetensors").exists()
    names = {p.name for p in folder.iterdir()}
    assert {"README.md", "metrics.jsonl", "logs"} < names
    assert "tokenizer.json" not in names
    assert (folder / "logs" / "a").read_text() == "a"
    assert torch.equal(load_model(folder)(ids()), replacement(ids()))

    class Words:
        bos, eos = 1, 2

        def save(self, where):
            (where / "tokenizer_config.json").write_text("{}")

    (folder / "tokenizer.json").write_text("{}")
    save_folder(folder, replacement, tokenizer=Words(), overwrite=True)
    assert not (folder / "tokenizer.json").exists()
    assert load_folder(folder).generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


def test_every_call_of_a_save_failing_in_turn_leaves_the_previous_model(tmp_path):
    old, new = build(tiny(layers=1), seed=0).eval(), build(tiny(layers=1), seed=1).eval()
    save_folder(tmp_path / "probe", old)
    calls = calls_of(lambda: save_folder(tmp_path / "probe", new, overwrite=True))
    assert {"mkdir", "open", "write", "fsync", "close", "exchange"} < set(calls)
    expected = old(ids())
    save_folder(tmp_path / "m", old)
    for n in range(len(calls) - 1):  # the last removes the replaced folder
        with watch(failing(n)), pytest.raises(CheckpointError, match="could not save"):
            save_folder(tmp_path / "m", new, overwrite=True)
        assert torch.equal(load_model(tmp_path / "m")(ids()), expected), calls[n]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


@pytest.mark.parametrize("step", [17, pytest.param(1, marks=pytest.mark.slow)])
def test_every_truncation_of_a_save_leaves_the_previous_model(tmp_path, step):
    spec = replace(tiny(layers=1), vocab=3, width=2, heads=1, kv_heads=1, head_dim=2, hidden=2)
    old, new = build(spec, seed=0).eval(), build(spec, seed=1).eval()
    save_folder(tmp_path / "m", old)
    before = files(tmp_path / "m")
    writes: list[int] = []
    with watch(lambda o, p, d: writes.append(len(d)) if o == "write" else None):
        save_folder(tmp_path / "probe", new, overwrite=True)
    for cut in range(0, sum(writes), step):
        space = [cut]

        def full(operation, path, data):
            if operation != "write":
                return None
            space[0] -= len(data)  # noqa: B023
            return None if space[0] >= 0 else max(0, len(data) + space[0])  # noqa: B023

        with watch(full), pytest.raises(CheckpointError, match="No space left"):
            save_folder(tmp_path / "m", new, overwrite=True)
        assert files(tmp_path / "m") == before
