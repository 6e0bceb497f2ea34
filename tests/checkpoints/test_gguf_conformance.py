"""GGUF against other implementations: the gguf package's numbers and reader, and llama.cpp's logits and ids."""

from array import array

import numpy
import pytest
import torch

from headway.checkpoints import convert, load_model
from headway.checkpoints.formats.gguf.model import write_model
from headway.checkpoints.formats.gguf.writer import write_gguf
from headway.storage.gguf import read_gguf
from headway.storage.gguf_blocks import BF16, F32, Q4_0, Q8_0, quantize
from headway.text import Tokenizer
from tests.checkpoints.gguf_files import SPECS, weights
from tests.checkpoints.hf import off
from tests.data import data_path
from tests.text.folders import TEXTS

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", [BF16, Q8_0, Q4_0], ids=lambda kind: kind.name)
def test_packed_bytes_are_those_of_the_gguf_package(kind):
    import gguf

    g = torch.Generator().manual_seed(0)
    x = torch.randn(256, 256, generator=g) * torch.logspace(-3, 3, 256)[:, None]
    x[3], x[4, :8] = 0, torch.tensor([1, -1, 5, -5, 5, -5, 2.5, -2.5])
    x = torch.cat((x, x.round() / 2, x.bfloat16().float()))
    theirs = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType(kind.number))
    assert numpy.array_equal(quantize(x, kind).view(torch.uint8).numpy(), theirs)


@pytest.mark.parametrize("name", SPECS)
def test_the_gguf_package_reads_our_files(tmp_path, name):
    import gguf

    write_model(tmp_path / "m.gguf", SPECS[name], weights(SPECS[name]), Q8_0)
    ours, theirs = read_gguf(tmp_path / "m.gguf"), gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert fields == {
        key: list(value) if isinstance(value, array) else value for key, value in ours.metadata.items()
    }
    for tensor in theirs.tensors:
        entry = ours.tensors[tensor.name]
        assert tuple(reversed(tensor.shape.tolist())) == entry.numbers
        assert (tensor.data_offset, tensor.n_bytes, int(tensor.tensor_type)) == (
            entry.at,
            entry.nbytes,
            entry.type.number,
        )


def test_we_read_the_gguf_package_s_files(tmp_path):
    """The file has values of several kinds, and another alignment."""
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_bool("b", True)
    writer.add_int8("i", -3)
    writer.add_float64("f", 1e-300)
    writer.add_array("texts", ["a", "猫"])
    writer.add_array("numbers", [1, -2])
    values = numpy.arange(96, dtype=numpy.float32).reshape(3, 32)
    writer.add_tensor("t", values)
    writer.add_tensor(
        "q",
        gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0),
        raw_dtype=gguf.GGMLQuantizationType.Q8_0,
    )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    assert file.metadata["general.architecture"] == "llama"
    assert (file.metadata["b"], file.metadata["i"], file.metadata["f"]) == (True, -3, 1e-300)
    assert (file.metadata["texts"], list(file.metadata["numbers"])) == (["a", "猫"], [1, -2])
    assert {name: entry.numbers for name, entry in file.tensors.items()} == {"t": (3, 32), "q": (3, 32)}
    write_gguf(tmp_path / "2.gguf", {"a": [1.5, 2.5]}, {"t": torch.from_numpy(values)}, {"t": Q4_0})
    assert gguf.GGUFReader(tmp_path / "2.gguf").fields["a"].contents() == [1.5, 2.5]


@pytest.mark.peers
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen2", "smollm3", "ernie4_5", "seed_oss", "cohere", "cohere2"),
        *("mixtral", "qwen3_moe", "gpt_oss"),
    ],
)
def test_llama_cpp_s_logits_are_ours_in_every_architecture(tmp_path, name):
    import llama_cpp as llama

    write_model(tmp_path / "m.gguf", SPECS[name], weights(SPECS[name]), F32)
    model = load_model(tmp_path / "m.gguf")
    theirs = llama.Llama(
        str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, verbose=False, n_gpu_layers=0, type_k=0, type_v=0
    )
    ids = torch.randint(0, 70, (24,), generator=torch.Generator().manual_seed(0))
    theirs.eval(ids.tolist())
    with torch.no_grad():
        assert off(torch.tensor(numpy.array(theirs.scores[:24])), model(ids[None])[0]) < 1e-4


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["bfloat16", "q8_0", "q4_0"])
def test_llama_cpp_runs_our_files(tmp_path, dtype):
    """Logits must be within twice the distance of our own bfloat16 from float32; texts must have the same ids.

    For q8_0 and q4_0, llama.cpp rounds activations to int8: the bound grows by the error of 8 bits, 2^-7 of the largest
    logit."""
    import llama_cpp as llama

    home = data_path("weights/stories260K")
    tokenizer = Tokenizer.load(home / "tok512.bin")
    path = tmp_path / "m.gguf"
    convert(home / "stories260K.bin", path, tokenizer=tokenizer, dtype=getattr(torch, dtype, dtype))
    theirs = llama.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, n_gpu_layers=0)
    for text in (sample for sample in TEXTS if sample.strip() and "\x00" not in sample):
        assert theirs.tokenize(text.encode(), add_bos=True, special=False) == tokenizer.encode(
            text, eos=False
        )
    ids = tokenizer.encode("Once upon a time, there was a little girl named Lily.", eos=False)
    theirs.eval(ids)
    logits = torch.tensor(numpy.array(theirs.scores[: len(ids)]))
    row = torch.tensor([ids])
    with torch.no_grad():
        exact, rounded = (load_model(path, dtype=d)(row)[0].float() for d in (torch.float32, torch.bfloat16))
    bound = 2 * (rounded - exact).abs().max() + (0 if dtype == "bfloat16" else 2.0**-7 * exact.abs().max())
    assert (logits - exact).abs().max() <= bound
