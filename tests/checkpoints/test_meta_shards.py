"""Meta's model-parallel parts, split here as fairscale's layers split them, are read as one model."""

import json
from pathlib import Path

import pytest
import torch

from headway.checkpoints import convert, load_folder, load_model
from headway.checkpoints.formats.meta import MetaModel, read_pickled
from headway.checkpoints.formats.meta_shards import open_shards, shard_files
from headway.cli import run
from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.positions import Rotary
from tests.checkpoints.hf import off
from tests.checkpoints.test_foreign import meta_weights

WIDTH, HIDDEN, LAYERS, HEADS, VOCAB = 32, 48, 2, 8, 24
COLUMN_PARALLEL = ("wq", "wk", "wv", "w1", "w3", "output")
PARAMS = {
    "LLaMA 1": {"multiple_of": 256, "norm_eps": 1e-6, "vocab_size": -1},
    "LLaMA 2": {"multiple_of": 4096, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "vocab_size": VOCAB},
    "LLaMA 3": {"multiple_of": 1024, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "vocab_size": VOCAB,
                "rope_theta": 500000.0},
}  # fmt: skip


def model(kv_heads=HEADS, params=None) -> MetaModel:
    params = params or {}
    positions = Rotary(params.get("rope_theta", 10000.0), pairing="adjacent")
    spec = ModelSpec.of("llama", vocab=VOCAB, width=WIDTH, layers=LAYERS, heads=HEADS, kv_heads=kv_heads, hidden=HIDDEN,
                        init_std=0.3, positions=positions, norm_eps=params.get("norm_eps", 1e-5))  # fmt: skip
    return MetaModel(spec, meta_weights(spec), Path())


