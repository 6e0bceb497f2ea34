"""Metadata of GGUF files: errors name the key, and absent keys have llama.cpp's defaults."""

import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.checkpoints import load_folder
from headway.checkpoints.formats.gguf.metadata import write_spec
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.formats.gguf.rope import decimal, read_rope
from headway.checkpoints.formats.gguf.writer import write_gguf
from headway.checkpoints.hf.config_keys import ConfigReader
from headway.errors import CheckpointError, ConfigError
from headway.models import ModelSpec
from headway.patterns import Causal, Window
from headway.positions import NoPositions, Rotary
from headway.storage.gguf import read_gguf
from tests.checkpoints.gguf_files import BASE, SPECS, rotary, weights

FILE = "m.gguf"


def changed_file(path, change, spec="llama"):
    """Writes a file whose metadata `change` has changed, and returns its path."""
    write_model(path, SPECS[spec], weights(SPECS[spec]), None)
    file = read_gguf(path)
    metadata = dict(file.metadata)
    change(metadata)
    stored = load_folder(path).stored
    write_gguf(path, metadata, stored, {name: form.type for name, form in file.tensors.items()})
    return path


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("general.architecture", "t5", r"there is no general.architecture 't5'"),
        ("llama.block_count", None, 'lacks "llama.block_count"'),
        ("llama.block_count", "2", '"llama.block_count" must be a positive whole number'),
        ("llama.block_count", 3, "missing: blk.2.attn_norm.weight"),
        ("llama.block_count", 2**31 - 1, "at most 10,000"),
        ("llama.expert_count", 8, 'lacks "llama.expert_used_count"'),
        ("llama.attention.causal", False, '"llama.attention.causal" is False, which is unsupported'),
        ("llama.vocab_size", 71, "vocab_size is 71, but token_embd.weight has 70 rows"),
        (
            "llama.attention.value_length",
            16,
            "key_length and attention.value_length must be equal, got 16 and 32",
        ),
        ("llama.rope.dimension_count", 64, "rope.dimension_count is 64, but a head has only 32 dims"),
        ("llama.rope.scaling.type", "longrope", "rotary scaling of type 'longrope'"),
        ("llama.rope.scaling.yarn_beta_fast", 16.0, "applies to yarn only, but rope.scaling.type is 'none'"),
        ("llama.attention.head_count", 6, "shape: blk.0.attn_q.weight"),
        ("llama.attention.head_count", 5, "kv_heads"),
        ("headway.familly", "llama", "headway has no key 'familly'"),
        ("split.count", 3, "one of 3 parts"),
        ("tokenizer.ggml.eos_token_id", -1.0, 'eos_token_id" must be a whole number'),
    ],
)
def test_metadata_that_is_wrong_is_named(tmp_path, key, value, message):
    def change(metadata):
        metadata.pop(key, None)
        metadata.update({} if value is None else {key: value})

    path = changed_file(tmp_path / FILE, change)
    with pytest.raises((CheckpointError, ConfigError), match=message) as error:
        load_folder(path)
    assert str(path) in str(error.value)


def test_the_file_may_say_which_layers_have_windows(tmp_path):
    window, key = Window.last(6), "gemma2.attention.sliding_window_pattern"
    for value, patterns in (
        ([1, 0], (window, Causal())),
        ([0, 1], (Causal(), window)),
        (1, (Causal(), Causal())),
    ):
        path = changed_file(
            tmp_path / FILE, lambda metadata, value=value: metadata.update({key: value}), "gemma2"
        )
        assert load_folder(path).spec.patterns == patterns
    path = changed_file(tmp_path / FILE, lambda metadata: metadata.update({key: [1]}), "gemma2")
    with pytest.raises(CheckpointError, match="a truth value for each of 2 layers"):
        load_folder(path)


def test_scores_of_gemma_2_with_27b_have_a_factor_of_their_own():
    fields = {**BASE, **rotary("halves"), "layers": 46, "patterns": (Window.last(6), Causal())}
    write_spec(ModelSpec.of("gemma2", **fields, attention_scale=16**-0.5))
    with pytest.raises(ConfigError, match="attention_scale"):
        write_spec(ModelSpec.of("gemma2", **fields))


def test_a_granite_may_have_no_positions(tmp_path):
    """llama.cpp's key for that is rope.scaling.finetuned."""
    spec = replace(SPECS["granite"], positions=NoPositions())
    write_model(tmp_path / FILE, spec, weights(spec), None)
    assert read_gguf(tmp_path / FILE).metadata["granite.rope.scaling.finetuned"] is False
    assert load_folder(tmp_path / FILE).spec == spec


def test_old_keys_of_rotary_scaling_mean_the_same(tmp_path):
    """rope.scale_linear, and a factor without a type, mean linear scaling (as in llama.cpp's reader)."""
    expected = SPECS["llama, interpolated"].positions

    def old(metadata):
        metadata["llama.rope.scale_linear"] = 4.0

    def untyped(metadata):
        metadata["llama.rope.scaling.factor"] = 4.0

    for change in (old, untyped):
        assert load_folder(changed_file(tmp_path / FILE, change)).spec.positions == expected


@given(st.floats(1e-30, 1e30))
def test_numbers_of_32_bits_are_read_as_they_were_written_in_decimal(value):
    short = float(f"{value:.6g}")
    stored = struct.unpack("<f", struct.pack("<f", short))[0]
    assert decimal(stored) == short


def test_rotation_of_a_file_that_says_nothing_of_it_is_that_of_llama():
    """llama.cpp's defaults are a base of 10000 and all dims of a head."""
    assert read_rope(ConfigReader({}, {}, "llama."), 16, "adjacent", None) == Rotary(
        10000.0, pairing="adjacent"
    )
