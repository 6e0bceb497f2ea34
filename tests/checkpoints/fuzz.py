"""Broken checkpoints by the thousand: each seed mutates a folder with its structure in mind and loads it under limits.

    python -m tests.checkpoints.fuzz GROUP[,GROUP] FIRST COUNT   # prints the seeds that did not fail well, as JSON

To fail well is to raise a HeadwayError that names the folder and one of its files, in bounded time, memory and length.
"""

import faulthandler
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from headway.checkpoints import inspect, load_folder
from headway.checkpoints.formats.meta import read_pickled
from headway.checkpoints.restore import build_model
from headway.errors import HeadwayError
from headway.models import Head
from headway.storage.tensors import open_tensors
from headway.text import MarianTokenizer, Tokenizer
from tests.checkpoints import broken_folders
from tests.checkpoints.broken_tokenizers import tokenizers
from tests.checkpoints.mutations import mutate_file

SECONDS, MEMORY, TEXT = 5.0, 600 << 20, 6000
"""Limits: seconds of CPU time, bytes of address space beyond what intact folders take, characters of the error."""
SHARED = Path("/dev/shm")
"""A file system in memory, used if it exists: nothing waits for a disk."""


def load_whole(folder: Path) -> None:
    """Does all that reading a model folder involves: config, header, values, and an encoder with another head."""
    loaded = load_folder(folder)
    build_model(loaded)
    inspect(folder)
    dict(open_tensors(folder))
    if not loaded.spec.causal:
        load_folder(folder, head=Head("states"))


def load_tokenizer(folder: Path) -> None:
    """Loads a tokenizer, and encodes and decodes with it."""
    kind = MarianTokenizer if (folder / "source.spm").exists() else Tokenizer
    tokenizer = kind.load(folder)
    tokenizer.encode("a cab </s> \U0001f642")
    tokenizer.decode([tokenizer.eos or 0])


def load_meta(folder: Path) -> None:
    """Reads Meta's checkpoint with all its values."""
    dict(read_pickled(folder, allow_pickle=True).state())


class Group(NamedTuple):
    """How intact folders of one kind are made, and how one is read."""

    make: Callable[[Path], list[Path]]
    load: Callable[[Path], None]


def meta(root: Path) -> list[Path]:
    """Writes Meta's consolidated.00.pth with its params.json."""
    root.mkdir()
    g = torch.Generator().manual_seed(0)
    shapes = {
        "tok_embeddings": (11, 8), "norm": (8,), "output": (11, 8), "layers.0.attention_norm": (8,),
        "layers.0.ffn_norm": (8,), **{f"layers.0.attention.{n}": (8, 8) for n in ("wq", "wk", "wv", "wo")},
        **{f"layers.0.feed_forward.{n}": (8, 8) for n in ("w1", "w2", "w3")},
    }  # fmt: skip
    torch.save(
        {f"{name}.weight": torch.randn(shape, generator=g) for name, shape in shapes.items()},
        root / "consolidated.00.pth",
    )
    params = {"dim": 8, "n_heads": 2, "n_layers": 1, "norm_eps": 1e-5, "vocab_size": -1, "rope_theta": 1e4}
    (root / "params.json").write_text(json.dumps(params))
    return [root]


GROUPS = {
    "llama": Group(broken_folders.llama, load_whole),
    "encoders": Group(broken_folders.encoders, load_whole),
    "decoders": Group(broken_folders.decoders, load_whole),
    "pairs": Group(broken_folders.pairs, load_whole),
    "meta": Group(meta, load_meta),
    "tokenizers": Group(tokenizers, load_tokenizer),
}


def broken(group: str, source: Path, target: Path, r: random.Random) -> str:
    """Makes `target` a copy of `source` with one file broken, and returns the name of that file."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)  # the broken file will be a new one
    names = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    preferred = ["config.json"] * 2 if (source / "model.safetensors").exists() else []
    file = target / r.choice([*preferred, *names])
    raw = file.read_bytes()
    file.unlink()
    if r.random() < 0.01:
        return file.name
    if file.suffix == ".pth" and r.random() < 0.5:
        torch.save(mutate_named(torch.load(source / file.name, weights_only=True), r), file)
        return file.name
    keys = broken_folders.keys_of(json.loads(raw)) if file == target / "config.json" else ()
    file.write_bytes(mutate_file(file.name, raw, r, keys))
    return file.name


def mutate_named(tensors: dict, r: random.Random) -> dict:
    """Returns the tensors with one of another name, shape or type."""
    name = r.choice(list(tensors))
    new_name = r.choice(("layers.999999.x.weight", "layers.7.attention.wq.weight", "\x00", name + "x", ""))
    changed = r.choice(
        (tensors[name].flatten(), tensors[name][:3], torch.ones(()), torch.ones(0, 8), 3, None)
    )
    return {**tensors, **r.choice(({name: changed}, {new_name: tensors.pop(name)}))}


def fault(
    group: str, seed: int, folders: list[Path], target: Path, seen: Counter[str] | None = None
) -> str | None:
    """Returns what is wrong with how a broken checkpoint fails, None if it loads or fails well; `seen` counts both."""
    r = random.Random(seed)
    source = r.choice(folders)
    name = broken(group, source, target, r)
    seen = Counter() if seen is None else seen
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        GROUPS[group].load(target)
        seen["loaded"] += 1
    except HeadwayError as error:
        seen["refused"] += 1
        text = str(error)
        if str(target) not in text:
            return f"names no file: {text[:300]}"
        if not any(p in text for p in {name, *(f.name for f in source.iterdir())}):
            return f"names {target.name} and none of its files ({name}): {text[:300]}"
        return f"{len(text)} characters: {text[:200]}" if len(text) > TEXT else None
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(frame.filename).name}:{frame.lineno}) of {name}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {SECONDS:g} seconds")


def main(
    groups: list[str], first: int, count: int
) -> dict[str, tuple[dict[str, int], list[tuple[int, str]]]]:
    """Returns, for each group, how many of the seeds from `first` loaded and were refused, and those that did not fail
    well, under a memory limit. Prints each seed to stderr when it begins: the last one is what killed the process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faulthandler.enable()
    signal.signal(signal.SIGPROF, too_long)
    report = {}
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.exists() else None) as root:
        folders = {group: GROUPS[group].make(Path(root) / group) for group in groups}
        for group, intact in folders.items():
            for folder in intact:
                GROUPS[group].load(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for group, intact in folders.items():
            faults, counts = [], Counter[str]()
            for seed in range(first, first + count):
                print(group, seed, file=sys.stderr)
                if (problem := fault(group, seed, intact, Path(root) / "broken", counts)) is not None:
                    faults.append((seed, problem))
            report[group] = (dict(counts), faults)
    return report


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]))))
