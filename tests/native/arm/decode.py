"""Records the greedy decoding of stories260K by native steps as one case for driver.cpp: every step with what was
written since the step before, and the token that must follow. What kernels wrote is left to the driver's kernels.

    python -m tests.native.arm.decode FILE"""

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
from tests.native.arm.run import published

STEPS = 256


class Steps:
    """A library whose steps are written to a file as they are made."""

    def __init__(self, library: loader.Library, file: CaseFile) -> None:
        self._dll, self._to = library.dll, file
        self._left: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dll, name)

    def headway_step(self, *arguments: Any) -> int:
        call = taken("headway_step", arguments)
        for address, data in call.before.items():
            old = self._left.get(address, b"")
            if len(old) != len(data):
                self._to.memory(address, data)
                continue
            for offset, size in changes(old, data):
                self._to.patch(address, offset, data[offset : offset + size])
        self._to.links(call.links.items())
        self._to.call(call)
        code = int(self._dll.headway_step(*arguments))
        made(call)
        self._left.update(call.after)
        return code


def changes(old: bytes, new: bytes) -> Iterator[tuple[int, int]]:
    """Yields the offset and the size of each run of differing bytes, in whole words."""
    a, b = (np.frombuffer(x.ljust(-(-len(x) // 4) * 4, b"\0"), np.int32) for x in (old, new))
    differing = np.flatnonzero(a != b)
    for group in np.split(differing, np.flatnonzero(np.diff(differing) > 1) + 1):
        if len(group):
            offset = int(group[0]) * 4
            yield offset, min(4 * len(group), len(new) - offset)


def record(model: Decoder, tokenizer: Tokenizer, file: CaseFile) -> list[int]:
    """Writes the steps of a greedy decoding, and returns its ids."""
    cache = model.make_cache(1)
    step, ids = DecodeStep(model, cache.pages), [1]
    logits = step.lowered.logits
    with torch.inference_mode():
        while len(ids) <= STEPS and (len(ids) == 1 or ids[-1] != 1):
            input_ids = torch.tensor([ids[-1:]])
            with cache.step(cache.next_tokens(1)) as packed:
                scores = step.read(packed.take(input_ids), packed.tokens, range(1))
            ids.append(int(scores[0].argmax()))
            piece = tokenizer.decode(ids)[len(tokenizer.decode(ids[:-1])) :]
            logits = step.lowered.logits
            begin = logits.untyped_storage().data_ptr()
            file.token(begin, logits.data_ptr() - begin, scores.shape[1], ids[-1], piece)
    file.end("stories260K")
    return ids


def main(path: Path) -> int:
    source = data_path("weights/stories260K")
    library = loader.library()
    if library is None:
        print(f"no native steps to record: {loader.why_missing()}", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as scratch, CaseFile(path) as file:
        folder = Path(scratch, "hf")
        arguments = ["convert", source / "stories260K.bin", folder, "--tokenizer", source / "tok512.bin"]
        assert run([str(x) for x in arguments]) == 0
        stub = loader.Found(loader.Library(library.level, library.path, Steps(library, file)))  # type: ignore[arg-type]
        loader.search = lambda: stub  # type: ignore[assignment]
        tokenizer = Tokenizer.load(folder)
        text = tokenizer.decode(record(load_model(folder), tokenizer, file))
        if text != published():
            print(f"the text is not the published one at level {library.level}: {text}", file=sys.stderr)
            return 1
        print(f"{file.calls} steps at level {library.level}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
