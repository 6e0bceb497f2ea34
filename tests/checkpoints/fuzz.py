"""Broken checkpoints by the thousand: a seed is a folder, mutated with its structure in mind, and loaded under a limit.

    python -m tests.checkpoints.fuzz FIRST COUNT      # prints a JSON list of the seeds that did not fail well

To fail well is to raise a HeadwayError that names a file of the folder, in bounded time, text and memory.
"""

import copy
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import traceback
from pathlib import Path

import torch

from headway.checkpoints import inspect, load_model, open_tensors, save_folder
from headway.checkpoints.meta import read_pickled
from headway.errors import HeadwayError
from headway.models import ModelSpec
from headway.patterns import Causal, Window
from headway.positions import DynamicNTK, Linear, Llama3, LongRope, Rotary, YaRN

SECONDS, MEMORY, TEXT = 5.0, 600 << 20, 6000
EXTREMES = [
    None, True, False, 0, 1, -1, 2, 7, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**9, 10**12, 10**40,
    -(10**18), 0.5, -0.5, 1.0, 1e-320, 1e308, -1e308, float("inf"), float("-inf"), float("nan"),
    "", "1", "true", "llama", "F32", "\x00", "\ud800", "../../etc/passwd", "/etc/passwd", "x" * 3000,
    [], [[]], [1], [-1], [2**62, 2**62], [1.5], ["a"], [None] * 3, [0] * 100, [[[[[[{}]]]]]],
    {}, {"a": 1}, {"pattern": "Causal()"}, {"kind": "Rotary"}, {"rope_type": "yarn"},
]  # fmt: skip
SCALINGS = (
    None, Linear(2.0), DynamicNTK(2.0, 64), YaRN(4.0, 16), Llama3(8.0, 1.0, 4.0, 16),
    LongRope((1.0, 1.1), (1.0, 2.0), 16, 4.0),
)  # fmt: skip
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "ministral")


def whole_folders(root: Path) -> list[Path]:
    """Small folders that load: every family and scaling, one of model_type "headway", shards, Meta's parts."""
    made = []
    for i, family in enumerate(FAMILIES * 2):
        patterns = (Window.last(3), Causal()) if family in ("qwen2", "ministral") else Causal()
        spec = ModelSpec.of(
            family, vocab=11, width=8, layers=2, heads=2, kv_heads=1, hidden=8, patterns=patterns, tied=i % 2 == 0,
            head_dim=4, trained_context=64, positions=Rotary(pairing="halves", scaling=SCALINGS[i % len(SCALINGS)]),
        )  # fmt: skip
        spec = spec if i != 9 else ModelSpec(**{**vars(spec), "positions": Rotary(pairing="adjacent")})
        made.append(root / f"{i}")
        save_folder(
            made[-1], spec.build(seed=0), keep_pairing=True, shard_bytes=600 if i % 3 == 0 else 10**9,
            generation={"eos_token_id": 2},
        )  # fmt: skip
        vocab = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}
        (made[-1] / "tokenizer.json").write_text(json.dumps(vocab))
    return made