def split(weights, parts, *, vocab_parallel, kv_heads=HEADS):
    """Returns weights as [part][name], split by each layer's rule, written independently of the tested code."""
    shards = [{} for _ in range(parts)]
    for name, value in weights.items():
        module = name.split(".")[-2]
        for i, shard in enumerate(shards):
            if "norm" in module:
                shard[name] = value.clone()
            elif module == "tok_embeddings":
                shard[name] = value.chunk(parts, 0 if vocab_parallel else 1)[i].clone()
            elif module in ("wk", "wv") and parts > kv_heads:
                shard[name] = value.chunk(kv_heads, 0)[i * kv_heads // parts].clone()
            else:
                shard[name] = value.chunk(parts, 0 if module in COLUMN_PARALLEL else 1)[i].clone()
    for shard in shards:
        shard["rope.freqs"] = torch.ones(2)
    return shards


def put(folder, parts, **params):
    folder.mkdir(exist_ok=True)
    for i, part in enumerate(parts):
        torch.save(part, folder / f"consolidated.{i:02d}.pth")
    (folder / "params.json").write_text(
        json.dumps({"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS} | params)
    )
    return folder


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("generation", PARAMS)
def test_parts_are_one_model_again_and_convert_shows_it(tmp_path, generation, parts):
    params = PARAMS[generation]
    original = model(params=params)
    stored = split(original.weights, parts, vocab_parallel=generation == "LLaMA 3")
    loaded = read_pickled(put(tmp_path / "m", stored, **params), allow_pickle=True)
    assert loaded.weights.keys() - {"rope.freqs"} == original.weights.keys()
    assert all(torch.equal(loaded.weights[name], value) for name, value in original.weights.items())
    result = convert(tmp_path / "m", tmp_path / "hf", allow_pickle=True)
    assert ("format", "meta", "hf") in result.changed
    assert load_folder(tmp_path / "hf").spec.positions.pairing == "halves"
    ids = torch.arange(20) % VOCAB
    assert (
        off(load_model(tmp_path / "hf")(ids[None])[0].detach(), original.logits(original.weights, ids)) < 1e-5
    )


@pytest.mark.parametrize(("kv_heads", "parts"), [(2, 2), (4, 2), (2, 4), (2, 8), (1, 4)])
def test_kv_heads_split_over_parts_or_copied_to_several(tmp_path, kv_heads, parts):
    original = model(kv_heads)
    stored = split(original.weights, parts, vocab_parallel=True, kv_heads=kv_heads)
    folder = put(tmp_path / "m", stored, n_kv_heads=kv_heads)
    loaded = read_pickled(folder / "consolidated.00.pth", allow_pickle=True)
    assert loaded.spec.kv_heads == kv_heads
    assert all(torch.equal(loaded.weights[name], value) for name, value in original.weights.items())


def test_copies_of_kv_heads_that_differ_are_named(tmp_path):
    stored = split(model(2).weights, 4, vocab_parallel=True, kv_heads=2)
    stored[3]["layers.1.attention.wk.weight"] += 1
    folder = put(tmp_path / "m", stored, n_kv_heads=2)
    with pytest.raises(
        CheckpointError,
        match=r"consolidated\.03\.pth: layers\.1\.attention\.wk\.weight must equal .*02\.pth",
    ):
        read_pickled(folder, allow_pickle=True)
    put(folder, stored)  # without n_kv_heads it is n_heads
    with pytest.raises(
        CheckpointError, match=r"4 parts of .*wk\.weight with 4 rows .* 8 kv heads .* check n_kv_heads"
    ):
        read_pickled(folder, allow_pickle=True)


def norm_differs(parts):
    parts[1]["layers.0.ffn_norm.weight"][0] += 1e-3


def another_dtype(parts):
    parts[1] = {name: value.bfloat16() for name, value in parts[1].items()}


def lacks_one(parts):
    del parts[1]["layers.1.feed_forward.w2.weight"]


def last_is_missing(parts):
    parts.pop()


def odd_tensor(parts):
    for part in parts:
        part["layers.0.attention.wz.weight"] = torch.ones(2, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            norm_differs,
            r"consolidated\.01\.pth: layers\.0\.ffn_norm\.weight must equal .*: they are parts of different models",
        ),
        (
            another_dtype,
            r"consolidated\.01\.pth: .* torch\.bfloat16, but .* torch\.float32 in consolidated\.00",
        ),
        (lacks_one, r"hold different tensors: layers\.1\.feed_forward\.w2\.weight"),
        (last_is_missing, r"parts of .* have width \d+ together, but the norms have 32: parts are missing"),
        (odd_tensor, r"unknown tensor layers\.0\.attention\.wz\.weight"),
    ],
)
def test_parts_that_do_not_belong_together_are_named(tmp_path, change, message):
    stored = split(model().weights, 4, vocab_parallel=False)
    change(stored)
    with pytest.raises(CheckpointError, match=message):
        read_pickled(put(tmp_path / "m", stored), allow_pickle=True)


def test_a_part_that_is_missing_between_others_is_named(tmp_path):
    folder = put(tmp_path / "m", split(model().weights, 4, vocab_parallel=False))
    (folder / "consolidated.02.pth").unlink()
    with pytest.raises(CheckpointError, match=r"has 3 parts, but lacks consolidated\.02\.pth"):
        shard_files(folder)


def test_the_command_refuses_pickles_and_converts_when_told(tmp_path, capsys):
    folder = put(tmp_path / "m", split(model().weights, 2, vocab_parallel=False))
    assert run(["convert", str(folder), str(tmp_path / "hf")]) == 1
    assert "consolidated.00.pth is a pickle" in capsys.readouterr().err
    assert not (tmp_path / "hf").exists()
    assert (
        run(["convert", str(folder), str(tmp_path / "hf"), "--allow-pickle", "--to-pairing", "adjacent"]) == 0
    )
    assert "format: meta -> hf" in capsys.readouterr().out
    assert load_model(tmp_path / "hf").spec.positions.pairing == "adjacent"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_parts_put_together_keep_their_numbers_and_their_dtype(tmp_path, dtype):
    """Rows, columns, replicated tensors, and KV heads that two parts share; read at once, or copied into a target."""
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.randn(4, 4, generator=generator).to(dtype) for _ in range(2))
    parts = [
        {
            "norm.weight": torch.ones(4, dtype=dtype),
            "layers.0.attention.wq.weight": rows[2 * i : 2 * i + 2].contiguous(),
            "layers.0.attention.wo.weight": columns.T[:, 2 * i : 2 * i + 2].contiguous(),
            "layers.0.attention.wk.weight": rows[:2].contiguous(),
        }
        for i in range(2)
    ]
    files = []
    for i, part in enumerate(parts):
        files.append(tmp_path / f"consolidated.{i:02d}.pth")
        torch.save(part, files[-1])
    joined = open_shards(files, heads=2, kv_heads=1, allow_pickle=True)
    expected = {
        "norm.weight": torch.ones(4, dtype=dtype),
        "layers.0.attention.wq.weight": rows,
        "layers.0.attention.wo.weight": columns.T,
        "layers.0.attention.wk.weight": rows[:2],
    }
    assert joined.keys() == expected.keys()
    for name, value in expected.items():
        form = joined.forms[name]
        assert (form.shape, form.dtype) == (tuple(value.shape), dtype)
        assert joined[name].dtype == dtype
        assert torch.equal(joined[name], value)
        target = torch.full(value.shape, 7.0, dtype=dtype)
        joined.copy_into(name, target)
        assert torch.equal(target, value)
