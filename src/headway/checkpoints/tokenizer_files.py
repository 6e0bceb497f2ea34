"""The tokenizer of a folder as it is, for another folder."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from headway.checkpoints.folder import TOKENIZER_FILES, Folder
from headway.checkpoints.storage.files import json_text
from headway.checkpoints.storage.reading import read_json


@dataclass(frozen=True)
class TokenizerFiles:
    """The tokenizer of a folder, file by file: what `save_folder` and `save_state` take.

    With `context`, its `model_max_length` becomes that, where it has one."""

    folder: Folder
    context: int | None = None

    @property
    def bos(self) -> int | None:
        """Id that begins a text, by generation_config.json."""
        return self.folder.generation.get("bos_token_id")

    @property
    def eos(self) -> int | None:
        """Id that ends a text, by generation_config.json."""
        return self.folder.generation.get("eos_token_id")

    def save(self, folder: Path) -> None:
        """Copy its files into `folder`."""
        for file in sorted(self.folder.path.iterdir()):
            if not TOKENIZER_FILES.match(file.name):
                continue
            shutil.copy(file, folder / file.name)
            if self.context is not None and file.name == "tokenizer_config.json":
                config = read_json(file)
                if "model_max_length" in config:
                    text = json_text({**config, "model_max_length": self.context})
                    (folder / file.name).write_text(text, encoding="utf-8")
