"""GGUF export and import: the same tensors, spec, function and tokenizer; what GGUF cannot express is refused."""

from dataclasses import replace

import pytest
import torch

from headway.api import load
from headway.checkpoints import convert, inspect, load_folder, load_model, save_folder
from headway.checkpoints.formats.gguf.architectures import ARCHITECTURES
from headway.checkpoints.formats.gguf.model import stored_type, without_codes, write_model
from headway.checkpoints.hf.layouts.tensors import exported
from headway.checkpoints.restore import fill
from headway.cli import run
from headway.errors import CheckpointError
from headway.models import ModelSpec
from headway.positions import Rotary
from headway.storage.gguf import read_gguf
from headway.storage.gguf_blocks import BF16, BY_DTYPE, F32, Q4_0, Q8_0, codes, dequantize, quantize
from headway.storage.lazy import Form
from headway.storage.tensors import Tensors
from headway.text import Tokenizer
from tests.checkpoints.gguf_files import BASE, SPECS, weights
from tests.data import data_path
from tests.text.conftest import sentencepiece
from tests.text.folders import TEXTS

FILE = "m.gguf"


def stored_value(name, value, requested):
    """Returns a tensor as a file gives it back."""
    kind = stored_type(name, Form(tuple(value.shape), value.dtype), requested)
    return dequantize(quantize(value, kind), kind)


FILE_TYPES = {None: 0, "BF16": 32, "Q8_0": 7, "Q4_0": 2, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18}  # llama.h


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *((name, None) for name in SPECS),
        *(("qwen3", kind) for kind in (BF16, Q8_0, Q4_0)),
        ("llama, tied, with biases", Q8_0),  # more vectors than matrices
        ("phi3", Q8_0),  # several of our matrices in one of GGUF's
        ("gpt_oss", Q8_0),  # experts, whose biases and router are not packed
        ("qwen3.5", Q8_0),  # heads in another order, some by columns
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, name, asked, monkeypatch):
    """The spec is the same, and every tensor has the bits that its type holds, also if it is copied in pieces."""
    monkeypatch.setattr("headway.checkpoints.formats.gguf.model.PIECE", 1000)
    spec, state = SPECS[name], weights(SPECS[name])
    write_model(tmp_path / FILE, spec, state, asked)
    model = load_folder(tmp_path / FILE)
    assert model.spec == spec
    assert read_gguf(tmp_path / FILE).metadata["general.file_type"] == FILE_TYPES[asked and asked.name]
    types = {name: form.type.name for name, form in model.stored.forms.items()}
    candidates = [f"blk.1.{name}.weight" for name in ("ffn_down", "ffn_down_exps", "ssm_out")]
    down = next(name for name in candidates if name in types)
    assert types[down] == (asked or BY_DTYPE[torch.float32]).name
    assert {kind for name, kind in types.items() if "norm" in name or "bias" in name} <= {"F32"}
    for key, value in state.items():
        if spec.norm_offset and key.endswith("norm.weight") and ".self_attn.norm." not in key:
            value = value + 1 - 1  # the file holds value + 1
        if key.endswith("log_rate"):
            value = value.exp().log()  # the file holds the exponential
        expected = stored_value(key, value, None if key in without_codes(spec) else asked)
        assert torch.equal(model.tensors[key].float(), expected.float())
        target = torch.empty(value.shape)
        model.tensors.copy_into(key, target)
        assert torch.equal(target, expected.float())


@pytest.mark.parametrize("kind", [Q8_0, Q4_0], ids=lambda kind: kind.name)
def test_codes_in_a_file_are_those_of_the_matrix_and_mean_its_numbers(tmp_path, kind):
    spec, state = SPECS["qwen2"], weights(SPECS["qwen2"])
    write_model(tmp_path / FILE, spec, state, kind)
    model, gguf_tensors = load_folder(tmp_path / FILE), exported(ARCHITECTURES["qwen2"].tensors, state, spec)
    for name in ("blk.1.ffn_down.weight", "token_embd.weight"):
        assert torch.equal(model.stored[name], quantize(gguf_tensors[name], kind))
        packed = codes(model.stored[name], kind)
        assert torch.equal(packed.dequantize(), stored_value(name, gguf_tensors[name], kind))
        assert (packed.codes.shape, packed.group) == (gguf_tensors[name].shape, 32)
    with pytest.raises(CheckpointError, match="F32 has no integer codes"):
        codes(model.stored["output_norm.weight"], F32)


