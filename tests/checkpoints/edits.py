"""Changes of the files of a folder: keys of its JSON, tensors of its weights."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor


def set_keys(folder: Path, name: str = "config.json", **changes: Any) -> None:
    file = folder / name
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def set_tensors(
    folder: Path, change: Callable[[dict[str, Tensor]], object], name: str = "model.safetensors"
) -> Path:
    """Passes the tensors to `change`, which changes them in place, saves them, and returns the folder."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name, {"format": "pt"})
    return folder
