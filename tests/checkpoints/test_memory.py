"""Memory of loading: its peak is at most 1.2 times the result, measured in a process of its own; opening needs none."""

import json
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from headway.checkpoints import change_pairing, config_from_spec, load_folder, save_folder
from headway.checkpoints.formats.meta import NAMES
from headway.checkpoints.hf.layouts.tensors import exported
from headway.models import ModelSpec, build
from headway.models.quantize import weight_kind
from headway.nn import block_linears
from headway.nn.weights import from_codes
from headway.positions import Rotary
from headway.quantization import quantize_weights

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc"
)
ALLOWED = 1.2
PEAK = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
import headway.checkpoints as c
from headway.checkpoints import folder, restore
from headway.checkpoints.formats import llama2c, meta
from headway.models import ModelSpec
from headway.generate import Reader
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(name + ":")) * 1024
folder_path, small = sys.argv[1], sys.argv[2]
def load(folder_path):
    {how}
load(small)                      # what is imported and allocated once is no part of a checkpoint
Path("/proc/self/clear_refs").write_text("5")
before = status("VmRSS")
model = load(folder_path)
peak = status("VmHWM") - before
size = sum(t.nbytes for t in (*model.parameters(), *model.buffers()))
print(peak, size)
"""
LOADS = {
    "as it is": "return c.load_model(folder_path)",
    "decoding": "m = c.load_model(folder_path); r = Reader(m); t = r.cache.open(); "
    "[(r.read([(t, [i])], [[0]]), r.end()) for i in (1, 2, 3)]; assert r.steps.what == 'native'; return m",
    "in float32": "return c.load_model(folder_path, dtype=torch.float32)",
    "turned": "f = c.load_folder(folder_path); state, spec = c.change_pairing(f.tensors, f.spec, 'adjacent'); "
    "return restore.fill(spec, state, dtype=torch.float32)",
    "Meta's": "m = meta.read_pickled(folder_path, allow_pickle=True); "
    "return restore.fill(m.spec, m.state(), dtype=next(iter(m.weights.forms.values())).dtype)",
    "llama2.c's": "m = llama2c.read(folder_path + '/m.bin'); return restore.fill(m.spec, m.state())",
}


def spec_of(width, layers=3, vocab=4096, tied=False) -> ModelSpec:
    return ModelSpec.of("llama", vocab=vocab, width=width, layers=layers, heads=8, kv_heads=4, hidden=3 * width,
                        tied=tied, positions=Rotary(10000.0, pairing="halves"))  # fmt: skip


def measure(tmp_path, how, put) -> float:
    """Returns the peak of loading what `put(folder, width)` writes, relative to the size of the result."""
    for name, width in (("large", 1024), ("small", 32)):
        put(tmp_path / name, width)
    code = PEAK.replace("{how}", LOADS[how])
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "large"), str(tmp_path / "small")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    peak, size = map(int, process.stdout.split())
    assert size > 50e6  # large against the noise of an allocator

    return peak / size


def a_folder(dtype=torch.float32, shard_bytes=10**12, tied=False, both=False):
    def put(folder, width):
        model = build(spec_of(width, tied=tied), seed=0)
        save_folder(folder, model, dtype=dtype, shard_bytes=shard_bytes)
        if both:
            state = load_file(folder / "model.safetensors")
            state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
            save_file(state, folder / "model.safetensors", metadata={"format": "pt"})

    return put


def a_quantized_folder(weights):
    def rounded(weight):
        matrix = quantize_weights(weight, *weight_kind(weights))
        return replace(matrix, scale=matrix.scale.bfloat16().float())

    def put(folder, width):
        model = build(spec_of(width, layers=10), dtype=torch.bfloat16, seed=0).requires_grad_(False)
        for layer in block_linears(model).values():
            layer.keep(from_codes(rounded(layer.matrix)))
        save_folder(folder, model)

    return put


def test_the_peak_of_loading_turned_and_cast_shards(tmp_path):
    assert measure(tmp_path, "turned", a_folder(torch.bfloat16, 8_000_000)) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "put"),
    [
        ("as it is", a_folder()),
        ("as it is", a_folder(shard_bytes=8_000_000)),
        ("as it is", a_folder(tied=True)),
        ("as it is", a_folder(tied=True, both=True)),
        ("in float32", a_folder(torch.bfloat16)),
        ("turned", a_folder()),
    ],
    ids=["one file", "shards", "tied", "tied, stored twice", "cast", "turned"],
)
def test_the_peak_of_loading_a_folder(tmp_path, how, put):
    assert measure(tmp_path, how, put) < ALLOWED


@pytest.mark.slow
@pytest.mark.parametrize("how", ["as it is", "decoding"])
@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_peak_of_a_folder_of_few_bits_also_when_it_decodes(tmp_path, weights, how):
    """A decoding step reads the weights in place: it makes no second copy of them."""
    put = a_folder(torch.bfloat16) if weights == "bf16" else a_quantized_folder(weights)
    assert measure(tmp_path, how, put) < ALLOWED


@pytest.mark.slow
def test_the_peak_of_loading_meta_s_file(tmp_path):
    def put(folder, width):
        state, spec = change_pairing(build(spec_of(width), seed=0).state_dict(), spec_of(width), "adjacent")
        folder.mkdir()
        torch.save(dict(exported(NAMES, state, spec)), folder / "consolidated.00.pth")
        (folder / "params.json").write_text(json.dumps({"n_heads": 8, "n_kv_heads": 4}))

    assert measure(tmp_path, "Meta's", put) < ALLOWED


@pytest.mark.slow
def test_the_peak_of_loading_llama2_c_s_file(tmp_path):
    def put(folder, width):
        folder.mkdir()
        sizes = (width, 3 * width, 3, 8, 4, 4096, 16)
        d = width // 8
        angles = torch.outer(torch.arange(16), 10000.0 ** -(torch.arange(0, d, 2) / d))
        count = 4096 * width + 3 * (2 * width + 3 * width * width + 9 * width * width) + width
        with open(folder / "m.bin", "wb") as file:
            file.write(struct.pack("<7i", *sizes))
            file.write(torch.randn(count).numpy().tobytes())
            file.write(torch.cat((angles.cos(), angles.sin())).float().numpy().tobytes())

    assert measure(tmp_path, "llama2.c's", put) < ALLOWED


def sparse_folder(folder: Path, size: int) -> ModelSpec:
    """Writes a folder with about `size` bytes of zeros that take up no disk space, and returns its spec."""
    spec = spec_of(2048, layers=round(size / 2 / 52e6), vocab=32000)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_from_spec(spec)))
    header, start = {}, 0
    for name, value in build(spec, device="meta").state_dict().items():
        end = start + 2 * value.numel()
        header[name] = {"dtype": "BF16", "shape": list(value.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + start)
    return spec


OPEN = """
import sys
from pathlib import Path
import headway.checkpoints as c
from headway.cli import run
def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(l.split()[1]) for l in lines if l.startswith(name + ":")) * 1024
before = status("VmRSS")
found = c.load_folder(sys.argv[1])
values = dict(found.tensors)     # mapped: every value is there, none is read
assert run(["inspect", sys.argv[1]]) == 0
print(status("VmHWM") - before, found.tensors.nbytes, float(values["model.norm.weight"][7]), file=sys.stderr)
"""


def test_a_folder_of_2_gb_opens_without_being_read(tmp_path):
    sparse_folder(tmp_path / "m", 2 * 10**9)
    process = subprocess.run(
        [sys.executable, "-c", OPEN, str(tmp_path / "m")],
        capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False, timeout=60,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-2000:]
    assert "2.03 GiB in 1 file: 174 tensors bfloat16" in process.stdout
    grown, size, value = process.stderr.split()[-3:]
    assert int(size) > 1.9e9
    assert int(grown) < 0.1 * int(size)
    assert float(value) == 0.0


def test_a_value_that_is_handed_out_is_one_s_own(tmp_path):
    """Writing to it changes neither the file nor what is read later."""
    save_folder(tmp_path / "m", build(spec_of(32), seed=0))
    tensors = load_folder(tmp_path / "m").tensors
    before = (tmp_path / "m" / "model.safetensors").read_bytes()
    value = tensors["model.norm.weight"]
    value.fill_(7.0)
    del value
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == before
    assert not (tensors["model.norm.weight"] == 7.0).any()