def test_a_file_in_bfloat16_runs_in_it_unless_that_rounds_a_norm(tmp_path):
    spec, state = SPECS["llama"], weights(SPECS["llama"], torch.bfloat16)
    write_model(tmp_path / FILE, spec, state, None)
    assert {form.type.name for form in read_gguf(tmp_path / FILE).tensors.values()} == {"F32", "BF16"}
    model = load_model(tmp_path / FILE)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    state["model.norm.weight"] = (
        torch.full_like(state["model.norm.weight"], 1, dtype=torch.float32) + 2.0**-20
    )
    write_model(tmp_path / FILE, spec, state, None)
    assert {p.dtype for p in load_model(tmp_path / FILE).parameters()} == {torch.float32}


def test_no_number_of_a_file_in_float32_is_read_to_open_it(tmp_path, monkeypatch):
    write_model(tmp_path / FILE, SPECS["llama"], weights(SPECS["llama"]), None)
    monkeypatch.setattr(Tensors, "__getitem__", lambda tensors, name: pytest.fail(f"{name} is read"))
    assert {form.dtype for form in load_folder(tmp_path / FILE).tensors.forms.values()} == {torch.float32}


@pytest.mark.parametrize("name", ["qwen3.5", "mamba2", "gemma3"])
def test_a_file_in_bfloat16_runs_in_it_whose_numbers_are_made_of_others(tmp_path, name):
    """The file holds decays -e^rate and factors 1 + w in float32, and the rates and w come back unchanged."""
    spec, state = SPECS[name], weights(SPECS[name], torch.bfloat16)
    write_model(tmp_path / FILE, spec, state, None)
    assert read_gguf(tmp_path / FILE).metadata["general.file_type"] == FILE_TYPES["BF16"]
    if name == "mamba2":
        rate = state["model.layers.0.self_attn.log_rate"].float()
        stored = load_folder(tmp_path / FILE).stored["blk.0.ssm_a"].view(torch.float32)
        assert torch.equal(stored.flatten(), -rate.exp())
    loaded = load_model(tmp_path / FILE).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())


def folder(path, family, pairing="halves", **fields):
    """Saves a transformers folder with a tokenizer of 279 tokens, and returns its path."""
    spec = ModelSpec.of(family, **{**BASE, "vocab": 288, "positions": Rotary(pairing=pairing), **fields})
    tokenizer = sentencepiece().with_chat_template("chatml")
    save_folder(path, fill(spec, weights(spec)), tokenizer=tokenizer, generation={"eos_token_id": [2, 1]})
    return path


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "seed_oss"])
def test_a_folder_to_gguf_and_back_is_the_same_file(tmp_path, family, capsys):
    """`convert` itself compares the logits; weights, tokenizer and end tokens must be as before."""
    start = folder(tmp_path / "0", family)
    assert run(["convert", str(start), str(tmp_path / FILE)]) == 0
    assert "equal" in capsys.readouterr().out
    result = convert(tmp_path / FILE, tmp_path / "1")
    assert ("format", "gguf", "hf") in result.changed
    before, after = load_folder(start), load_folder(tmp_path / "1")
    assert after.spec == before.spec
    assert all(torch.equal(after.tensors[name], before.tensors[name]) for name in before.tensors)
    assert after.generation["eos_token_id"] == [2, 1]
    old, new = Tokenizer.load(start), Tokenizer.load(tmp_path / "1")
    for text in (*TEXTS, "<s> the cat</s>", "the cats"):
        assert new.encode(text) == old.encode(text)
        assert new.encode(text, special=True) == old.encode(text, special=True)
    chat = [{"role": "user", "content": "the cat </s>"}]
    assert new.render_chat(chat) == old.render_chat(chat)


def test_pairing_llama_s_queries_lie_in_adjacent_pairs(tmp_path):
    """The file has the rows of Meta's files; with rows in halves it would be another function."""
    start = folder(tmp_path / "0", "llama")
    convert(start, tmp_path / FILE)
    convert(start, tmp_path / "adjacent", to_pairing="adjacent")
    raw, adjacent = load_folder(tmp_path / FILE), load_folder(tmp_path / "adjacent").tensors
    assert raw.spec.positions.pairing == "adjacent"
    for part in "qk":
        theirs = raw.stored[f"blk.1.attn_{part}.weight"]
        assert torch.equal(theirs, adjacent[f"model.layers.1.self_attn.{part}_proj.weight"])
        assert not torch.equal(
            theirs, load_folder(start).tensors[f"model.layers.1.self_attn.{part}_proj.weight"]
        )


