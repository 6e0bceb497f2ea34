"""Broken checkpoints by the thousand: a seed is a folder, mutated with its structure in mind, and loaded under a limit.

    python -m tests.checkpoints.fuzz GROUP[,GROUP] FIRST COUNT   # prints, as JSON, the seeds that did not fail well

To fail well is to raise a HeadwayError that names the folder and a file of it, in bounded time, text and memory.
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
"""Of processor time, of address space beyond what whole folders take, of characters."""
SHARED = Path("/dev/shm")
"""Memory as a file system, where there is one: nothing waits for a disk."""


def load_whole(folder: Path) -> None:
    """All that reading a model folder is: config, header, values, and an encoder for another purpose."""
    read = load_folder(folder)
    build_model(read)
    inspect(folder)
    dict(open_tensors(folder))
    if not read.spec.causal:
        load_folder(folder, head=Head("states"))


def load_tokenizer(folder: Path) -> None:
    """A tokenizer, and a text through it and back."""
    read = MarianTokenizer if (folder / "source.spm").exists() else Tokenizer
    tokenizer = read.load(folder)
    tokenizer.encode("a cab </s> \U0001f642")
    tokenizer.decode([tokenizer.eos or 0])


def load_meta(folder: Path) -> None:
    """Meta's file, values and all."""
    dict(read_pickled(folder, allow_pickle=True).state())


class Group(NamedTuple):
    """Whole folders of one kind, and what reading one is."""

    make: Callable[[Path], list[Path]]
    load: Callable[[Path], None]


def meta(root: Path) -> list[Path]:
    """Meta's consolidated.00.pth with its params.json."""
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
    """Make `target` a copy of a folder with one file broken; its name."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, copy_function=os.link)  # a broken file is a new one
    names = sorted(str(p.relative_to(target)) for p in target.rglob("*") if p.is_file())
    often = ["config.json"] * 2 if (source / "model.safetensors").exists() else []
    file = target / r.choice([*often, *names])
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
    """Named tensors with one of another name, shape or type."""
    name = r.choice(list(tensors))
    other = r.choice(("layers.999999.x.weight", "layers.7.attention.wq.weight", "\x00", name + "x", ""))
    changed = r.choice(
        (tensors[name].flatten(), tensors[name][:3], torch.ones(()), torch.ones(0, 8), 3, None)
    )
    return {**tensors, **r.choice(({name: changed}, {other: tensors.pop(name)}))}


def fault(
    group: str, seed: int, folders: list[Path], target: Path, seen: Counter[str] | None = None
) -> str | None:
    """What is wrong with how one broken checkpoint fails; None where it fails well, or loads. `seen` counts both."""
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
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno}) of {name}"
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return None


def too_long(number: int, frame: object) -> None:
    raise TimeoutError(f"more than {SECONDS:g} seconds")


def main(
    groups: list[str], first: int, count: int
) -> dict[str, tuple[dict[str, int], list[tuple[int, str]]]]:
    """By group: how many of the seeds from `first` loaded and were refused, and those that did not fail well, under a
    limit of memory. Every seed is printed on stderr when it begins: the last one says what the process died of."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    faulthandler.enable()
    signal.signal(signal.SIGPROF, too_long)
    said = {}
    with tempfile.TemporaryDirectory(dir=SHARED if SHARED.exists() else None) as root:
        folders = {group: GROUPS[group].make(Path(root) / group) for group in groups}
        for group, whole in folders.items():
            for folder in whole:
                GROUPS[group].load(folder)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, resource.RLIM_INFINITY))
        for group, whole in folders.items():
            found, seen = [], Counter[str]()
            for seed in range(first, first + count):
                print(group, seed, file=sys.stderr)
                if (wrong := fault(group, seed, whole, Path(root) / "broken", seen)) is not None:
                    found.append((seed, wrong))
            said[group] = (dict(seen), found)
    return said


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3]))))
