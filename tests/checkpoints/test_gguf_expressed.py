"""What GGUF has no keys for: refused by name, or within the matrices."""

from dataclasses import replace

import pytest
import torch

from headway.checkpoints import convert, load_folder, save_folder
from headway.checkpoints.formats.gguf.metadata import write_spec
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.formats.gguf.writer import write_gguf
from headway.checkpoints.restore import fill
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec
from headway.models.mixers import Softmax
from headway.nn.altup import AltUp
from headway.patterns import Causal, Sink, Window
from headway.positions import DynamicNTK, Llama3, NoPositions, YaRN
from headway.storage.gguf import read_gguf
from tests.checkpoints.gguf_files import BASE, FACTORED, NANO, NEMOTRON, SPECS, SSD, THREE_N, rotary, weights

FILE = "m.gguf"


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {"positions": NoPositions()}, "positions"),
        ("llama", rotary("adjacent", scaling=DynamicNTK(2.0, 2048)), r"rotary scaling \(DynamicNTK\)"),
        ("llama", rotary("adjacent", scaling=YaRN(4.0, 2048, truncate=False)), "positions"),
        ("llama", rotary("adjacent", scaling=Llama3(8.0, 2.0, 5.0, 8192)), "positions"),
        ("llama", {**rotary("adjacent"), "patterns": (Window.last(8), Causal())}, "windows"),
        ("llama", {**rotary("adjacent"), "patterns": Causal() & (Sink(2) | Window.last(8))}, "patterns"),
        ("llama", {**rotary("adjacent"), "activation": "gelu"}, "activation"),
        ("qwen3", {**rotary("halves"), "mlp_bias": True}, "mlp_bias"),
        ("llama", rotary("halves"), "positions"),
        ("opt", {"kv_heads": 4}, "has no architecture in GGUF"),
        ("smollm3", {"layers": 4, **rotary("adjacent")}, "positions"),
        ("cohere", {"tied": False}, "tied"),
        ("cohere2", {"layers": 4, "patterns": Causal(), **rotary("adjacent")}, "positions"),
        ("nemotron_h", {**NEMOTRON, "mixers": (replace(SSD, least_step=0.001), Softmax())}, "time_step_min"),
        ("nemotron_h", {**NEMOTRON, "experts": (None, NANO)}, "experts"),
        ("nemotron_h", {**NEMOTRON, "experts": replace(NANO, hidden=96, shared=0)}, "experts"),
        ("nemotron_h", {**NEMOTRON, "mixers": Softmax()}, "mixers"),
        ("gemma3n_text", {**THREE_N, "laurel": 8}, "laurel"),
        ("gemma3n_text", {**THREE_N, "per_layer_embedding": 8}, "per_layer_embedding"),
        ("gemma3n_text", {**THREE_N, "altup": AltUp(streams=3)}, "altup"),
        ("gemma3n_text", {**THREE_N, "mlp_sparsity": 0.0}, "mlp_sparsity"),
        ("gemma3n_text", {**THREE_N, "layer_hidden": (96, *(90,) * 21)}, "layer_hidden"),
        ("gemma3n_text", {**THREE_N, "logit_cap": None}, "logit_cap"),
        ("gemma3n_text", {**THREE_N, "mixers": Softmax(v_norm=True)}, "mixers"),
        ("gemma3n_text", {**THREE_N, "patterns": Causal(), "mixers": Softmax(v_norm=True)}, "patterns"),
    ],
)
def test_what_gguf_cannot_say_is_refused_by_name(family, fields, message):
    with pytest.raises(ConfigError, match=message):
        write_spec(ModelSpec.of(family, **{**BASE, **fields}))


@pytest.mark.parametrize("dtype", [None, "q8_0", torch.bfloat16])
def test_factors_of_falcon_h1_are_within_the_matrices(tmp_path, dtype):
    """Logits are compared on the way, and what is read back has the same function without a factor."""
    spec = FACTORED["falcon-h1, factors"]
    save_folder(tmp_path / "0", fill(spec, weights(spec)))
    convert(tmp_path / "0", tmp_path / FILE, dtype=dtype)
    again = load_folder(tmp_path / FILE)
    plain = SPECS["falcon-h1"]
    assert again.spec == plain
    assert again.spec != spec
    kinds = {name: form.type.name for name, form in read_gguf(tmp_path / FILE).tensors.items()}
    wanted = {None: "F32", "q8_0": "Q8_0", torch.bfloat16: "BF16"}[dtype]
    assert {kinds[f"blk.1.{name}.weight"] for name in ("ssm_in", "attn_k", "ffn_down")} == {wanted}
    with pytest.raises(ConfigError, match="falcon-h1 cannot express the logit_scale of this falcon_h1"):
        write_spec(replace(spec, tied=True))
    write_spec(replace(spec, tied=True, logit_scale=3.0))


def test_ids_that_share_a_row_by_layer_have_copies_of_it(tmp_path):
    """Logits are compared on the way."""
    spec = replace(SPECS["gemma3n"], per_layer_vocab=40)
    save_folder(tmp_path / "0", fill(spec, weights(spec)))
    convert(tmp_path / "0", tmp_path / FILE)
    again = load_folder(tmp_path / FILE)
    assert again.spec == SPECS["gemma3n"]
    rows = again.tensors["model.per_layer.embed_tokens.weight"]
    assert torch.equal(rows[:40], weights(spec)["model.per_layer.embed_tokens.weight"])
    assert torch.equal(rows[40:], rows[:1].expand(30, -1))


def test_numbers_that_llama_cpp_has_fixed_are_checked(tmp_path):
    """Keys of a Gemma 3n that say otherwise are refused by name."""
    wrong = {"attention.shared_kv_layers": 3, "activation_sparsity_scale": [0.0] * 22, "altup.num_inputs": 2}
    write_model(tmp_path / FILE, SPECS["gemma3n"], weights(SPECS["gemma3n"]), None)
    file, stored = read_gguf(tmp_path / FILE), load_folder(tmp_path / FILE).stored
    types = {name: form.type for name, form in file.tensors.items()}
    plain = (str, int, float, bool)
    metadata = {key: v if isinstance(v, plain) else list(v) for key, v in file.metadata.items()}
    for key, value in wrong.items():
        write_gguf(tmp_path / "w.gguf", {**metadata, f"gemma3n.{key}": value}, stored, types)
        with pytest.raises(CheckpointError, match=key):
            load_folder(tmp_path / "w.gguf")