@pytest.mark.parametrize("dtype", ["bf16", "q8_0", "q4_0"])
def test_convert_writes_types_and_says_what_rounding_changed(tmp_path, dtype, capsys):
    start = folder(tmp_path / "0", "mistral", hidden=80)
    arguments = ["convert", str(start), str(tmp_path / FILE), "--to", "gguf", "--dtype", dtype]
    assert run(arguments) == 0
    printed = capsys.readouterr().out
    assert "logits by up to" in printed
    file = read_gguf(tmp_path / FILE)
    kinds = {name: form.type.name.lower() for name, form in file.tensors.items()}
    assert file.metadata["general.file_type"] == FILE_TYPES[dtype.upper()]
    assert kinds["blk.0.attn_q.weight"] == dtype
    unaligned, our_name = (
        "blk.0.ffn_down.weight",
        "model.layers.0.mlp.down_proj.weight",
    )  # rows of 80 are not blocks of 32
    assert (kinds[unaligned] == dtype, our_name in printed) == (
        (True, False) if dtype == "bf16" else (False, True)
    )
    report = inspect(tmp_path / FILE)
    assert report["tokenizer"]["tokens"] == 279
    assert report["tokenizer"]["chat_template"]
    assert report["stored_dtypes"][dtype.upper()] == len([name for name in kinds if kinds[name] == dtype])
    assert run(["inspect", str(tmp_path / FILE)]) == 0
    assert "pairing adjacent (GGUF's llama rotates adjacent pairs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "own", "ends"),
    [
        ([5, 2], True, [2, 5]),
        ([5, 4], True, [2, 5, 4]),
        (7, True, [2, 7]),
        (None, True, 2),
        (2, True, 2),
        (7, False, 7),
        ([7, 5], False, [7, 5]),
        (None, False, None),
    ],
)
def test_the_tokenizer_s_own_end_is_the_first_of_those_that_end_a_text(tmp_path, given, own, ends):
    spec = ModelSpec.of("qwen2", **{**BASE, "vocab": 288})
    tokenizer = sentencepiece().gguf_metadata(288) if own else None
    generation = {} if given is None else {"eos_token_id": given}
    write_model(tmp_path / FILE, spec, weights(spec), None, tokenizer=tokenizer, generation=generation)
    assert load_folder(tmp_path / FILE).generation.get("eos_token_id") == ends


def test_more_ends_of_a_text_than_gguf_has_keys_for_are_refused(tmp_path):
    spec, generation = SPECS["qwen2"], {"eos_token_id": [2, 7, 8, 9]}
    with pytest.raises(CheckpointError, match=r"eos_token_id has 4 tokens \(\[2, 7, 8, 9\]"):
        write_model(tmp_path / FILE, spec, weights(spec), None, generation=generation)


def test_generate_runs_a_file(tmp_path, capsys):
    """It prints the same text as for the folder."""
    start = folder(tmp_path / "0", "llama")
    convert(start, tmp_path / FILE)
    texts = []
    for model in (start, tmp_path / FILE):
        assert run(["generate", str(model), "the cat", "-t", "0", "--max-new-tokens", "8"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    assert load(tmp_path / FILE).generation["eos_token_id"] == [2, 1]


def test_a_target_that_is_there_or_differs_is_left_as_it_was(tmp_path, monkeypatch):
    start = folder(tmp_path / "0", "llama")
    (tmp_path / FILE).write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="exists"):
        convert(start, tmp_path / FILE)
    from headway.checkpoints import rewriting

    monkeypatch.setattr(rewriting, "change_pairing", lambda state, spec, to: (
        state, replace(spec, positions=replace(spec.positions, pairing=to))))  # fmt: skip
    with pytest.raises(CheckpointError, match="its conversion differ"):
        convert(start, tmp_path / FILE, overwrite=True)
    assert (tmp_path / FILE).read_bytes() == b"mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["0", FILE]


def test_parts_of_one_matrix_have_codes_of_one_type(tmp_path):
    packed = {"model.layers.0.self_attn.q_proj.weight": Q8_0}
    with pytest.raises(CheckpointError, match=r"blk.0.attn_qkv.weight is one matrix in GGUF, but its parts"):
        write_model(tmp_path / FILE, SPECS["phi3"], weights(SPECS["phi3"]), None, packed=packed)


def test_stories260K_is_the_same_function_in_gguf(tmp_path):
    """Compares the published weights of llama2.c, run by Meta's plain forward pass, with the file; in int8 the greedy
    text stays the same."""
    home = data_path("weights/stories260K")
    tokenizer = Tokenizer.load(home / "tok512.bin")
    result = convert(home / "stories260K.bin", tmp_path / FILE, tokenizer=tokenizer)
    assert (("format", "llama2c", "gguf") in result.changed, result.rounding) == (True, None)
    assert result.differences[0].passed
    convert(home / "stories260K.bin", tmp_path / "q.gguf", tokenizer=tokenizer, dtype="q8_0")
    plain, packed = (load(tmp_path / name, task="causal-lm") for name in (FILE, "q.gguf"))
    text = plain.generate("Once upon a time", temperature=0, max_new_tokens=40).text
    assert packed.generate("Once upon a time", temperature=0, max_new_tokens=40).text == text
    assert plain.tokenizer.encode("Once upon a time") == tokenizer.encode("Once upon a time")