def nodes(value, path=()):
    """Every place in a JSON value, as (holder, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from nodes(inner)


def mutate_json(value, r: random.Random):
    """The value with one to three places changed."""
    value = copy.deepcopy(value)
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        places = list(nodes(value))
        if not places:
            return value
        holder, key = r.choice(places)
        kind = r.randrange(7)
        if kind <= 2:
            holder[key] = copy.deepcopy(r.choice(EXTREMES))
        elif kind == 3 and isinstance(holder, dict):
            name = r.choice((key + "x", key[:-1], key.upper(), r.choice(places)[1], "\x1b[31m", "\ud83d"))
            holder[str(name)] = holder.pop(key)
        elif kind == 4:
            del holder[key]
        elif kind == 5:
            other, place = r.choice(places)
            holder[key] = copy.deepcopy(other[place])
        elif isinstance(holder[key], int | float):
            holder[key] = holder[key] * r.choice((-1, 2, 3, 1000, 10**9)) + r.choice((0, 1, 0.5))
        else:
            holder[key] = [holder[key]]
    return value


def mutate_bytes(raw: bytes, r: random.Random) -> bytes:
    """The bytes with bits flipped, a part cut, doubled or put elsewhere."""
    data = bytearray(raw)
    kind = r.randrange(6)
    reach = len(data) if r.random() < 0.5 else min(len(data), 64)
    if not data or kind == 0:
        return bytes(data[: r.randrange(len(data) + 1)])
    if kind == 1:
        for _ in range(r.choice((1, 1, 3, 20))):
            data[r.randrange(reach)] ^= 1 << r.randrange(8)
        return bytes(data)
    a, b = sorted(r.randrange(len(data) + 1) for _ in range(2))
    if kind == 2:
        return bytes(data[:a] + data[b:])
    if kind == 3:
        return bytes(data[:b] + data[a:b] + data[b:])
    if kind == 4:
        extra = (b"\xff", b"\x00" * 9, b'"', b"{", b"[" * 5000, b" " * 70000, b"\xef\xbb\xbf", b"9" * 5000)
        return bytes(data[:a] + r.choice(extra) + data[a:])
    return bytes(data[a:] + data[:a])


def mutate_tensors(raw: bytes, r: random.Random) -> bytes:
    """A safetensors file with another header, another length of it, or other bytes."""
    length = struct.unpack("<Q", raw[:8])[0]
    kind = r.randrange(4)
    if kind == 0:
        return mutate_bytes(raw, r)
    if kind == 1:
        claimed = r.choice(
            (0, 1, length - 1, length + 1, 2**63, 2**64 - 1, 10**10, 2**31, len(raw), len(raw) - 8)
        )
        return struct.pack("<Q", claimed) + raw[8:]
    if kind == 2:
        text = mutate_bytes(raw[8 : 8 + length], r)
    else:
        text = json.dumps(mutate_json(json.loads(raw[8 : 8 + length]), r)).encode()
    return struct.pack("<Q", len(text)) + text + raw[8 + length :]


def mutated(source: Path, target: Path, r: random.Random) -> Path:
    """A copy of a folder with one file broken."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    names = sorted(p.name for p in target.iterdir())
    name = r.choice(("config.json", "config.json", *names))
    file = target / name
    raw = file.read_bytes()
    if name.endswith(".safetensors"):
        file.write_bytes(mutate_tensors(raw, r))
    elif r.random() < 0.25:
        file.write_bytes(mutate_bytes(raw, r))
    else:
        file.write_text(json.dumps(mutate_json(json.loads(raw), r)))
    return target


def mutated_meta(target: Path, r: random.Random) -> Path:
    """Meta's file with params.json, the pickle or its tensors changed."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir()
    g = torch.Generator().manual_seed(0)
    shapes = {
        "tok_embeddings": (11, 8), "norm": (8,), "output": (11, 8), "layers.0.attention_norm": (8,),
        "layers.0.ffn_norm": (8,), **{f"layers.0.attention.{n}": (8, 8) for n in ("wq", "wk", "wv", "wo")},
        **{f"layers.0.feed_forward.{n}": (8, 8) for n in ("w1", "w2", "w3")},
    }  # fmt: skip
    tensors = {f"{name}.weight": torch.randn(shape, generator=g) for name, shape in shapes.items()}
    params = {"dim": 8, "n_heads": 2, "n_layers": 1, "norm_eps": 1e-5, "vocab_size": -1, "rope_theta": 1e4}
    kind = r.randrange(4)
    if kind == 0:
        params = mutate_json(params, r)
    if kind == 1:
        name = r.choice(list(tensors))
        other = r.choice(("layers.999999.x.weight", "layers.7.attention.wq.weight", "\x00", name + "x", ""))
        changed = r.choice(
            (tensors[name].flatten(), tensors[name][:3], torch.ones(()), torch.ones(0, 8), 3, None)
        )
        tensors = {**tensors, **r.choice(({name: changed}, {other: tensors.pop(name)}))}
    file = target / "consolidated.00.pth"
    torch.save(tensors, file)
    if kind >= 2:
        file.write_bytes(mutate_bytes(file.read_bytes(), r))
    (target / "params.json").write_text(json.dumps(params))
    return target


def fault(seed: int, folders: list[Path], scratch: Path) -> str | None:
    """What is wrong with how one broken checkpoint fails; None where it fails well, or loads."""
    r = random.Random(seed)
    is_meta = seed % 16 == 0
    folder = mutated_meta(scratch, r) if is_meta else mutated(r.choice(folders), scratch, r)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        if is_meta:
            dict(read_pickled(folder, layout="meta", allow_pickle=True).weights)
        else:
            load_model(folder)
            inspect(folder)
            dict(open_tensors(folder))
    except HeadwayError as error:
        text = str(error)
        if str(folder) not in text:
            return f"names no file: {text[:300]}"
        return f"{len(text)} characters: {text[:200]}" if len(text) > TEXT else None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None


def too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {SECONDS:g} seconds")


def main(first: int, count: int) -> list[tuple[int, str]]:
    """The seeds from `first` that did not fail well, under a limit of memory."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, too_long)
    found = []
    with tempfile.TemporaryDirectory() as root:
        folders = whole_folders(Path(root))
        for folder in folders:
            load_model(folder)
            inspect(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for seed in range(first, first + count):
            if (said := fault(seed, folders, Path(root) / "broken")) is not None:
                found.append((seed, said))
    return found


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), int(sys.argv[2]))))
