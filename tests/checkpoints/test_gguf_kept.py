"""Models loaded from GGUF files keep the files' codes, also in the embedding and output layers, and report so."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headway.api import load
from headway.checkpoints import convert, inspect, load_folder, load_model, save_folder
from headway.checkpoints.formats.gguf.model import write_model
from headway.cli import run
from headway.errors import CheckpointError, ConfigError
from headway.generate import Reader
from headway.models import Decoder, ModelSpec, build
from headway.models.tensor_parallel import shard
from headway.nn import Keeps
from headway.parallel import Exchange, TensorParallel
from headway.positions import Rotary
from headway.storage.gguf import read_gguf
from headway.storage.gguf_blocks import CODED, TYPES, BlockType, quantize
from headway.surgery import quantize_folder
from tests.checkpoints import gguf_files
from tests.parallel.simulation import simulate

BY_NAME = {kind.name: kind for kind in TYPES}
SIZE: dict[str, Any] = {"vocab": 83, "width": 256, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 512}
SPECS = {
    "llama": ModelSpec.of("llama", **SIZE, positions=Rotary(pairing="adjacent"), tied=False, init_std=0.2),
    "qwen2, tied": ModelSpec.of("qwen2", **SIZE, tied=True, init_std=0.2),
}
FORMS = CODED
IDS = torch.randint(83, (2, 40), generator=torch.Generator().manual_seed(0))


def some_blocks(kind: BlockType, shape: torch.Size) -> Tensor:
    """Returns blocks of a type that is only read: random codes with a scale of 0.01."""
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(
        0, 256, (shape.numel() // kind.block, kind.nbytes), generator=generator, dtype=torch.uint8
    )
    raw[:, :2] = torch.tensor([0.01]).half().view(torch.uint8)
    return raw.view(shape[0], -1)


def file(path: Path, spec: str, kind: str, **overrides: str) -> Path:
    """Writes a file whose matrices are of type `kind`; `overrides` maps ends of names to other types."""
    state = build(SPECS[spec], seed=0).state_dict()
    types = {name: BY_NAME[kind] for name, value in state.items() if value.dim() > 1}
    for end, override in overrides.items():
        types |= {name: BY_NAME[override] for name in types if name.endswith(f"{end}.weight")}
    coded = {name: block_type for name, block_type in types.items() if block_type.unpack is not None}
    rows = {
        name: quantize(state[name], block_type)
        if block_type.pack
        else some_blocks(block_type, state[name].shape)
        for name, block_type in coded.items()
    }
    write_model(path, SPECS[spec], {**state, **rows}, None, packed=coded)
    return path


def layers(model: Any) -> dict[str, Keeps]:
    """Returns the layers with a matrix of their own, by name."""
    modules = {name: module for name, module in model.named_modules() if isinstance(module, Keeps)}
    return {name: module for name, module in modules.items() if getattr(module, "embedding", None) is None}


def held(model: Any) -> int:
    """Returns the number of bytes of a model's parameters and buffers."""
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", FORMS)
def test_every_matrix_stays_codes_with_the_numbers_of_the_file(tmp_path: Path, spec: str, kind: str) -> None:
    """A model takes at most 1.04 times the bytes of its file: each row has a factor, and panels have 16 rows."""
    path = file(tmp_path / "m.gguf", spec, kind)
    model, plain = load_model(path), load_folder(path).tensors
    assert {layer.kept.name for layer in layers(model).values()} == {FORMS[kind]}
    for name, layer in layers(model).items():
        assert torch.equal(layer.matrix, plain[f"{name}.weight"])
    stored = read_gguf(path).tensors.values()
    assert held(model) <= 1.04 * sum(entry.nbytes for entry in stored)
    exact = load_model(path, dequantize=True)
    assert not any(layer.coded for layer in layers(exact).values())
    assert held(exact) > 3 * held(model)
    assert all(torch.equal(value, plain[name]) for name, value in exact.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("kind", FORMS)
def test_it_is_the_function_of_the_file_but_for_inputs_in_8_bits(
    tmp_path: Path, spec: str, kind: str
) -> None:
    """Logits, of whole rows and of native decoding steps, are off by less than 8 times what weights and states in
    bfloat16 change: with 8 bits for the largest of a group, numbers a quarter as large have 2 bits less."""
    path = file(tmp_path / "m.gguf", spec, kind)
    model, exact = load_model(path), load_model(path, dequantize=True)
    expected, actual = exact(IDS), model(IDS)
    rounded = load_model(path, dequantize=True, dtype=torch.bfloat16)(IDS).float()
    bound = 8 * (rounded - expected).norm() / expected.norm()
    assert 0 < (actual - expected).norm() < bound * expected.norm()
    reader = Reader(model)
    assert reader.steps.what == "native"
    table, steps = reader.cache.open(), []
    for ids in (IDS[0, :30].tolist(), *([int(i)] for i in IDS[0, 30:])):
        steps.append(reader.read([(table, ids)], [[len(ids) - 1]])[0])
        reader.end()
    assert 0 < (torch.stack(steps) - expected[0, 29:]).norm() < bound * expected[0, 29:].norm()


def test_types_without_codes_are_numbers_and_the_others_stay(tmp_path: Path) -> None:
    path = file(tmp_path / "m.gguf", "llama", "Q4_0", o_proj="BF16", lm_head="Q8_0", embed_tokens="F16")
    model = load_model(path)
    kinds = {name: layer.kept.name for name, layer in layers(model).items()}
    assert {kinds[f"model.layers.{i}.self_attn.o_proj"] for i in (0, 1)} == {"plain"}
    assert (kinds["lm_head"], kinds["model.embed_tokens"]) == ("int8", "plain")
    assert [*kinds.values()].count("int4") == 12
    assert inspect(path)["weights"] == "12 layers as Q4_0, 1 layer as Q8_0"
    with pytest.raises(CheckpointError, match="different bits or group sizes"):
        save_folder(tmp_path / "m", model)


def test_reports_say_which_weights_are_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = file(tmp_path / "m.gguf", "llama", "Q4_0", lm_head="Q8_0")
    assert run(["inspect", str(path)]) == 0
    assert "weights        15 layers as Q4_0, 1 layer as Q8_0" in capsys.readouterr().out
    assert run(["plan", str(path), "--context", "64"]) == 0
    printed = capsys.readouterr().out
    assert "weights are 15 layers as Q4_0, 1 layer as Q8_0" in printed
    lm_head = load(path).model.lm_head
    assert lm_head.kept.name == "int8"
    assert "int8" in repr(lm_head)
    assert not load(path, dequantize=True).model.lm_head.coded


def test_plan_counts_the_bytes_that_the_model_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from headway.cli.plan import find_model
    from headway.models.cost import kept_bytes

    for spec in SPECS:
        path = file(tmp_path / "m.gguf", spec, "Q4_K", down_proj="Q6_K", o_proj="Q8_0", up_proj="Q5_K")
        model_spec, kept = find_model(str(path))
        assert kept is not None
        assert sum(kept_bytes(model_spec, kept).values()) == held(load_model(path))


def test_blocks_of_256_have_no_place_in_a_folder(tmp_path: Path) -> None:
    model = load_model(file(tmp_path / "m.gguf", "llama", "Q4_K"))
    with pytest.raises(CheckpointError, match=r"q_proj has weights in q4_K.*dequantize=True"):
        save_folder(tmp_path / "m", model)


@torch.no_grad()
def test_a_mixed_file_is_what_its_types_are(tmp_path: Path) -> None:
    """As in llama.cpp's mixes, layers with the same input have different types, and share its rounding."""
    path = file(
        tmp_path / "m.gguf", "llama", "Q4_K", v_proj="Q6_K", down_proj="Q6_K", lm_head="Q6_K", k_proj="Q5_0"
    )
    model, exact = load_model(path), load_model(path, dequantize=True)
    kinds = [layer.kept.name for layer in layers(model).values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"q4_K": 9, "q6_K": 5, "plain": 2}
    assert Reader(model).steps.what == "native"
    assert (model(IDS) - exact(IDS)).norm() < 0.1 * exact(IDS).norm()


def test_a_folder_of_it_has_its_codes_and_plain_embeddings(tmp_path: Path) -> None:
    path = file(tmp_path / "m.gguf", "llama", "Q4_0")
    model = load_model(path)
    save_folder(tmp_path / "m", model, keep_pairing=True)
    reloaded = load_model(tmp_path / "m")
    for name, layer in layers(model).items():
        twin = layers(reloaded)[name]
        assert torch.equal(twin.matrix, layer.matrix)
        assert twin.coded == (name != "model.embed_tokens")


@pytest.mark.parametrize("spec", SPECS)
def test_from_file_to_file_nothing_changes(tmp_path: Path, spec: str) -> None:
    """A conversion to a folder writes the numbers of the codes, and rounds none."""
    path = file(tmp_path / "m.gguf", spec, "Q4_0", down_proj="Q6_K", o_proj="BF16")
    result = convert(path, tmp_path / "2.gguf")
    assert result.rounding is None
    count = 12 if spec == "llama" else 11
    assert f"{count} layers of Q4_0: keep their codes, as Q4_0 with scales in float16" in map(
        str, result.choices
    )
    first, second = (read_gguf(tmp_path / name) for name in ("m.gguf", "2.gguf"))
    kinds = [{name: tensor.type for name, tensor in gguf.tensors.items()} for gguf in (first, second)]
    assert kinds[0] == kinds[1]
    before, after = (load_folder(tmp_path / name).stored for name in ("m.gguf", "2.gguf"))
    assert all(torch.equal(before[name], after[name]) for name in before)
    unpacked = convert(path, tmp_path / "m")
    assert unpacked.rounding is None
    assert any("become numbers of float32" in choice for choice in map(str, unpacked.choices))


def test_codes_are_not_quantized_again(tmp_path: Path) -> None:
    path = file(tmp_path / "m.gguf", "llama", "Q8_0")
    with pytest.raises(ConfigError, match="has weights of Q8_0 already"):
        quantize_folder(load_folder(path), tmp_path / "m", "int4")


@torch.no_grad()
def test_ranks_share_an_embedding_of_codes(tmp_path: Path) -> None:
    """Each rank has its rows of it, and of the output layer that is tied to it."""
    spec = ModelSpec.of("qwen2", **{**SIZE, "vocab": 80}, tied=True, init_std=0.2)
    state = build(spec, seed=0).state_dict()
    write_model(tmp_path / "m.gguf", spec, state, BY_NAME["Q8_0"])
    ids = IDS[:, :12] % 80
    path = tmp_path / "m.gguf"
    expected, exact = load_model(path)(ids), load_model(path, dequantize=True)(ids)

    def rank(exchange: Exchange) -> tuple[Tensor, int]:
        model = load_model(tmp_path / "m.gguf")
        shard(model, TensorParallel(exchange))
        assert isinstance(model, Decoder)
        assert model.model.embed_tokens is not None
        return model(ids), model.model.embed_tokens.kept.shape[0]

    for actual, rows in simulate(2, rank):
        assert rows == 40
        assert (actual - exact).norm() < 1.5 * (expected - exact).norm()


@pytest.mark.parametrize("kind", [BY_NAME[name] for name in CODED], ids=lambda kind: kind.name)
def test_rows_of_a_table_of_codes_are_those_of_its_numbers(kind: BlockType) -> None:
    """Bit for bit, for any shape of ids, repeated and in any order, also if the rows do not fill whole panels."""
    from headway.nn.weights import from_codes
    from headway.storage.gguf_blocks import codes

    table = (
        torch.randn(37, 256, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 37)[:, None]
    )
    weight = from_codes(codes(quantize(table, kind), kind))
    ids = torch.tensor([[36, 0, 36], [15, 16, 5]])
    assert torch.equal(weight.rows(ids), weight.dequantize()[ids])
    assert weight.rows(ids[:0]).shape == (0, 3, 256)


def test_a_matrix_whose_columns_lie_elsewhere_is_read_as_numbers(tmp_path: Path) -> None:
    """In GGUF, the output of Qwen3.5's delta layers has value heads in another order; it is written as numbers."""
    spec = gguf_files.SPECS["qwen3.5"]
    write_model(tmp_path / "m.gguf", spec, gguf_files.weights(spec), BY_NAME["Q8_0"])
    folder = load_folder(tmp_path / "m.gguf")
    coded = {name.removeprefix("model.layers.") for name in folder.quantized}
    assert {"0.self_attn.v_proj", "0.self_attn.q_proj", "3.self_attn.o_proj"} <= coded
    assert "0.self_attn.o_proj" not in coded
    model = load_model(tmp_path / "m.gguf")
    for name, layer in layers(model).items():
        assert torch.equal(layer.matrix, folder.tensors[f"{name}.weight"])
    convert(tmp_path / "m.gguf", tmp_path / "2.gguf", dtype="q8_0")
    types = {name: form.type.name for name, form in read_gguf(tmp_path / "2.gguf").tensors.items()}
    assert (types["blk.0.ssm_out.weight"], types["blk.0.attn_qkv.weight"]) == ("F32", "Q8_0")
