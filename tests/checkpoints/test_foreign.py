"""llama2.c's and Meta's files: read to the last byte, equal to their own forward pass; bad ones are reported."""

import json
import shutil
import struct

import pytest
import torch

import headway
from headway.checkpoints import convert, load_folder, load_model
from headway.checkpoints.formats import llama2c
from headway.checkpoints.formats.meta import NAMES, MetaModel, read_pickled
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.restore import fill
from headway.cli import run
from headway.errors import CheckpointError
from headway.models import Head, ModelSpec, build
from headway.positions import Llama3, Rotary
from tests.checkpoints.hf import off
from tests.data import data_path

M, F, L, H, K, V, N = 12, 20, 2, 3, 1, 17, 10


def bin_file(path, *, shared=True, theta=10000.0, **header):
    """Writes a version-0 file in the order of run.c's memory_map_weights; returns its weights under Meta's names."""
    g = torch.Generator().manual_seed(0)
    weights: dict[str, torch.Tensor] = {}
    body = []

    def put(name, *shape):
        value = torch.randn(shape, generator=g) * 0.3 + ("norm" in name)
        body.append(value)
        for i in range(L if "#" in name else 0):
            weights[name.replace("#", str(i))] = value[i]
        if "#" not in name:
            weights[name] = value

    d = M // H
    put("tok_embeddings.weight", V, M)
    put("layers.#.attention_norm.weight", L, M)
    put("layers.#.attention.wq.weight", L, H * d, M)
    put("layers.#.attention.wk.weight", L, K * d, M)
    put("layers.#.attention.wv.weight", L, K * d, M)
    put("layers.#.attention.wo.weight", L, M, H * d)
    put("layers.#.ffn_norm.weight", L, M)
    put("layers.#.feed_forward.w1.weight", L, F, M)
    put("layers.#.feed_forward.w2.weight", L, M, F)
    put("layers.#.feed_forward.w3.weight", L, F, M)
    put("norm.weight", M)
    angles = torch.outer(torch.arange(N), theta ** -(torch.arange(0, d, 2) / d))
    body += [angles.cos(), angles.sin()]
    if not shared:
        put("output.weight", V, M)
    sizes = {
        "dim": M,
        "hidden": F,
        "layers": L,
        "heads": H,
        "kv": K,
        "vocab": V if shared else -V,
        "context": N,
    } | header
    path.write_bytes(
        struct.pack("<7i", *sizes.values()) + b"".join(block.numpy().tobytes() for block in body)
    )
    return weights


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_of_llama2c_is_read_to_its_last_byte(tmp_path, shared):
    weights = bin_file(tmp_path / "m.bin", shared=shared)
    model = llama2c.read(tmp_path / "m.bin")
    assert model.weights.keys() == weights.keys()
    assert all(torch.equal(model.weights[name], weights[name]) for name in weights)
    assert model.spec.tied == shared
    assert model.spec.trained_context == N
    ids = torch.arange(N) % V
    assert off(fill(model.spec, model.state())(ids[None])[0].detach(), model.logits(weights, ids)) < 1e-5
    result = convert(tmp_path / "m.bin", tmp_path / "hf")
    assert ("format", "llama2c", "hf") in result.changed
    assert load_folder(tmp_path / "hf").spec.positions.pairing == "halves"
    assert off(load_model(tmp_path / "hf")(ids[None])[0].detach(), model.logits(weights, ids)) < 1e-5


def test_every_format_is_opened_as_a_folder_is(tmp_path, capsys):
    """Whatever takes a model opens it; the format's own forward pass is the reference."""
    weights = bin_file(tmp_path / "m.bin")
    folder, ids = load_folder(tmp_path / "m.bin"), torch.arange(N) % V
    assert (folder.format, folder.home, folder.stored.keys()) == ("llama2c", None, weights.keys())
    model = headway.load(tmp_path / "m.bin", task="causal-lm")
    expected = llama2c.read(tmp_path / "m.bin").logits(weights, ids)
    assert off(model.model(ids[None])[0].detach(), expected) < 1e-5
    assert (model.tokenizer, model.eos) == (None, (1, 2))
    assert run(["inspect", str(tmp_path / "m.bin")]) == 0
    assert "pairing adjacent (llama2c rotates adjacent pairs)" in capsys.readouterr().out
    assert run(["surgery", "window", str(tmp_path / "m.bin"), str(tmp_path / "n"), "--window", "4"]) == 0
    assert "format: llama2c -> hf" in capsys.readouterr().out
    with pytest.raises(CheckpointError, match="is of format 'llama2c', not 'gguf' as requested"):
        load_folder(tmp_path / "m.bin", frm="gguf")
    with pytest.raises(CheckpointError, match="unknown format 'onnx'"):
        load_folder(tmp_path / "m.bin", frm="onnx")
    with pytest.raises(CheckpointError, match="holds a decoder, whose head is 'lm', not 'states'"):
        load_folder(tmp_path / "m.bin", head=Head("states"))


