"""`convert`: pairings, repeated KV heads, dtypes and shards; nothing stays at the target unless the check passed."""

import json
from collections import Counter

import pytest
import torch
from transformers import AutoModelForCausalLM

from headway.checkpoints import convert, load_folder, load_model, save_folder
from headway.checkpoints.formats import conversion as module
from headway.checkpoints.heads import repeat_kv_heads
from headway.checkpoints.rewriting import probe
from headway.cli import run
from headway.errors import CheckpointError
from headway.models import ModelSpec, build
from headway.positions import Rotary
from headway.storage.tensors import open_tensors
from tests.checkpoints.hf import off
from tests.pairwise import chequered

MISSION_PAIRS = ((0, 3), (1, 4), (2, 5))
WEIGHTS = "model.safetensors"


def save(path, *, family="qwen2", kv_heads=2, heads=4, pairing="halves", head_dim=6, **fields):
    sizes = {"vocab": 61, "width": 24, "layers": 2, "heads": heads, "hidden": 24, "init_std": 0.3, **fields}
    spec = ModelSpec.of(family, **sizes, kv_heads=kv_heads, head_dim=head_dim,
                        positions=Rotary(500.0, pairing=pairing))  # fmt: skip
    model = build(spec, seed=0).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())) * 0.3)
    save_folder(path, model, generation={"eos_token_id": 2}, keep_pairing=True)
    return path


def logits(path, dtype=None):
    ids = torch.arange(40).view(2, 20) % 61
    return load_model(path, dtype=dtype)(ids).detach()


@chequered("pairs,kv_heads", [MISSION_PAIRS, ((5, 0), (3, 1), (2, 4))], [1, 2, 4])
def test_row_61_interleaved_to_halves_to_any_pairs_and_back_is_the_same_file(tmp_path, kv_heads, pairs):
    """Row 61: every step gives the same logits, and the last one restores the first file byte for byte."""
    start = save(tmp_path / "0", family="qwen3", kv_heads=kv_heads, pairing="adjacent")
    expected = logits(start, torch.float64)
    steps = ["halves", str(pairs)[1:-1], "adjacent"]
    for number, pairing in enumerate(steps, 1):
        source, target = tmp_path / str(number - 1), tmp_path / str(number)
        assert run(["convert", str(source), str(target), "--to-pairing", pairing]) == 0
        assert off(logits(target, torch.float64), expected) < 1e-14
        assert (source / WEIGHTS).read_bytes() != (target / WEIGHTS).read_bytes()
    assert load_folder(tmp_path / "2").spec.positions.pairing == pairs
    assert (tmp_path / "3" / WEIGHTS).read_bytes() == (start / WEIGHTS).read_bytes()
    assert json.loads((tmp_path / "3" / "config.json").read_text()) == json.loads(
        (start / "config.json").read_text()
    )


def test_row_61_the_pairs_of_the_documents_are_halves_under_another_name(tmp_path):
    """(0, 3), (1, 4), (2, 5) of six dims are (i, i + 3): the weights stay the same, the recorded pairing changes."""
    start = save(tmp_path / "0", pairing="halves")
    convert(start, tmp_path / "1", to_pairing=MISSION_PAIRS)
    assert (tmp_path / "1" / WEIGHTS).read_bytes()[-4000:] == (start / WEIGHTS).read_bytes()[-4000:]
    assert load_folder(tmp_path / "1").spec.positions.pairing == MISSION_PAIRS
    (change,) = convert(
        tmp_path / "1", tmp_path / "2"
    ).changed  # the family's own pairing, if none is asked for
    assert str(MISSION_PAIRS) in change[1]
    assert load_folder(tmp_path / "2").spec.positions.pairing == "halves"


