"""Records the greedy decoding of stories260K by native steps as one case for driver.cpp: every step with what was
written between it and the one before, and the token that must follow. What kernels have written stays as they wrote it.

    python -m tests.native.arm.decode FILE"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headway.checkpoints import load_model
from headway.cli import run
from headway.models import Decoder
from headway.models.decode_step import DecodeStep
from headway.native import loader
from headway.text import Tokenizer
from tests.data import data_path
from tests.native.arm.calls import made, taken
from tests.native.arm.files import CaseFile

STEPS = 256


class Steps:
    """A library whose steps are written to a file as they are made."""

    def __init__(self, found: loader.Library, to: CaseFile) -> None:
        self._dll, self._to = found.dll, to
        self._left: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dll, name)

    def headway_step(self, *given: Any) -> int:
        call = taken("headway_step", given)
        for at, data in call.before.items():
            old = self._left.get(at, b"")
            if len(old) != len(data):
                self._to.memory(at, data)
                continue
            for offset, size in changes(old, data):
                self._to.patch(at, offset, data[offset : offset + size])
        self._to.links(call.links.items())
        self._to.call(call)
        code = int(self._dll.headway_step(*given))
        made(call)
        self._left.update(call.after)
        return code


def changes(old: bytes, new: bytes) -> Iterator[tuple[int, int]]:
    """Where and how many bytes, whole words, differ."""
    a, b = (np.frombuffer(x.ljust(-(-len(x) // 4) * 4, b"\0"), np.int32) for x in (old, new))
    at = np.flatnonzero(a != b)
    for some in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1):
        if len(some):
            offset = int(some[0]) * 4
            yield offset, min(4 * len(some), len(new) - offset)


def record(model: Decoder, tokenizer: Tokenizer, to: CaseFile) -> list[int]:
    """The ids, and writes their steps."""
    cache = model.make_cache(1)
    step, ids = DecodeStep(model, cache.pages), [1]
    logits = step.lowered.logits
    with torch.inference_mode():
        while len(ids) <= STEPS and (len(ids) == 1 or ids[-1] != 1):
            new = torch.tensor([ids[-1:]])
            with cache.step(cache.next_tokens(1)) as packed:
                found = step.read(packed.take(new), packed.tokens, range(1))
            ids.append(int(found[0].argmax()))
            piece = tokenizer.decode(ids)[len(tokenizer.decode(ids[:-1])) :]
            logits = step.lowered.logits
            begin = logits.untyped_storage().data_ptr()
            to.token(begin, logits.data_ptr() - begin, found.shape[1], ids[-1], piece)
    to.end("stories260K")
    return ids


def main(path: Path) -> int:
    source = data_path("weights/stories260K")
    match = re.search(r"-t 0\.0\n(.*?)\n```", (source / "stories260K.md").read_text(), re.DOTALL)
    assert match is not None
    library = loader.library()
    if library is None:
        print(f"no native steps to record: {loader.why_missing()}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch, CaseFile(path) as to:
        folder = Path(scratch, "hf")
        names = ["convert", source / "stories260K.bin", folder, "--tokenizer", source / "tok512.bin"]
        assert run([str(x) for x in names]) == 0
        found = loader.Found(loader.Library(library.level, library.path, Steps(library, to)))  # type: ignore[arg-type]
        loader.search = lambda: found  # type: ignore[assignment]
        tokenizer = Tokenizer.load(folder)
        text = tokenizer.decode(record(load_model(folder), tokenizer, to))
        if text != match[1]:
            print(f"the text is not the published one at level {library.level}: {text}", file=sys.stderr)
            return 1
        print(f"{to.calls} steps at level {library.level}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