def test_bad_files_of_llama2c(tmp_path):
    path = tmp_path / "m.bin"
    bin_file(path)
    raw = path.read_bytes()
    for n in (5, 27, 28, len(raw) - 1):
        path.write_bytes(raw[:n])
        with pytest.raises(CheckpointError, match="truncated"):
            llama2c.read(path)
    path.write_bytes(raw + b"\0")
    with pytest.raises(CheckpointError, match="too long"):
        llama2c.read(path)
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match="empty"):
        llama2c.read(path)
    path.write_bytes(struct.pack("<II", 0x616B3432, 2) + raw)
    with pytest.raises(CheckpointError, match="version 2; only version 0"):
        llama2c.read(path)
    bin_file(path, heads=5)
    with pytest.raises(CheckpointError, match=r"not a llama2.c file"):
        llama2c.read(path)
    bin_file(path, theta=5000.0)
    with pytest.raises(CheckpointError, match=r"rotary angles differ by .* from theta 10000"):
        llama2c.read(path)


def meta_weights(spec: ModelSpec) -> dict[str, torch.Tensor]:
    state = build(spec, seed=0).state_dict()
    return {
        name: value + torch.randn(value.shape) * 0.2 for name, value in exported(NAMES, state, spec).items()
    }


@pytest.fixture
def meta_spec():
    positions = Rotary(500.0, pairing="adjacent")
    return ModelSpec.of("llama", vocab=V, width=M, layers=L, heads=H, kv_heads=K, hidden=F, init_std=0.3,
                        positions=positions, norm_eps=1e-5, max_context=2048)  # fmt: skip


def test_a_pickle_of_meta(tmp_path, meta_spec):
    weights = meta_weights(meta_spec)
    torch.save({**weights, "rope.freqs": torch.ones(2)}, tmp_path / "consolidated.00.pth")
    (tmp_path / "params.json").write_text(
        json.dumps({"n_heads": H, "norm_eps": 1e-5, "rope_theta": 500.0, "vocab_size": -1})
    )
    with pytest.raises(CheckpointError, match="--allow-pickle"):
        convert(tmp_path, tmp_path / "hf")
    result = convert(tmp_path, tmp_path / "hf", allow_pickle=True)
    assert ("format", "meta", "hf") in result.changed
    assert load_folder(tmp_path / "hf").spec.positions.pairing == "halves"
    ids = torch.arange(N) % V
    expected = MetaModel(meta_spec, weights, tmp_path).logits(weights, ids)
    assert off(load_model(tmp_path / "hf")(ids[None])[0].detach(), expected) < 1e-5


def test_params_that_contradict_or_are_unknown(tmp_path, meta_spec):
    torch.save(meta_weights(meta_spec), tmp_path / "m.pth")

    def read(**params):
        (tmp_path / "params.json").write_text(json.dumps(params))
        return dict(read_pickled(tmp_path / "m.pth", allow_pickle=True).state())

    with pytest.raises(
        CheckpointError, match=r"the tensors do not give the number of heads; put a params\.json"
    ):
        read()
    with pytest.raises(CheckpointError, match=r"n_heads 5 of params\.json does not fit"):
        read(n_heads=5)
    with pytest.raises(CheckpointError, match="has n_layers 3, but the tensors have 2"):
        read(n_heads=3, n_layers=3)
    with pytest.raises(CheckpointError, match=r'unknown key "n_head".*did you mean .n_heads'):
        read(n_head=3)
    (tmp_path / "params.json").write_text(json.dumps({"n_heads": 3, "use_scaled_rope": True}))
    spec = read_pickled(tmp_path / "m.pth", allow_pickle=True).spec
    assert spec.positions.scaling == Llama3(8.0, 1.0, 4.0, 8192)
    weights = meta_weights(meta_spec)
    torch.save({**weights, "layers.0.attention.wz.weight": torch.ones(1)}, tmp_path / "m.pth")
    with pytest.raises(CheckpointError, match=r"unexpected: layers.0.attention.wz.weight .did you mean"):
        read(n_heads=3)
    for lost in ("layers.1.attention.wk.weight", "layers.0.attention.wk.weight"):
        torch.save({name: value for name, value in weights.items() if name != lost}, tmp_path / "m.pth")
        with pytest.raises(CheckpointError, match=rf"missing: {lost}|{lost} is missing"):
            read(n_heads=3)


def test_a_published_pickle(tmp_path):
    shutil.copy(data_path("weights/torchtune_tiny_llama2/tiny_fair_checkpoint.pt"), tmp_path / "m.pt")
    (tmp_path / "params.json").write_text('{"n_heads": 4}')
    result = convert(tmp_path / "m.pt", tmp_path / "hf", allow_pickle=True)
    assert ("format", "meta", "hf") in result.changed
    assert all(check.passed for check in result.differences)
    assert result.after.parameters == 89_504