@chequered("heads,family", [(1, 4), (2, 4), (1, 2), (4, 4)], ["llama", "qwen2", "qwen3"], of=3)
def test_row_53_grouped_heads_written_out_are_the_same_function(tmp_path, heads, family):
    """Row 53: GQA and MQA to MHA (and between) by repetition; transformers reads the same from the result."""
    before, after = heads
    start = save(tmp_path / "0", family=family, kv_heads=before)
    assert run(["convert", str(start), str(tmp_path / "1"), "--kv-heads", str(after)]) == 0
    folder = load_folder(tmp_path / "1")
    assert (folder.spec.kv_heads, folder.config["num_key_value_heads"]) == (after, after)
    assert off(logits(tmp_path / "1", torch.float64), logits(start, torch.float64)) < 1e-13
    ids = torch.arange(20)[None]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "1", attn_implementation="eager")
    assert off(theirs(ids).logits.detach(), load_model(start)(ids).detach()) < 1e-5
    old, new = open_tensors(start), open_tensors(tmp_path / "1")
    for name, value in new.items():
        if "k_proj" in name or "v_proj" in name:
            copies = value.reshape(before, after // before, 6, -1)
            assert torch.equal(copies, old[name].reshape(before, 1, 6, -1).expand_as(copies))
        else:
            assert torch.equal(value, old[name])


def test_row_53_a_wrong_order_of_copies_is_seen_and_nothing_is_left(tmp_path, monkeypatch):
    """The defect: heads repeated as 0 1 0 1 instead of 0 0 1 1."""

    def interleaved(state, spec, kv_heads):
        new, target = repeat_kv_heads(state, spec, kv_heads)
        times = kv_heads // spec.kv_heads
        wrong = {n: state[n].repeat(times, *[1] * (v.dim() - 1)) if "_proj" in n and v.shape != state[n].shape else v
                 for n, v in new.items()}  # fmt: skip
        return wrong, target

    start = save(tmp_path / "0", kv_heads=2)
    monkeypatch.setattr(module, "repeat_kv_heads", interleaved)
    with pytest.raises(CheckpointError, match="its conversion differ"):
        convert(start, tmp_path / "1", kv_heads=4)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0"]


def test_sums_in_another_order_are_decided_in_float64(tmp_path, monkeypatch):
    """float32 rounding beyond its bound is no difference of models; a weight changed by a factor of 1 + 1e-6 is one."""
    start = save(tmp_path / "0", family="qwen3", pairing="adjacent")
    monkeypatch.setitem(module.BOUNDS, torch.float32, 1e-12)
    checks = convert(start, tmp_path / "1", to_pairing="halves").differences
    assert [check.dtype for check in checks] == ["float64", "bfloat16"]
    assert 0 < checks[0].difference <= checks[0].bound == 1e-12 * checks[0].largest

    change_pairing, norm = module.change_pairing, "model.norm.weight"

    def wrong(state, spec, pairing):
        new, target = change_pairing(state, spec, pairing)
        return {**new, norm: new[norm] * (1 + 1e-6)}, target

    monkeypatch.setattr(module, "change_pairing", wrong)
    with pytest.raises(CheckpointError, match=r"its conversion differ: logits by up to .* in float64"):
        convert(start, tmp_path / "2", to_pairing="halves")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_dtype_is_the_source_rounded_and_says_what_that_changed(tmp_path, dtype, capsys):
    start, dtype_name = save(tmp_path / "0"), str(dtype).removeprefix("torch.")
    result = convert(start, tmp_path / "1", dtype=dtype)
    old, new = open_tensors(start), open_tensors(tmp_path / "1")
    assert Counter(form.dtype for form in new.forms.values()) == {dtype: len(old)}
    assert all(torch.equal(new[name], old[name].to(dtype)) for name in old)
    assert load_folder(tmp_path / "1").config["dtype"] == dtype_name
    assert ("weights", "float32", dtype_name) in result.changed
    if dtype == torch.float64:
        assert result.rounding is None
    else:
        ids = probe(load_folder(start).spec, None, result.context)[None]
        model = load_model(start)
        converted = load_model(tmp_path / "1", dtype=torch.float32)
        change = float((model(ids) - converted(ids)).detach().abs().max())
        assert result.rounding == pytest.approx(change, rel=1e-3)
        assert result.rounding > 100 * result.differences[0].difference
        assert run(["convert", str(start), str(tmp_path / "2"), "--dtype", dtype_name]) == 0
        assert "differs from the source: rounding changed logits by up to" in capsys.readouterr().out


def test_a_folder_is_converted_in_place(tmp_path):
    start = save(tmp_path / "0", kv_heads=1)
    original = load_model(start, dtype=torch.float64)
    separate = convert(start, tmp_path / "1", dtype=torch.bfloat16, kv_heads=4, to_pairing="adjacent")
    result = convert(start, start, dtype=torch.bfloat16, kv_heads=4, to_pairing="adjacent", overwrite=True)
    assert result.rounding == separate.rounding > 0
    assert (start / WEIGHTS).read_bytes() == (tmp_path / "1" / WEIGHTS).read_bytes()
    ids = torch.arange(20)[None]
    change = off(load_model(start, dtype=torch.float64)(ids).detach(), original(ids).detach())
    assert 0 < change < 0.2


def test_a_number_that_the_dtype_cannot_hold_is_not_converted(tmp_path):
    start = save(tmp_path / "0")
    model = load_model(start)
    with torch.no_grad():
        model.model.norm.weight[0] = 1e6
    save_folder(start, model, overwrite=True)
    with pytest.raises(CheckpointError, match="differ"):
        convert(start, tmp_path / "1", dtype=torch.float16)
    assert not (tmp_path / "1").exists()


@pytest.mark.parametrize(
    ("size", "limit"), [("1TB", 10**12), ("20000", 20000), ("5KB", 5000), ("5 kb", 5000)]
)
def test_shards_of_a_size(tmp_path, size, limit):
    start = save(tmp_path / "0")
    assert run(["convert", str(start), str(tmp_path / "1"), "--shard-size", size]) == 0
    stored = open_tensors(tmp_path / "1")
    sizes = [
        sum(entry.nbytes for entry in stored.forms.values() if entry.file == file) for file in stored.files
    ]
    largest = max(entry.nbytes for entry in stored.forms.values())
    assert max(sizes) <= max(limit, largest)
    assert len(sizes) >= stored.nbytes / max(limit, largest)
    assert (len(sizes) == 1) == (limit > stored.nbytes)
    assert all(
        torch.equal(open_tensors(tmp_path / "1")[name], value) for name, value in open_tensors(start).items()
    )


def test_all_changes_at_once_are_shown_equal(tmp_path, capsys):
    start = save(tmp_path / "0", kv_heads=1)
    options = "--kv-heads 4 --to-pairing adjacent --dtype bfloat16 --shard-size 4KB --json"
    assert run(["convert", str(start), str(tmp_path / "1"), *options.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [row[0] for row in report["changed"]] == ["positions", "heads", "weights"]
    assert load_folder(tmp_path / "1").spec.kv_heads == 4
    assert all(check["difference"] <= check["bound"] for check in report["differences"])
    assert report["differences"][0]["bound"] == 1e-5 * report["differences"][0]["largest"]
    rounded = load_model(start)
    with torch.no_grad():
        for p in rounded.parameters():
            p.copy_(p.bfloat16())
    ids = torch.arange(20)[None]
    result = load_model(tmp_path / "1", dtype=torch.float64)(ids).detach()
    assert off(result, rounded.double()(ids).detach()) < 1e-13
