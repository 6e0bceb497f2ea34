"""What GGUF has no keys for is refused by name, or folded into the matrices."""

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
from tests.checkpoints.gguf_files import (
    BASE,
    FACTORED,
    FOUR_DENSE,
    FOUR_E,
    NANO,
    NEMOTRON,
    SPECS,
    SSD,
    THREE_N,
    rotary,
    weights,
)

FILE = "m.gguf"
TURNED = {
    **BASE,
    "layers": 4,
    "patterns": (Causal(), Window.last(6)),
    **rotary("halves"),
    "mixers": (*(Softmax(v_norm=True),) * 2, Softmax(kv_from=0), Softmax(kv_from=1)),
}
"""A last layer that shares the keys of a layer with a window; Gemma 4 has windows before the layer without one."""


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
        ("opt", {"kv_heads": 4}, "cannot be written as GGUF"),
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
        ("gemma4_text", {**FOUR_E, "layer_hidden": (0, 192, *(0,) * 4)}, "layer_hidden"),
        ("gemma4_text", TURNED, "patterns"),
        (
            "gemma4_text",
            {**FOUR_DENSE, "layers": 6, "mixers": (*(Softmax(),) * 5, FOUR_DENSE["mixers"][5])},
            "mixers",
        ),
        (
            "gemma4_text",
            {**FOUR_DENSE, "mixers": (Softmax(v_norm=True, head_dim=8), *FOUR_DENSE["mixers"][1:])},
            "mixers",
        ),
        ("gemma4_text", {**FOUR_DENSE, "qkv_bias": True}, "qkv_bias"),
        ("gemma4_text", {**FOUR_DENSE, "layer_scalar": False}, "layer_scalar"),
    ],
)
def test_what_gguf_cannot_say_is_refused_by_name(family, fields, message):
    with pytest.raises(ConfigError, match=message):
        write_spec(ModelSpec.of(family, **{**BASE, **fields}))


@pytest.mark.parametrize("dtype", [None, "q8_0", torch.bfloat16])
def test_factors_of_falcon_h1_are_within_the_matrices(tmp_path, dtype):
    """`convert` compares the logits; the file is read back as the same function without factors."""
    spec = FACTORED["falcon-h1, factors"]
    save_folder(tmp_path / "0", fill(spec, weights(spec)))
    convert(tmp_path / "0", tmp_path / FILE, dtype=dtype)
    loaded = load_folder(tmp_path / FILE)
    unscaled = SPECS["falcon-h1"]
    assert loaded.spec == unscaled
    assert loaded.spec != spec
    kinds = {name: form.type.name for name, form in read_gguf(tmp_path / FILE).tensors.items()}
    expected = {None: "F32", "q8_0": "Q8_0", torch.bfloat16: "BF16"}[dtype]
    assert {kinds[f"blk.1.{name}.weight"] for name in ("ssm_in", "attn_k", "ffn_down")} == {expected}
    with pytest.raises(ConfigError, match="falcon-h1 cannot express the logit_scale of this falcon_h1"):
        write_spec(replace(spec, tied=True))
    write_spec(replace(spec, tied=True, logit_scale=3.0))


def test_ids_that_share_a_row_by_layer_have_copies_of_it(tmp_path):
    """`convert` compares the logits."""
    spec = replace(SPECS["gemma3n"], per_layer_vocab=40)
    save_folder(tmp_path / "0", fill(spec, weights(spec)))
    convert(tmp_path / "0", tmp_path / FILE)
    loaded = load_folder(tmp_path / FILE)
    assert loaded.spec == SPECS["gemma3n"]
    rows = loaded.tensors["model.per_layer.embed_tokens.weight"]
    assert torch.equal(rows[:40], weights(spec)["model.per_layer.embed_tokens.weight"])
    assert torch.equal(rows[40:], rows[:1].expand(30, -1))


def test_numbers_that_llama_cpp_has_fixed_are_checked(tmp_path):
    """Keys of a Gemma 3n that say otherwise are refused by name; so are layer sizes that Gemma 4 does not have."""
    wrong = {"attention.shared_kv_layers": 3, "activation_sparsity_scale": [0.0] * 22, "altup.num_inputs": 2}
    _refused(tmp_path, "gemma3n", "gemma3n", wrong)
    wrong = {
        "attention.shared_kv_layers": 2,
        "attention.value_length_swa": 8,
        "attention.key_length_swa": 16,
        "feed_forward_length": [96, 96, 96, 96, 192, 192],
        "attention.head_count_kv": [2, 2],
    }
    _refused(tmp_path, "gemma4, e", "gemma4", wrong)


def test_no_cap_is_said_since_llama_cpp_has_one_where_no_key_says(tmp_path):
    spec = replace(SPECS["gemma4"], logit_cap=None)
    write_model(tmp_path / FILE, spec, weights(spec), None)
    assert read_gguf(tmp_path / FILE).metadata["gemma4.final_logit_softcapping"] == 0.0
    assert load_folder(tmp_path / FILE).spec == spec


def _refused(tmp_path, name, architecture, wrong):
    write_model(tmp_path / FILE, SPECS[name], weights(SPECS[name]), None)
    file, stored = read_gguf(tmp_path / FILE), load_folder(tmp_path / FILE).stored
    types = {name: form.type for name, form in file.tensors.items()}
    scalars = (str, int, float, bool)
    metadata = {key: item if isinstance(item, scalars) else list(item) for key, item in file.metadata.items()}
    for key, value in wrong.items():
        write_gguf(tmp_path / "w.gguf", {**metadata, f"{architecture}.{key}": value}, stored, types)
        with pytest.raises(CheckpointError, match=key):
            load_folder(tmp_path / "w.gguf")
